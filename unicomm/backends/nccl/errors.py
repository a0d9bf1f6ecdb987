"""NCCL's result codes as errors of ours, with its last words, its log and the known cause."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unicomm.comms.errors import (
    AbortedError,
    BackendError,
    CommError,
    CommTimeoutError,
    MismatchError,
    PeerLostError,
    UnsupportedError,
)

from .causes import cure

SUCCESS, IN_PROGRESS = 0, 7
_REMOTE = 6
_TIMED_OUT, _PEER_LOST, _MISMATCH, _ABORTED, _UNSUPPORTED = 1, 2, 3, 4, 7  # FaultCode
_NAMES = {
    1: "unhandled device error",
    2: "unhandled system error",
    3: "internal error",
    4: "invalid argument",
    5: "invalid usage",
    6: "remote error",
    8: "timeout",
}


def error_of(library: str, what: str, result: int, words: str, log: Sequence[str] = ()) -> CommError:
    """The error for a result other than success.

    `what` was called; `words`: the library's last ones; `log`: the last lines of its log, the newest last.
    """
    name = _NAMES.get(result, f"result {result}")
    words = " ".join(words.split())
    said = f": {words}" if words else ""
    kind = PeerLostError if result == _REMOTE else BackendError
    message = f"{library} {what} failed with {name}{said}{log_text(library, log, words)}"
    return kind(message, hint=cure(result, words, "\n".join(log)))


def log_text(library: str, log: Sequence[str], known: str = "") -> str:
    """The log as the end of a message; nothing where it says no more than is `known`."""
    if not log or (known and len(log) == 1 and log[0].endswith(known)):
        return ""
    return "".join(f"\n  {library}'s log: {line}" for line in log)


def aborted() -> AbortedError:
    return AbortedError("the communicator was aborted", hint="create a new one with unicomm.new_comm")


def fault_error(library: str, fault: Any, timeout: float) -> CommError:
    """The error for a fault of csrc/symm/tables/nccl_windows.cpp: (FaultCode, culprits, claims, text)."""
    code, culprits, _, text = fault
    if code == _TIMED_OUT:
        return CommTimeoutError(
            f"{text} within {timeout:g} s", culprits=culprits, hint="see what the others are doing"
        )
    if code == _MISMATCH:
        return MismatchError(text, culprits=culprits, hint="make the same calls on all ranks, in one order")
    if code == _ABORTED:
        return aborted()
    if code == _UNSUPPORTED:
        return UnsupportedError(
            f"{library}: {text}", hint="use a backend whose signals are words: nvshmem, shm"
        )
    kind = PeerLostError if code == _PEER_LOST else BackendError
    return kind(f"{library}: {text}", culprits=culprits, hint="please report this")
