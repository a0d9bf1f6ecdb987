"""UCX: messages between hosts by whatever network UCX drives, and TCP where it drives none.

backend.py       the backend: its creation and its end
operations.py    its operations, over one native worker
native_call.py   collectives that the native core runs as a whole
supervisor.py    what its fast path asks of it
messages.py      messages that complete one by one
devices.py       which devices UCX is to use
library.py       libucp as data, and the opened copy
"""
