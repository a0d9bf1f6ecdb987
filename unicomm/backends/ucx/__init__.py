"""UCX: messages between hosts by whatever network UCX drives, and TCP where it drives none.

backend.py   the backend: its creation and its end; its operations are those of every transport
devices.py   which devices UCX is to use
library.py   libucp as data, and the opened copy
"""
