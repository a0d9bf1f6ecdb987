"""Findings about ranks whose process ended by a fault of its own, and the places of ranks that hang.

A rank that raises, exits, crashes or is killed is the cause of what its peers wait for. Peers raise as well,
but because of it: `Raised.consequence` tells these exceptions apart. A rank that catches such an exception
and exits is a victim, too: its last operation has failed. The first fault leads; equal faults of several
ranks are one finding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from unicomm.flight_recorder.ring.endings import Ending, signal_name
from unicomm.flight_recorder.ring.places import Place
from unicomm.flight_recorder.ring.reader import ERRORS
from unicomm.flight_recorder.table.rows import at_place, last_row, op_text, place
from unicomm.flight_recorder.table.table import Table
from unicomm.flight_recorder.texts import capital, ranks_text

from .verdict import Cause, Finding, Verdict
from .wait_graph import lasting_failures

_CRASHES = ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL", "SIGSYS", "SIGTRAP")
_WORDS = {
    "SIGSEGV": "a segmentation fault",
    "SIGBUS": "a bus error",
    "SIGABRT": "an abort",
    "SIGFPE": "an arithmetic error",
    "SIGILL": "an illegal instruction",
}
_SURE = 0.98
_AT_ONCE_NS = 20_000_000  # launchers look at their ranks less often than this
# How operations fail because of other ranks.
_OF_OTHERS = [at for at, name in ERRORS.items() if name in ("timeout", "peer lost", "mismatch", "deadlock")]
# Findings that say that a rank is absent: how its process ended says why, and takes their place.
_ABSENCES = frozenset(
    {
        Verdict.PROCESS_DEAD,
        Verdict.NEVER_JOINED,
        Verdict.BLOCKED_OUTSIDE,
        Verdict.UNMATCHED_P2P,
        Verdict.NEVER_FINISHED,
        Verdict.SLOW,
        Verdict.WRAPPED,
    }
)
# Findings about ranks that are somewhere: their stacks say where.
_SOMEWHERE = frozenset(
    {
        Verdict.BLOCKED_OUTSIDE,
        Verdict.NEVER_JOINED,
        Verdict.SLOW,
        Verdict.PROCESS_STOPPED,
        Verdict.UNMATCHED_P2P,
    }
)


@dataclass
class _Fault:
    kind: Verdict
    what: str  # the end of a sentence that begins with the ranks
    cause: Cause
    at_ns: int
    ranks: list[int]
    evidence: list[str]
    order_ns: int = 0  # `at_ns` by a clock that all hosts have in common


def own_faults(table: Table, ahead: Mapping[int, int] = MappingProxyType({})) -> list[Finding]:
    """Returns a finding for each fault of ranks' own, the first one first.

    Ranks that raised because of others are victims of the first one. `ahead`: by how many nanoseconds the
    clocks of ranks are ahead of the typical one.
    """
    faults: dict[tuple[object, ...], _Fault] = {}
    terminated, gave_up = _first_terminated(table, ahead), _gave_up(table)
    for ending in table.endings:
        one = None if ending.rank in gave_up else _fault(table, ending)
        if one is None and ending.rank in terminated:
            one = _killed(table, ending, "SIGTERM")
        if one is None:
            continue
        one.order_ns = one.at_ns and one.at_ns - ahead.get(ending.rank, 0)
        same = faults.setdefault((one.kind, one.what), one)
        if same is not one:
            same.ranks += one.ranks
            same.at_ns = _earlier(same.at_ns, one.at_ns)
            same.order_ns = _earlier(same.order_ns, one.order_ns)
    ordered = sorted(faults.values(), key=lambda f: (f.order_ns == 0, f.order_ns))
    found = [_finding(table, one) for one in ordered]
    for first in found[:1]:
        ended = {e.rank for e in table.endings if e.raised is not None and e.raised.consequence} | gave_up
        first.victims = sorted(ended - {rank for one in found for rank in one.culprits})
    return found


def _earlier(a: int, b: int) -> int:
    """Returns the earlier of two times, of which 0 is an unknown one."""
    return min(a or b, b or a)


def without_absences(findings: Sequence[Finding], own: Sequence[Finding]) -> list[Finding]:
    """Returns the findings that own faults do not explain.

    An explained one is dropped, and gives its victims and facts to the own fault.
    """
    by_rank = {rank: fault for fault in own for rank in fault.culprits}
    out = []
    for one in findings:
        explains = [by_rank[r] for r in one.culprits if r in by_rank]
        if one.verdict not in _ABSENCES or not explains:
            out.append(one)
            continue
        first = explains[0]
        first.victims = sorted({*first.victims, *one.victims} - set(first.culprits))
        first.edges = first.edges or one.edges
        if not first.operation and one.operation:
            first.group, first.seq_num, first.operation = one.group, one.seq_num, one.operation
        first.evidence += [e for e in one.evidence if e not in first.evidence and "process" not in e]
        rest = sorted(set(one.culprits) - set(by_rank))
        if rest and one.verdict is Verdict.PROCESS_DEAD:
            first.victims = sorted({*first.victims, *rest})
    return out


def add_places(table: Table, findings: Sequence[Finding]) -> None:
    """Says where the culprits are that are alive, from their stacks."""
    endings = {e.rank: e for e in table.endings}
    for one in findings:
        if one.verdict not in _SOMEWHERE or one.cause is not None:
            continue
        said: dict[str, list[int]] = {}
        for rank in one.culprits:
            ending = endings.get(rank)
            if ending is None or not (frames := ending.stacks.main):
                continue
            own = ending.place(frames)
            assert own is not None
            if one.cause is None:
                one.cause = _cause(own, frames)
                rest = [step for step in one.next_steps if not step.startswith("py-spy")]
                one.next_steps = [f"look at {own}: what does it wait for there?", *rest]
            inner = frames[0]
            text = own.said
            if inner != own:
                text += f", in `{inner.function}`"
            if ending.stacks.activity:
                text += f", {ending.stacks.activity}"
            said.setdefault(text, []).append(rank)
        for text, ranks in said.items():
            who = "It" if len(one.culprits) == 1 else capital(ranks_text(ranks))
            one.sentence += f" {who} {'is' if len(ranks) == 1 else 'are'} {_inside(text)}."


def _inside(text: str) -> str:
    return text if text.startswith("in ") else f"at {text}"


# --- one rank -------------------------------------------------------------------------------------------


def _fault(table: Table, ending: Ending) -> _Fault | None:
    """Returns the fault by which the process of a rank ended; None if it ended well, or as a consequence."""
    raised, code, crash = ending.raised, ending.exit_code, ending.stacks.crash
    killed = signal_name(code or 0)
    if raised is not None and raised.consequence and "SIGABRT" in (crash, killed):
        return None  # it ended itself because of its communicator's error, as it was asked to
    if crash or killed in _CRASHES:
        return _crash(table, ending, crash or killed)
    if raised is not None:
        if raised.consequence:
            return None
        own = ending.place(raised.frames)
        text = f"{raised.type}: {raised.message}" if raised.message else raised.type
        cause = _cause(own, raised.frames)
        cause.exception, cause.message, cause.exit_code = raised.type, raised.message, code
        return _new(ending, Verdict.EXCEPTION, f"raised {text}{_at(own)}", cause, [])
    if killed:
        return _killed(table, ending, killed)
    if ending.exit_call and code in (None, ending.exit_argument):
        own = ending.place(ending.exit_call)
        cause = _cause(own, ending.exit_call)
        cause.exit_code = ending.exit_argument
        return _new(ending, Verdict.EXITED, f"called sys.exit({ending.exit_argument}){_at(own)}", cause, [])
    if code:
        what = f"ended with exit code {code}, and left no exception"
        if not ending.name:
            what = f"ended with exit code {code} before importing torch"
        if after := _after(table, ending.rank):
            what = f"ended with exit code {code}{after}, and left no exception"
        cause = _last_place(table, ending.rank)
        cause.exit_code = code
        why = "os._exit, a library that ends the process, or an error of the interpreter's start"
        return _new(ending, Verdict.EXITED, what, cause, [f"no exception and no call of sys.exit: {why}"])
    return None


def _gave_up(table: Table) -> set[int]:
    """Returns the ranks that exited because their last operation had failed, which is due to others."""
    exited = {e.rank for e in table.endings if _exited(e)}
    if not exited:
        return exited
    newest = np.asarray(
        [row for row in (last_row(table, rank) for rank in exited) if row is not None], np.int64
    )
    failed = newest[np.isin(newest, lasting_failures(table)) & np.isin(table.error[newest], _OF_OTHERS)]
    return {int(rank) for rank in table.rank[failed]}


def _exited(ending: Ending) -> bool:
    """Whether the process of a rank ended by itself, by an exit code and not by an exception."""
    fatal = ending.raised is not None or ending.stacks.crash or signal_name(ending.exit_code or 0)
    return not fatal and bool(ending.exit_code or ending.exit_call)


def _first_terminated(table: Table, ahead: Mapping[int, int]) -> set[int]:
    """Returns the ranks that SIGTERM ended before any other rank had ended.

    Launchers send it to the ranks that are left when one has failed. So it is nobody's own fault as soon as a
    rank has ended otherwise, or is not known.
    """
    terminated = {
        e.rank: e.stacks.at_ns - ahead.get(e.rank, 0)
        for e in table.endings
        if e.stacks.terminated and e.alive_ns
    }
    raised = {
        e.rank: e.ended_ns - ahead.get(e.rank, 0)
        for e in table.endings
        if e.raised is not None and e.raised.consequence
    }
    if not terminated or len(terminated.keys() | raised.keys()) < len(table.ranks):
        return set()
    first = min((*terminated.values(), *raised.values()))
    # When a rank has failed, a launcher soon sends SIGTERM to the others. Some of them have failed as well,
    # and are still writing their exception to a file.
    failed = raised.keys() | {e.rank for e in table.endings if _notes_exception(e)}
    return {rank for rank, at in terminated.items() if at - first < _AT_ONCE_NS and rank not in failed}


def _notes_exception(ending: Ending) -> bool:
    """Whether SIGTERM ended the rank while unicomm wrote its exception to a file."""
    writer = "recording/ending.py", "note_exception"
    return any(p.file.endswith(writer[0]) and p.function == writer[1] for p in ending.stacks.main)


def _crash(table: Table, ending: Ending, name: str) -> _Fault:
    frames = ending.stacks.main if ending.stacks.crash else ()
    own = ending.place(frames)
    cause = _cause(own, frames) if own else _last_place(table, ending.rank)
    cause.signal = name
    words = f" ({_WORDS[name]})" if name in _WORDS else ""
    where = _at(own) if own else _after(table, ending.rank)
    return _new(ending, Verdict.CRASHED, f"crashed with {name}{words}{where}", cause, [])


def _killed(table: Table, ending: Ending, name: str) -> _Fault:
    frames = ending.stacks.main if ending.stacks.terminated else ()
    own = ending.place(frames)
    cause = _cause(own, frames) if own else _last_place(table, ending.rank)
    cause.signal = name
    after = _at(own) if own else _after(table, ending.rank)
    if ending.out_of_memory:
        what = f"was killed because memory ran out ({name}){after}"
        return _new(ending, Verdict.OUT_OF_MEMORY, what, cause, [ending.out_of_memory])
    if name == "SIGKILL":
        return _new(ending, Verdict.PROCESS_DEAD, f"was killed by {name}{after}", cause, [])
    return _new(ending, Verdict.TERMINATED, f"was ended by {name} from outside{after}", cause, [])


def _new(ending: Ending, kind: Verdict, what: str, cause: Cause, evidence: list[str]) -> _Fault:
    pid = f"pid {ending.pid}" if ending.pid else "process"
    line = f"rank {ending.rank}: {pid}" + (f" on {ending.host}" if ending.host else "")
    if ending.exit_code is not None:
        how = signal_name(ending.exit_code) or f"exit code {ending.exit_code}"
        line += f", {how} as the launcher saw it"
    stacks = ending.stacks
    # Without a launcher of ours, the time of the last stacks is what is known.
    at_ns = ending.ended_ns or (stacks.at_ns if stacks.terminated or stacks.crash else 0)
    return _Fault(kind, what, cause, at_ns, [ending.rank], [line, *evidence])


def _cause(own: Place | None, frames: Sequence[Place]) -> Cause:
    path = [f"{f} {f.function}" for f in frames]
    if own is None:
        return Cause(call_path=path)
    return Cause(file=own.file, line=own.line, function=own.function, call_path=path)


def _last_place(table: Table, rank: int) -> Cause:
    """The place of the rank's last operation, as far as it is known."""
    row = last_row(table, rank)
    if row is None:
        return Cause()
    file, _, line = place(table, row).rpartition(":")
    return Cause(file=file, line=int(line)) if line.isdigit() else Cause()


def _at(own: Place | None) -> str:
    return f" {_comma(own)}" if own else ""


def _comma(own: Place) -> str:
    return own.said if own.said.startswith("in ") else f"at {own}"


def _after(table: Table, rank: int) -> str:
    row = last_row(table, rank)
    return "" if row is None else f" after {op_text(table, row)}{at_place(table, row)}"


# --- findings -------------------------------------------------------------------------------------------


def _finding(table: Table, fault: _Fault) -> Finding:
    ranks = sorted(set(fault.ranks))
    world = len(table.ranks)
    every = len(ranks) == world > 1
    who = ranks_text(ranks)
    if every:
        who = "both ranks" if world == 2 else f"all {world} ranks"
    what = fault.what.replace("was ", "were ", 1) if len(ranks) > 1 else fault.what
    if every and fault.kind is Verdict.TERMINATED:
        what += ": the job was told to stop"
    return Finding(
        fault.kind,
        ranks,
        confidence=_SURE,
        sentence=f"{capital(who)} {what}.",
        evidence=fault.evidence,
        next_steps=_steps(fault, who),
        since_ns=fault.at_ns,
        cause=fault.cause,
    )


def _steps(fault: _Fault, who: str) -> list[str]:
    cause = fault.cause
    where = f"{cause.file}:{cause.line}" if cause.file else ""
    match fault.kind:
        case Verdict.EXCEPTION:
            return [
                f"repair {where}" if where else "repair the exception",
                f"the log of {who} has its traceback",
            ]
        case Verdict.EXITED:
            exits = "exit" if len(fault.ranks) > 1 else "exits"
            return [
                f"look at why {who} {exits}" + (f" at {where}" if where else ""),
                f"read the log of {who}",
            ]
        case Verdict.CRASHED:
            return [
                f"look at the native code that {where or 'the rank'} calls",
                "a core dump (ulimit -c unlimited) has its stack",
            ]
        case Verdict.OUT_OF_MEMORY:
            return [
                "use less memory in this rank (smaller batches, fewer loader workers), or give the job more",
                f"what it did last is at {where}" if where else "look at what the rank allocates first",
            ]
        case Verdict.PROCESS_DEAD:
            return ["look in the kernel's log (dmesg) and in the scheduler's for who sent SIGKILL"]
        case _:
            return ["look in the scheduler's log: a time limit, a preemption, or a person ended it"]
