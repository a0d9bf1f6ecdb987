"""What backends share whose messages a native transport moves between ranks that share no memory.

A backend (`tcp`, `ucx`) connects its engine; all operations run here. Backends import the names of this face.

operations.py    the base class of such backends, over one native transport
capabilities.py  what all of them can do, and the hints that all of them take
places.py        at which address this rank is reached, and for how long its waits poll
native_call.py   collectives that the native core runs as a whole
supervisor.py    what the fast path asks of its backend
messages.py      messages that complete one by one
"""

from .capabilities import capabilities
from .native_call import has_native_form, input_bytes, run_native
from .operations import TransportBackend
from .places import HOT, find_place

__all__ = [
    "HOT",
    "TransportBackend",
    "capabilities",
    "find_place",
    "has_native_form",
    "input_bytes",
    "run_native",
]
