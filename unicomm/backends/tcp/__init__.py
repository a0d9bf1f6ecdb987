"""TCP: messages between hosts by connections of our own, without a library.

backend.py   the backend: its creation; its operations are those of every transport
"""
