"""Errors for NCCL's result codes, with the library's last error, its log and the known cause."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unicomm._core import FaultCode
from unicomm.comms.errors import (
    AbortedError,
    BackendError,
    CommError,
    CommTimeoutError,
    MismatchError,
    PeerLostError,
    UnsupportedError,
)

from .known_causes import cure

SUCCESS, IN_PROGRESS = 0, 7
_REMOTE = 6
_NAMES = {
    1: "unhandled device error",
    2: "unhandled system error",
    3: "internal error",
    4: "invalid argument",
    5: "invalid usage",
    6: "remote error",
    8: "timeout",
}


def error_of(library: str, function: str, result: int, text: str, log: Sequence[str] = ()) -> CommError:
    """Returns the error of a call of `function` that returned `result`.

    `text` is the library's last error; `log` has the last lines of its log, the newest last.
    """
    name = _NAMES.get(result, f"result {result}")
    text = " ".join(text.split())
    detail = f": {text}" if text else ""
    kind = PeerLostError if result == _REMOTE else BackendError
    message = f"{library} {function} failed with {name}{detail}{log_text(library, log, text)}"
    return kind(message, hint=cure(result, text, "\n".join(log)))


def log_text(library: str, log: Sequence[str], known: str = "") -> str:
    """Returns the log as the last part of a message; "" if it only repeats `known`."""
    if not log or (known and len(log) == 1 and log[0].endswith(known)):
        return ""
    return "".join(f"\n  {library}'s log: {line}" for line in log)


def aborted() -> AbortedError:
    return AbortedError("the communicator was aborted", hint="create a new one with unicomm.new_comm")


def fault_error(library: str, fault: Any, timeout: float) -> CommError:
    """Returns the error for a fault of the NCCL windows; see `_core.Fault`."""
    code, culprits, text = fault[0], fault[1], fault[3]
    if code == FaultCode.TIMEOUT:
        return CommTimeoutError(
            f"{text} within {timeout:g} s", culprits=culprits, hint="see what the other ranks are doing"
        )
    if code == FaultCode.MISMATCH:
        return MismatchError(text, culprits=culprits, hint="all ranks must make the same calls in one order")
    if code == FaultCode.ABORTED:
        return aborted()
    if code == FaultCode.UNSUPPORTED:
        return UnsupportedError(
            f"{library}: {text}", hint="use a backend whose signals are words in memory: nvshmem, shm"
        )
    kind = PeerLostError if code == FaultCode.PEER_LOST else BackendError
    return kind(f"{library}: {text}", culprits=culprits, hint="please report this")
