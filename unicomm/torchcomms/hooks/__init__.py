"""torchcomms' hooks: objects to register with communicators, which then also watch their splits.

General layout:

    fr.py         FlightRecorderHook
    clog.py       clog, the operation log
    nan_check.py  NanCheckHook

As in torchcomms, the name `clog` is the class here, and the module is found under `torchcomms.hooks.clog`.
"""

from .clog import clog
from .fr import FlightRecorderHook
from .nan_check import NanCheckHook

__all__ = ["FlightRecorderHook", "NanCheckHook", "clog"]
