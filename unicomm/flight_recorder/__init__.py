"""The flight recorder: always on, readable from outside, also after the process is gone.

folder.py   where the rings live: chosen, private, bounded, cleaned
writer.py   this process's ring (imports the native core, not torch)
ring.py     reading ring files (imports numpy, not torch)
formats.py  records -> JSON and the pickle that torch's analyzer reads
dumps.py    dumps on demand, when a communicator breaks, on a signal
hook.py     FlightRecorderHook: torchcomms' interface over the ring
show.py     the rings of all ranks as a table
"""

from typing import Any


def __getattr__(name: str) -> Any:
    # The reading half needs neither the native core nor this process's ring, so they are not imported for it.
    if name in ("dump", "dump_folder"):
        from .recording import dumps

        return getattr(dumps, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
