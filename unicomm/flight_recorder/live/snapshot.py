"""Snapshot: the current operation of each rank and the ranks it waits for, from their rings alone.

The ranks run no code for it. The rings are those of this host, or new copies of the rings of all hosts of a
job (unicomm/launch/hub/server.py). top.py draws a snapshot.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unicomm.flight_recorder.formats.operation_names import item_size
from unicomm.flight_recorder.memory import Memory
from unicomm.flight_recorder.ring.reader import (
    ASYNC,
    ERRORS,
    P2P,
    RECEIVE,
    STATES,
    Comm,
    InputRemark,
    Ring,
    State,
    comm_names,
    owners,
    read_folder,
)
from unicomm.flight_recorder.ring.record_text import arguments

STOPPED, DEAD, ENDED, ABSENT = "stopped", "dead", "ended", "absent"


@dataclass
class CurrentOperation:
    """The current or the last operation of a rank.

    Attributes:
        seq: the number of the collective in the group, or of the message in its pair.
        size: the bytes of all inputs, or of all outputs if there are no inputs.
        state: created, started, completed or failed.
        error: the reason of a failure, else "".
        seconds: the time since it began if it is unfinished, else since it ended; None for a dead process.
        file, line, function: the user's call; "", 0, "" if unknown.
        pending: the number of further unfinished operations of the rank.
    """

    name: str
    group: str
    seq: int
    arguments: str
    size: int
    state: str
    error: str
    seconds: float | None
    file: str
    line: int
    function: str
    pending: int = 0

    @property
    def over(self) -> bool:
        return self.state in ("completed", "failed")


@dataclass
class Rank:
    """One rank of a job.

    Attributes:
        process: running or sleeping (the kernel's state), stopped, dead (killed or crashed: it ended without
            closing its ring), ended, or absent (a member of a group without a ring on this host).
        world: the number of ranks of the job.
        operations: the number of recorded operations.
        operation: the current or the last operation; None if there is none.
        waits_for: the ranks without which the operation cannot complete.
    """

    rank: int
    process: str
    pid: int = 0
    world: int = 0
    host: str = ""
    operations: int = 0
    operation: CurrentOperation | None = None
    waits_for: list[int] = field(default_factory=list)

    @property
    def gone(self) -> bool:
        """Whether the process is stopped, has ended or is absent."""
        return self.process in (STOPPED, DEAD, ENDED, ABSENT)


@dataclass
class Blocker:
    """A rank that waits for no rank, and for which the ranks `holds_up` wait, directly or indirectly."""

    rank: int
    holds_up: list[int]


@dataclass
class LiveJob:
    """The ranks of processes that share communicators.

    Attributes:
        blockers: the ranks that hold up others, and the stopped and dead ranks.
        cycle: ranks of which each waits for the next, and the last for the first; empty without a cycle.
    """

    ranks: list[Rank]
    blockers: list[Blocker] = field(default_factory=list)
    cycle: list[int] = field(default_factory=list)


@dataclass
class Snapshot:
    """The jobs with a living process, or the latest job if no process is alive."""

    jobs: list[LiveJob]
    findings: list[InputRemark]
    older: int = 0  # the number of ended jobs that are left out

    def as_data(self) -> dict[str, Any]:
        """Returns the snapshot as plain data, for JSON."""
        data: dict[str, Any] = _plain(self)
        return data


def _plain(value: Any) -> Any:
    """As `dataclasses.asdict`, which copies each rank of each list."""
    if is_dataclass(value):
        return {one.name: _plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, list) and value and is_dataclass(value[0]):
        return [_plain(one) for one in value]
    return value


def look(folder: Path | str, everything: bool = False, memory: Memory | None = None) -> Snapshot:
    """Returns the snapshot of the rings in `folder`; with `everything` also of ended jobs.

    `memory`: what reading may need; see `read_folder`.
    """
    rings, findings = read_folder(folder, memory)
    return snapshot(rings, findings, everything)


def snapshot(
    rings: Iterable[Ring], findings: Iterable[InputRemark] = (), everything: bool = False
) -> Snapshot:
    """Returns the snapshot of `rings`; with `everything` also of ended jobs."""
    jobs = sorted(_jobs(list(rings)), key=lambda job: max(int(r.header["start_real_ns"]) for r in job))
    shown = jobs if everything else [job for job in jobs if any(_alive(ring) for ring in job)] or jobs[-1:]
    return Snapshot([_job(rings) for rings in shown], list(findings), len(jobs) - len(shown))


def _alive(ring: Ring) -> bool:
    return ring.process_state in ("running", "stopped")


def _jobs(rings: list[Ring]) -> list[list[Ring]]:
    """Groups the rings that share communicators."""
    parent = list(range(len(rings)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    first: dict[str, int] = {}
    for i, ring in enumerate(rings):
        for comm in ring.comms:
            if comm.uid:
                parent[root(i)] = root(first.setdefault(comm.uid, i))
    jobs: dict[int, list[Ring]] = {}
    for i, ring in enumerate(rings):
        jobs.setdefault(root(i), []).append(ring)
    return list(jobs.values())


@dataclass
class _Member:
    """A member of a group, with its ring and the communicator in it."""

    rank: Rank
    ring: Ring
    comm: Comm


_WORKS = 1_000_000_000  # ns since its newest operation for which a rank works
_Group = dict[int, _Member]  # by rank in the group


def _job(rings: list[Ring]) -> LiveJob:
    ranks: dict[int, Rank] = {}
    groups: dict[str, _Group] = {}
    names = comm_names(rings)
    ours: list[tuple[Rank, Ring, list[Comm]]] = []
    for ring in sorted(rings, key=lambda r: int(r.header["start_real_ns"])):
        process = ring.process_activity
        for number, comms in owners(ring):
            rank = Rank(number, process, ring.pid, int(ring.header["world"]), ring.host)
            ranks[number] = rank  # a later process of a rank replaces an earlier one
            ours.append((rank, ring, comms))
            for comm in comms:
                groups.setdefault(comm.uid, {})[comm.rank] = _Member(rank, ring, comm)
    missing = _Missing(groups)
    for rank, ring, comms in ours:
        indices = [comm.index for comm in comms]
        records = ring.records[np.isin(ring.records["comm"], indices)]
        rank.operations = ring.total if len(indices) == len(ring.comms) else len(records)
        record = _current(records, ring.now_ns)
        if record is None:
            continue
        pending = int(np.count_nonzero(records["state"] < State.COMPLETED))
        name = names[ring.comms[int(record["comm"])].uid]
        rank.operation = _operation(ring, record, name, ring.now_ns if _alive(ring) else None)
        rank.operation.pending = max(0, pending - (not rank.operation.over))
        if int(record["state"]) != State.COMPLETED:
            comm = ring.comms[int(record["comm"])]
            seen, unseen = missing.of(rank, comm, record)
            rank.waits_for = sorted(seen or unseen)
            for other in () if seen else unseen:
                ranks.setdefault(other, Rank(other, ABSENT))
    job = LiveJob([ranks[r] for r in sorted(ranks)])
    edges = {r.rank: r.waits_for for r in job.ranks}
    job.cycle = _cycle(edges)
    job.blockers = _blockers(job.ranks, edges)
    return job


def _current(records: Any, now_ns: int) -> Any:
    """Returns the oldest started record, else the oldest created one, else the newest record.

    A thread that works does not wait in a receive that it has left open, such as one for a message to stop.
    """
    if not len(records):
        return None
    open_receive = records["flags"] & (ASYNC | P2P | RECEIVE) == ASYNC | P2P | RECEIVE
    open_receive &= records["state"] < State.COMPLETED
    chosen = np.ones(len(records), np.bool_)
    for thread in np.unique(records["tid"][open_receive]).tolist():
        own = records["tid"] == thread
        newest = int(max(records["created_ns"][own].max(), records["completed_ns"][own].max()))
        if now_ns - newest < _WORKS:
            old = records["created_ns"] + np.uint64(_WORKS) < np.uint64(newest)
            chosen &= ~(open_receive & own & old)
    for state in (2, 1):
        found = np.flatnonzero((records["state"] == state) & chosen)
        if len(found):
            return records[found[0]]
    return records[-1]


def _operation(ring: Ring, record: Any, group: str, now: int | None) -> CurrentOperation:
    frame = ring.frame(record)
    side = "in" if int(record["n_in"]) else "out"
    began = int(record["completed_ns"]) or int(record["started_ns"]) or int(record["created_ns"])
    state = STATES.get(int(record["state"]), "unknown")
    return CurrentOperation(
        name=ring.op(record),
        group=group,
        seq=int(record["seq"]),
        arguments=arguments(ring, record),
        size=int(record[f"{side}_numel"]) * item_size(ring.dtype(int(record[f"{side}_dtype"]))),
        state=state,
        error=ERRORS.get(int(record["error"]), "error"),
        seconds=None if now is None else max(0, now - began) / 1e9,
        file=frame.file if frame else "",
        line=frame.line if frame else 0,
        function=frame.function if frame else "",
    )


@dataclass
class _HoldingUp:
    """The members that keep a collective from completing.

    Attributes:
        absent: those that have not joined it.
        gone: those that have, and are now stopped or dead.
        unseen: those without a ring here, as ranks of the job.
    """

    absent: list[_Member] = field(default_factory=list)
    gone: list[_Member] = field(default_factory=list)
    unseen: list[int] = field(default_factory=list)


class _Missing:
    """Who keeps an operation from completing. All members of a group share the answer for a collective."""

    def __init__(self, groups: Mapping[str, _Group]) -> None:
        self._groups = groups
        self._known: dict[tuple[str, int, int], _HoldingUp] = {}

    def of(self, rank: Rank, comm: Comm, record: Any) -> tuple[set[int], set[int]]:
        """Returns the ranks that keep an operation of `rank` from completing: those with a ring here, and the
        others."""
        if int(record["flags"]) & P2P:
            return self._of_message(rank, comm, record)
        found = self._of_collective(comm, int(record["seq"]))
        members = found.absent
        # If both were killed or stopped in one operation, the first one is unknown. A member that has ended
        # cleanly did so because the operation had failed, so it is not the cause.
        if rank.process not in (STOPPED, DEAD):
            members = members + found.gone
        seen = {member.rank.rank for member in members if member.comm.rank != comm.rank}
        return seen, set() if rank.process == DEAD else set(found.unseen)

    def _of_collective(self, comm: Comm, seq: int) -> _HoldingUp:
        key = comm.uid, seq, comm.size
        if (known := self._known.get(key)) is not None:
            return known
        found = self._known[key] = _HoldingUp()
        group = self._groups.get(comm.uid, {})
        for inside, number in enumerate(comm.ranks[: comm.size]):
            member = group.get(inside)
            if member is None:
                found.unseen.append(number)
            elif member.comm.coll_completed >= seq:
                continue
            elif member.comm.coll_created < seq:
                found.absent.append(member)
            elif member.rank.process in (STOPPED, DEAD):
                found.gone.append(member)
        return found

    def _of_message(self, rank: Rank, comm: Comm, record: Any) -> tuple[set[int], set[int]]:
        peer = int(record["peer"])
        if peer == comm.rank or peer not in range(len(comm.ranks)):
            return set(), set()
        member = self._groups.get(comm.uid, {}).get(peer)
        if member is None:
            return set(), set() if rank.process == DEAD else {comm.ranks[peer]}
        theirs = member.ring.records
        wanted = 0 if int(record["flags"]) & RECEIVE else RECEIVE
        matching = (
            (theirs["comm"] == member.comm.index)
            & (theirs["flags"] & (P2P | RECEIVE) == (P2P | wanted))
            & (theirs["peer"] == comm.rank)
            & (theirs["seq"] == int(record["seq"]))
        )
        states = theirs["state"][matching]
        if (states == State.COMPLETED).any():
            return set(), set()
        gone = member.rank.process in (STOPPED, DEAD) and rank.process not in (STOPPED, DEAD)
        return {member.rank.rank} if gone or not len(states) else set(), set()


def _cycle(edges: dict[int, list[int]]) -> list[int]:
    """Returns ranks that wait for each other in a cycle, or []."""
    left = {rank: [o for o in others if o in edges] for rank, others in edges.items()}
    count = {rank: len(others) for rank, others in left.items()}
    waiting = defaultdict(list)
    for rank, others in left.items():
        for other in others:
            waiting[other].append(rank)
    ends = [rank for rank, n in count.items() if not n]
    for end in ends:  # which grows
        for rank in waiting[end]:
            count[rank] -= 1
            if not count[rank]:
                ends.append(rank)
    cyclic = {rank for rank, n in count.items() if n}
    if not cyclic:
        return []
    path, at = [min(cyclic)], {min(cyclic): 0}
    while True:
        after = next(other for other in left[path[-1]] if other in cyclic)
        if after in at:
            return path[at[after] :]
        at[after] = len(path)
        path.append(after)


def _blockers(ranks: list[Rank], edges: dict[int, list[int]]) -> list[Blocker]:
    """Returns the blockers, with the one that holds up most ranks first."""
    waiting: dict[int, set[int]] = {}
    for number, others in edges.items():
        for other in others:
            waiting.setdefault(other, set()).add(number)
    living = any(not rank.gone for rank in ranks)
    found = []
    for rank in ranks:
        if edges[rank.rank] and not (living and rank.process in (STOPPED, DEAD)):
            continue
        held: set[int] = set()
        fresh = waiting.get(rank.rank, set()) - {rank.rank}
        while fresh:
            held |= fresh
            fresh = {r for f in fresh for r in waiting.get(f, ())} - held - {rank.rank}
        if held or rank.process in (STOPPED, DEAD):
            found.append(Blocker(rank.rank, sorted(held)))
    return sorted(found, key=lambda b: (-len(b.holds_up), b.rank))
