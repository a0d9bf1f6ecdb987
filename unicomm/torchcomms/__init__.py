"""torchcomms' interface over unicomm: names, signatures, defaults and semantics of torchcomms 0.3.

    from unicomm import torchcomms                       # ours, by its own name

    import unicomm.torchcomms
    unicomm.torchcomms.install()
    import torchcomms                                    # ours, unless the official package is installed

General layout:

    creation.py        new_comm, and what a program asks about backends
    communicator.py    TorchComm; its operations are those of `unicomm.Communicator`
    batch.py window.py options.py     what it hands out and takes
    hook_arguments.py  what hooks receive
    _comms.py          the names of torchcomms' extension module
    hooks/             FlightRecorderHook, clog, NanCheckHook
    objcol.py          Python objects between ranks
    device_mesh.py     DeviceMesh over communicators
    installation.py    install

unicomm/c10d/torchcomms_import.py has the finder by which `import torchcomms` comes here. docs/torchcomms.md
compares each public name with torchcomms.
"""

from . import _comms as _comms
from . import device_mesh, hooks, objcol
from ._comms import *  # noqa: F403
from ._comms import __all__ as _names
from .creation import is_backend_built, is_backend_registered
from .installation import install

__all__ = ["device_mesh", "hooks", "install", "is_backend_built", "is_backend_registered", "objcol"]
__all__ += [name for name in _names if not name.startswith("_")]
