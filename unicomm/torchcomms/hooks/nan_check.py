"""NanCheckHook: raises for operations whose tensors hold a NaN."""

from unicomm.comms.execution.hooks import NanCheckHook

__all__ = ["NanCheckHook"]
