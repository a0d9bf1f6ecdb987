"""Hooks to register with communicators: the recorder's interface, the NaN check, the operation log."""

from unicomm.comms.execution.hooks import NanCheckHook, RemovableHandle
from unicomm.comms.execution.operation_log import clog
from unicomm.comms.operations.call import OpArgs
from unicomm.comms.operations.table import OpName
from unicomm.flight_recorder.recording.hook import FlightRecorderHook

__all__ = ["FlightRecorderHook", "NanCheckHook", "OpArgs", "OpName", "RemovableHandle", "clog"]
