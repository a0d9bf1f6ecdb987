"""Faults: why an operation failed, as data, and the `CommError` that a fault becomes.

The native core, the connections between ranks (backends/out_of_band) and the backends describe a failure by a
`Fault`: a code and fields that hold ranks. `error_of` makes the error and its message, in the numbers of one
communicator. A communicator that is made of several (backends/hosts) renumbers the fault of a part and makes
the error again, so no sentence is ever searched for ranks.

Errors that are complete already, as all ranks shall raise them, travel as a dict: `error_to_dict`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from unicomm import _core
from unicomm._core import FaultCode
from unicomm.comms import errors
from unicomm.comms.errors import (
    AbortedError,
    BackendError,
    CommError,
    CommTimeoutError,
    DeadlockError,
    MismatchError,
    NotReadyError,
    PeerLostError,
    SilentCorruptionError,
    UnsupportedError,
)
from unicomm.comms.operations.call import CHECKED
from unicomm.comms.operations.dtypes import DTYPES, NAMES, OTHER
from unicomm.comms.operations.recording import OTHER_ERROR
from unicomm.comms.operations.reduction import REDUCTION_NAMES
from unicomm.comms.operations.table import BY_CODE, Kind
from unicomm.comms.options import WIRES

# Values of `Fault.detail` with a meaning of their own.
FINALIZED = "finalized"  # of PEER_LOST: the rank has finalized the communicator
SIZES = "sizes"  # of MISMATCH: two ranks differ in the size of what the one sends to the other

_LONGEST_TEXT = 400  # characters of a text from another rank
_MOST_PLACES = 16
_LONGEST_TIME = 1e9  # seconds
_MOST_RANK = 1 << 31
_SEE_RANK = "look at that rank's own output and exit code; its last operations: `unicomm trace show`"
_GO_ON = "create a new communicator to go on"
#: What to do about a `CommTimeoutError` whose culprits may only be slow.
SEE_LATE_RANKS = (
    "see what they are doing with `unicomm trace show`; a longer timeout helps if they are only slow"
)

# The code of an error in the recorder's ring: the first class that fits.
_CODE_OF_CLASS: tuple[tuple[type[CommError], FaultCode], ...] = (
    (DeadlockError, FaultCode.DEADLOCK),
    (CommTimeoutError, FaultCode.TIMEOUT),
    (PeerLostError, FaultCode.PEER_LOST),
    (MismatchError, FaultCode.MISMATCH),
    (AbortedError, FaultCode.ABORTED),
    (SilentCorruptionError, FaultCode.SILENT_CORRUPTION),
)
_CODES = frozenset(FaultCode)


class Claim(NamedTuple):
    """The operation that one rank has called, by the core's codes; see csrc/core/error.hpp.

    Attributes:
        root: the root or the peer, -1 if there is none. In a deadlock: the rank that `rank` waits for.
        amount: elements. In a deadlock: the sequence number. With `SIZES`: bytes that the rank expects.
        extra: hash of the sizes for each rank. With `SIZES`: bytes that `root` sends.
        comm, line: in a deadlock, the communicator in whose numbers the ranks are, and the user's file:line.
    """

    rank: int
    op: int = 0
    dtype: int = 0
    reduction: int = 0
    root: int = -1
    amount: int = 0
    extra: int = 0
    comm: str = ""
    line: str = ""


@dataclass(frozen=True)
class Fault:
    """Why an operation failed. All ranks are in the numbers of one communicator.

    Attributes:
        code: what kind of fault it is.
        by: the rank that reported the fault; -1 for this rank.
        culprits: ranks that caused the fault, whatever is known of them.
        dead, absent, late: ranks that caused the fault, as in `CommError`.
        where: for an awaited rank, where it is, such as "is at train.py:88 in load".
        detail: more words, without ranks; or `FINALIZED` or `SIZES`.
        timeout: seconds, of the operation that has timed out.
        claims: what the ranks have called.
        library: the library that failed, for messages.
        after: number of collectives that the rank that reported it had completed; 0 if that is not known.
    """

    code: FaultCode
    by: int = -1
    culprits: tuple[int, ...] = ()
    dead: tuple[int, ...] = ()
    absent: tuple[int, ...] = ()
    late: tuple[int, ...] = ()
    where: Mapping[int, str] = field(default_factory=dict)
    detail: str = ""
    timeout: float = 0.0
    claims: tuple[Claim, ...] = ()
    library: str = "shm"
    after: int = 0

    @property
    def named(self) -> list[int]:
        """All ranks that the fault names as culprits, sorted."""
        return sorted({*self.culprits, *self.dead, *self.absent, *self.late})


def rank_list(ranks: Sequence[int], verb: str = "") -> str:
    """`rank 1` or `ranks 1, 2`; then the form that fits of `verb`: "is", "has" or "does"."""
    text = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    if not verb:
        return text
    return f"{text} {verb if len(ranks) == 1 else {'is': 'are', 'has': 'have', 'does': 'do'}[verb]}"


# --- from what is known ------------------------------------------------------------------------------------


def of_core(fault: _core.Fault, timeout: float, library: str = "shm") -> Fault:
    """The fault that a call of the native core has returned."""
    code, culprits, raw, detail, by = fault
    claims = [Claim(*numbers) for numbers in raw]  # type: ignore[arg-type]
    if code == FaultCode.DEADLOCK and claims:  # one line for each claim: communicator, tab, file:line
        lines = [line.split("\t", 1) for line in detail.splitlines()]
        pairs = zip(claims, lines, strict=True)
        claims = [claim._replace(comm=name, line=line) for claim, (name, line) in pairs]
        detail = ""
    elif (code == FaultCode.PEER_LOST and detail != FINALIZED) or (code == FaultCode.TIMEOUT and by >= 0):
        detail = ""
    return Fault(
        FaultCode(code) if code in _CODES else FaultCode.INTERNAL,
        by,
        tuple(culprits),
        detail=detail,
        timeout=timeout,
        claims=tuple(claims),
        library=library,
    )


def core_error(fault: _core.Fault, timeout: float, library: str = "shm") -> CommError:
    """The error for the fault that a call of the native core has returned."""
    return error_of(of_core(fault, timeout, library))


def mismatch(claims: Sequence[Claim], culprits: Sequence[int], detail: str = "") -> CommError:
    """The error when ranks have called different operations."""
    return error_of(Fault(FaultCode.MISMATCH, culprits=tuple(culprits), claims=tuple(claims), detail=detail))


def interrupts(error: BaseException) -> bool:
    """Whether an error says nothing about its operation, but has ended it half way."""
    return not isinstance(error, CommError) or (isinstance(error, NotReadyError) and error.amid)


def aborted_by(rank: int) -> CommError:
    """The error on all ranks when `rank` has aborted the communicator."""
    return error_of(Fault(FaultCode.ABORTED, culprits=(rank,)))


def minority(values: Sequence[Hashable]) -> list[int]:
    """The ranks whose value is not the most frequent one; all ranks when two values are equally frequent."""
    votes = Counter(values).most_common()
    tie = len(votes) > 1 and votes[0][1] == votes[1][1]
    return [r for r, value in enumerate(values) if tie or value != votes[0][0]]


def code_of(error: BaseException) -> int:
    """The code of an error in the recorder's ring."""
    return next((int(code) for cls, code in _CODE_OF_CLASS if isinstance(error, cls)), OTHER_ERROR)


def told(error: CommError | None) -> tuple[int, list[int]]:
    """Returns what other ranks are told of an error that breaks a communicator: its code and its culprits.

    `(0, [])` tells them only that this rank has given up.
    """
    if error is None or not error.culprits or not isinstance(error, CommTimeoutError | PeerLostError):
        return 0, []
    return code_of(error), list(error.culprits)


# --- in other numbers --------------------------------------------------------------------------------------


def renumbered(fault: Fault, ranks: Sequence[int]) -> Fault:
    """The fault in the numbers of another communicator, in which rank `r` of this one is `ranks[r]`."""

    def of_all(some: Sequence[int]) -> tuple[int, ...]:
        return tuple(ranks[r] for r in some if 0 <= r < len(ranks))

    def one(rank: int) -> int:
        return ranks[rank] if 0 <= rank < len(ranks) else rank

    named: dict[str, Any] = {kind: of_all(getattr(fault, kind)) for kind in _RANK_FIELDS}
    # In a circle through several communicators each claim has its own one's numbers. The first is in ours.
    ours = fault.claims[0].comm if fault.claims else ""
    return replace(
        fault,
        by=one(fault.by),
        **named,
        where={one(r): text for r, text in fault.where.items()},
        claims=tuple(
            claim._replace(rank=one(claim.rank), root=one(claim.root)) if claim.comm == ours else claim
            for claim in fault.claims
        ),
    )


def renumber_error(error: CommError, ranks: Sequence[int]) -> CommError:
    """The error in the numbers of another communicator; see `renumbered`."""
    if error.fault is not None:
        return error_of(renumbered(error.fault, ranks))
    known: dict[str, Any] = _ranks_in(error, ranks)
    return type(error)(error.message, hint=error.hint, **known)


def in_global_ranks(error: CommError, labels: Sequence[int]) -> CommError:
    """Converts an error to global ranks. `labels`: the global rank of each rank of the communicator.

    The message keeps its numbers, and says the global ranks as well.
    """
    if not error.culprits or list(labels) == list(range(len(labels))):
        return error
    known = _ranks_in(error, labels)
    found = error.again(f"{error.message} (global {rank_list(known['culprits'])})")
    found.fault = None if error.fault is None else renumbered(error.fault, labels)
    for kind, ranks in known.items():
        setattr(found, kind, tuple(ranks))
    return found


def _ranks_in(error: CommError, ranks: Sequence[int]) -> dict[str, list[int]]:
    return {kind: [ranks[r] for r in getattr(error, kind) if 0 <= r < len(ranks)] for kind in _RANK_FIELDS}


# --- the error ---------------------------------------------------------------------------------------------


def error_of(fault: Fault) -> CommError:
    """The error for a fault, in the fault's numbers; a new one each time."""
    error = _MAKERS.get(fault.code, _internal)(fault)
    error.fault = fault
    return error


def _timeout(fault: Fault) -> CommError:
    when = f"after {fault.timeout:g} s" if fault.by < 0 else f"when rank {fault.by} gave up"
    named = fault.named
    if not named:
        return CommTimeoutError(
            f"timed out {when}: all ranks had arrived, but the operation was not over",
            hint="large data over a slow network take longer: pass a longer timeout",
        )
    if fault.detail:
        when = f"when {fault.detail}"
    text = f"timed out {when}: {rank_list(named)} had not arrived"
    text += "".join(f"; rank {rank} {place}" for rank, place in sorted(fault.where.items()))
    return CommTimeoutError(text, hint=SEE_LATE_RANKS, **_sorted(fault))


def _deadlock(fault: Fault) -> CommError:
    culprits = fault.named
    error = DeadlockError(
        _circle(fault.claims) if fault.claims else f"{rank_list(culprits)} wait for each other forever",
        culprits=culprits,
        late=culprits,
        hint="make these calls in the same order on these ranks; put messages in both directions into one"
        " batch_op_create",
    )
    error.explained = bool(fault.claims)
    return error


def _peer_lost(fault: Fault) -> CommError:
    named = fault.named
    if not named:
        return PeerLostError(
            f"the connection to another rank has ended: {fault.detail}",
            hint="look at the other ranks' own output; their last operations: `unicomm trace show`",
        )
    if fault.detail == FINALIZED:
        text = f"{rank_list(named, 'has')} finalized this communicator"
    else:
        why = fault.detail or ("its process ended" if len(named) == 1 else "their processes ended")
        text = f"{rank_list(named, 'is')} gone ({why})"
    return PeerLostError(text, hint=_SEE_RANK, **_sorted(fault))


def _mismatch(fault: Fault) -> CommError:
    culprits = fault.named
    text = _sizes(fault.claims) if fault.detail == SIZES else _different_calls(fault)
    if any(claim.dtype for claim in fault.claims) or fault.detail != SIZES:
        hint = f"compare the program's path on {rank_list(culprits)} with the others'; nothing was written"
    else:  # the two ends of one message
        hint = f"give both tensors one size; {_GO_ON}"
    return MismatchError(text, culprits=culprits, hint=hint)


def _aborted(fault: Fault) -> CommError:
    named = fault.named or [fault.by]
    return AbortedError(f"{rank_list(named)} aborted the communicator", culprits=named, hint=_GO_ON)


def _unsupported(fault: Fault) -> CommError:
    return UnsupportedError(
        f"{fault.library}: {fault.detail}", hint="`unicomm doctor` shows what each backend can do"
    )


def _internal(fault: Fault) -> CommError:
    where = "" if fault.by < 0 else f"on rank {fault.by}: "
    culprits = fault.named or ([] if fault.by < 0 else [fault.by])
    hint = "please report this"
    if fault.library != "shm":
        hint = f"the rest of {fault.library}'s message is in the __cause__ of that rank's error"
    elif fault.by >= 0:
        hint = "see that rank's own error"
    elif fault.detail.startswith("cannot"):  # the system has refused something
        hint = "is there memory left, and file descriptors? if it goes on, allocate with torch.empty"
    return BackendError(f"{fault.library}: {where}{fault.detail}", culprits=culprits, hint=hint)


_MAKERS = {
    FaultCode.TIMEOUT: _timeout,
    FaultCode.DEADLOCK: _deadlock,
    FaultCode.PEER_LOST: _peer_lost,
    FaultCode.MISMATCH: _mismatch,
    FaultCode.ABORTED: _aborted,
    FaultCode.UNSUPPORTED: _unsupported,
}


def _sorted(fault: Fault) -> dict[str, Any]:
    return {kind: getattr(fault, kind) for kind in _RANK_FIELDS}


def _circle(claims: Sequence[Claim]) -> str:
    """Which rank waits in which operation for which rank."""
    several = len({claim.comm for claim in claims}) > 1
    parts = []
    for claim in claims:
        row = BY_CODE.get(claim.op)
        name = row.name if row else f"operation {claim.op}"
        text = f"rank {claim.rank}{f' of {claim.comm!r}' if several else ''} in {name}"
        if claim.amount:
            text += f" #{claim.amount}"
        to = {"send": "to", "recv": "from"}.get(name, "for")
        parts.append(f"{text} {to} rank {claim.root}{f' ({claim.line})' if claim.line else ''}")
    return f"these ranks wait for each other forever: {', '.join(parts)}"


def _sizes(claims: Sequence[Claim]) -> str:
    parts = []
    for claim in claims:
        size = next((info.dtype.itemsize for info in DTYPES.values() if info.code == claim.dtype), 1)
        unit = "elements" if claim.dtype else "bytes"
        parts.append(
            f"rank {claim.rank} expects {claim.amount // size} {unit} from rank {claim.root},"
            f" which sends {claim.extra // size}"
        )
    return "; ".join(parts)


def _different_calls(fault: Fault) -> str:
    """What each rank called, ranks with the same call together."""
    groups: dict[str, list[int]] = {}
    for claim in fault.claims:
        groups.setdefault(_call(claim), []).append(claim.rank)
    most_first = sorted(groups.items(), key=lambda group: -len(group[1]))
    calls = [f"{rank_list(ranks)}: {text}" for text, ranks in most_first]
    return "the ranks called different things; " + "; ".join(calls or [fault.detail])


def _call(claim: Claim) -> str:
    row, dtype = BY_CODE.get(claim.op), NAMES.get(claim.dtype, "?")
    arguments = []
    if claim.dtype == OTHER and row and row.same_count and (which := claim.extra & ~CHECKED):
        dtype = f"{dtype} type #{which:08x}"
    if claim.dtype:
        arguments.append(f"{dtype}[{claim.amount}]" if row and row.same_count else dtype)
    if row and not row.same_count and (sizes := claim.extra & ~CHECKED):
        arguments.append(f"sizes #{sizes:016x}")
    if claim.reduction & 0xFF:
        arguments.append(REDUCTION_NAMES.get(claim.reduction & 0xFF, "?"))
    if claim.reduction >> 8:
        arguments.append(f"wire={dict(enumerate(WIRES)).get(claim.reduction >> 8, '?')}")
    if row and row.kind is Kind.P2P:
        arguments.append(f"{'to' if row.name == 'send' else 'from'} rank {claim.root}")
    elif claim.root >= 0:
        arguments.append(f"root {claim.root}")
    if claim.extra & CHECKED:
        arguments.append("checksum")
    return f"{row.name if row else f'operation {claim.op}'}({', '.join(arguments)})"


# --- between ranks -----------------------------------------------------------------------------------------


def fault_to_dict(fault: Fault) -> dict[str, Any]:
    """The fault as JSON values, for another rank of the same communicator."""
    return {
        "fault": int(fault.code),
        "by": fault.by,
        **{kind: list(getattr(fault, kind)) for kind in _RANK_FIELDS},
        "where": {str(r): text[:_LONGEST_TEXT] for r, text in list(fault.where.items())[:_MOST_PLACES]},
        "detail": fault.detail[:_LONGEST_TEXT],
        "timeout": fault.timeout,
        "claims": [list(claim) for claim in fault.claims[:_MOST_PLACES]],
        "after": fault.after,
    }


def fault_from_dict(fields: Mapping[str, Any], library: str = "") -> Fault:
    """The fault that another rank has sent. Raises `ValueError` for anything else: nothing is trusted."""
    try:
        code, by, where = FaultCode(fields["fault"]), fields["by"], fields["where"]
        after = fields["after"]
        detail, timeout, claims = fields["detail"], fields["timeout"], fields["claims"]
        ranks = {kind: tuple(fields[kind]) for kind in _RANK_FIELDS}
        good = all(type(n) is int and 0 <= n < 1 << 63 for n in (by, after)) and isinstance(detail, str)
        good = good and all(type(r) is int and 0 <= r < _MOST_RANK for some in ranks.values() for r in some)
        good = good and isinstance(timeout, (int, float)) and 0 <= timeout <= _LONGEST_TIME
        if not good or code is FaultCode.NONE or len(claims) > _MOST_PLACES:
            raise ValueError("no fault")
        return Fault(
            code,
            by,
            **ranks,
            where={int(r[:12]): str(text)[:_LONGEST_TEXT] for r, text in list(where.items())[:_MOST_PLACES]},
            detail=detail[:_LONGEST_TEXT],
            timeout=float(timeout),
            claims=tuple(_read_claim(claim) for claim in claims),
            library=library,
            after=after,
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"no fault: {error}") from None


def _read_claim(values: Any) -> Claim:
    numbers, words = values[:7], values[7:]
    if len(numbers) != 7 or any(type(n) is not int or not -1 <= n < 1 << 64 for n in numbers):
        raise ValueError("a claim without numbers")
    if len(words) != 2 or any(not isinstance(word, str) or len(word) > _LONGEST_TEXT for word in words):
        raise ValueError("a claim without words")
    return Claim(*numbers, *words)


_RANK_FIELDS = ("culprits", "dead", "absent", "late")


def error_to_dict(error: CommError, longest: int = 1 << 16) -> dict[str, Any]:
    """A complete error as JSON values, for the other ranks of the communicator to raise."""
    return {
        "type": type(error).__name__,
        "message": error.message[:longest],
        "hint": error.hint[:longest],
        **{kind: list(getattr(error, kind)) for kind in _RANK_FIELDS},
    }


def error_from_dict(fields: Any, size: int, longest: int = 1 << 16) -> CommError:
    """The error that another of `size` ranks has told. An unreadable one becomes a `NotReadyError`."""
    try:
        kind = getattr(errors, fields["type"])
        ranks = {name: [int(r) for r in fields[name]] for name in _RANK_FIELDS}
        if not issubclass(kind, CommError) or any(not 0 <= r < size for some in ranks.values() for r in some):
            raise ValueError
        message, hint = str(fields["message"])[:longest], str(fields["hint"])[:longest]
        return kind(message, hint=hint, **ranks)  # type: ignore[no-any-return]
    except (AttributeError, KeyError, TypeError, ValueError):
        return NotReadyError("another rank has given up; its reason is not readable", hint="see its output")
