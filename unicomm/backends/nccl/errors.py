"""NCCL's result codes as errors of ours, with its last words, its log and the known cause."""

from __future__ import annotations

from collections.abc import Sequence

from unicomm.comms.errors import AbortedError, BackendError, CommError, PeerLostError

from .causes import cure

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
