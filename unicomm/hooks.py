"""Hooks to register with communicators: the recorder's interface, the NaN check, the operation log."""

from unicomm.comms.call import OpArgs
from unicomm.comms.clog import clog
from unicomm.comms.hooks import NanCheckHook, RemovableHandle
from unicomm.comms.ops import OpName
from unicomm.flight_recorder.hook import FlightRecorderHook

__all__ = ["FlightRecorderHook", "NanCheckHook", "OpArgs", "OpName", "RemovableHandle", "clog"]
