"""Faults as errors, and what a library's own errors mean."""

from __future__ import annotations

from unicomm.backends.shm import _ranks
from unicomm.comms.errors import (
    AbortedError,
    BackendError,
    CommError,
    CommTimeoutError,
    MismatchError,
    PeerLostError,
)

from .wire import Fault

_SEE = "`unicomm trace show` shows what they did last; a longer timeout= if they are only slow"


def error_of(fault: Fault, rank: int, library: str) -> CommError:
    """The error that rank `rank` raises for it; a new one each time."""
    error = _error(fault, rank, library)
    if fault.kind == "mismatch":
        return error
    error.sort_culprits(fault.dead, fault.absent, fault.late)
    return error


def _error(fault: Fault, rank: int, library: str) -> CommError:
    named = sorted({*fault.dead, *fault.absent, *fault.late})
    mine = fault.by == rank
    if fault.kind == "timeout":
        when = f"after {fault.timeout:g} s" if mine else f"when rank {fault.by} gave up"
        if not named:
            return CommTimeoutError(
                f"all ranks had arrived, but the operation was not over {when}",
                hint="large data over a slow network take longer: pass a longer timeout=",
            )
        text = f"{_ranks(named)} had not arrived {when}"
        for peer, place in sorted(fault.where.items()):
            text += f"; rank {peer} {place}"
        return CommTimeoutError(text, hint=_SEE)
    if fault.kind == "lost":
        if not named:
            return PeerLostError(
                f"a peer's connection is gone: {fault.detail}",
                hint="look at the other ranks' own output; their last operations: `unicomm trace show`",
            )
        what = f"is gone ({fault.detail or 'its process ended'})"
        if fault.detail == "finalized":
            what = "has finalized this communicator"
        return PeerLostError(
            f"{_ranks(named)} {what}",
            hint="look at that rank's own output and exit code; its last operations: `unicomm trace show`",
        )
    if fault.kind == "mismatch":
        return MismatchError(
            fault.detail,
            culprits=named,
            hint="give both tensors one size; create a new communicator to go on",
        )
    if fault.kind == "aborted":
        return AbortedError(
            f"rank {fault.by} aborted the communicator",
            culprits=(fault.by,),
            hint="create a new communicator to go on",
        )
    where = "" if mine else f"on rank {fault.by}: "
    return BackendError(
        f"{library}: {where}{fault.detail}",
        culprits=() if mine else (fault.by,),
        hint=f"the rest of {library}'s message is in that rank's error's __cause__",
    )


def guess(text: str, rank: int) -> Fault:
    """A fault that nobody could explain, by the library's words."""
    signs = ("closed", "reset by peer", "Broken pipe", "refused")
    return Fault("lost" if any(sign in text for sign in signs) else "error", rank, detail=text)


def first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
