"""TableStore, from which a table is built: columns that grow, numbers for values that repeat, groups."""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from unicomm.flight_recorder.memory import Memory
from unicomm.flight_recorder.ring.call_path import CallPath, Frame
from unicomm.flight_recorder.ring.endings import Ending, EndingFiles
from unicomm.flight_recorder.ring.reader import InputRemark, State
from unicomm.flight_recorder.texts import MOST_RANKS, tell_apart

from .checksums import Checksums
from .retirement import mark_failed
from .table import KILLED, RUNNING, Calls, Column, Group, Shapes, Source, Table

T = TypeVar("T")

_COLUMNS: dict[str, type[np.generic]] = {
    "rank": np.int32,
    "group": np.int32,
    "call": np.int32,
    "seq": np.int64,
    "peer": np.int32,
    "state": np.uint8,
    "error": np.uint8,
    "flags": np.uint8,
    "created_ns": np.int64,
    "started_ns": np.int64,
    "completed_ns": np.int64,
    "frame": np.int32,
    "thread": np.int32,
}


_COPIES_AHEAD = 8
_LONG = 1024  # members of a group for which a check costs less than a list
_MOST_MEMBERS = 1 << 26  # of all groups: 4096 of 16 384 ranks
# Bytes that a table and its analysis need at most: for a row; a member of a group; a rank that is a member of
# any; each rank up to the highest; a group or source; the use of a group by a source; the place of a value in
# a dictionary; a frame without its texts.
_ROW, _MEMBER, _NAMED, _RANK, _GROUP, _USE, _PLACE, _FRAME = 192, 48, 256, 16, 2048, 400, 120, 200


def _size(value: Any) -> int:
    """Returns the bytes of a text, a number, a frame, or a tuple of these."""
    if isinstance(value, tuple):
        return sys.getsizeof(value) + sum(map(_size, value))
    if isinstance(value, Frame):
        return _FRAME + sys.getsizeof(value.function) + sys.getsizeof(value.file)
    return sys.getsizeof(value)


class Interner(Generic[T]):
    """Numbers values in the order of their first appearance."""

    def __init__(self, *first: T, memory: Memory | None = None) -> None:
        """`memory`: where the values are counted; None for values that are counted elsewhere."""
        self._memory = memory
        self.table: dict[T, int] = {value: number for number, value in enumerate(first)}

    def __call__(self, value: T) -> int:
        new = len(self.table)
        number = self.table.setdefault(value, new)
        if number == new and self._memory is not None:
            self._memory.take(_PLACE + _size(value))
        return number

    @property
    def values(self) -> list[T]:
        return list(self.table)


class _Rows:
    """Columns that grow. Reserved but unused room costs no memory, because its pages are never touched.

    A thread copies the rows while the caller prepares the next ones, because the kernel takes longer to
    provide new pages than the copying takes.
    """

    def __init__(self) -> None:
        self.count = 0
        self._copier = ThreadPoolExecutor(1)
        self._copying: deque[Future[None]] = deque()
        self.columns: dict[str, Column] = {name: np.empty(0, dtype) for name, dtype in _COLUMNS.items()}

    def reserve(self, rows: int) -> None:
        if rows > len(self.columns["rank"]):
            self._wait(0)
            for name, dtype in _COLUMNS.items():
                grown = np.empty(rows, dtype)
                grown[: self.count] = self.columns[name][: self.count]
                self.columns[name] = grown

    def append(self, out: dict[str, Column]) -> slice:
        """Appends rows and returns their range."""
        end = self.count + len(out["rank"])
        if end > len(self.columns["rank"]):
            self.reserve(end + end // 2)
        here = slice(self.count, end)
        self.count = end
        self._wait(_COPIES_AHEAD)
        self._copying.append(self._copier.submit(self._copy, here, out))
        return here

    def _copy(self, here: slice, out: dict[str, Column]) -> None:
        for name, column in self.columns.items():
            column[here] = out[name]

    def _wait(self, most: int) -> None:
        while len(self._copying) > most:
            self._copying.popleft().result()

    def close(self) -> None:
        """Waits until all rows are copied."""
        self._wait(0)
        self._copier.shutdown()


class TableStore:
    """Collects rows and the values they refer to; `finish` returns the table.

    A second source of a rank becomes a remark, and its rows are left out. (`load` adds the newest first.)
    """

    def __init__(self, memory: Memory | None = None) -> None:
        """`memory`: where the table, and what analyzing it needs, is counted; None if it is not bounded."""
        self.memory = memory = Memory(sys.maxsize) if memory is None else memory
        self.ops = Interner("", memory=memory)
        self.reductions = Interner("", memory=memory)
        self.dtypes = Interner("", memory=memory)
        self.shapes: Interner[Shapes] = Interner((), memory=memory)
        self.stacks: Interner[CallPath] = Interner((), memory=memory)
        self.threads = Interner("", memory=memory)
        self.calls: Interner[tuple[int, ...]] = Interner(memory=memory)
        self.groups: dict[tuple[str, str], int] = {}
        self.group_list: list[Group] = []
        self._members = 0  # of all groups
        self._highest = -1  # the highest rank of any group or source
        self._by_rank = 0  # bytes that are counted for what an analysis keeps by rank
        self.sources: list[Source] = []
        self._rows = _Rows()
        self._checksums: list[tuple[Source, Checksums]] = []
        self.taken: dict[int, str] = {}
        self.remarks: list[InputRemark] = []
        self.endings = EndingFiles()

    def group_index(self, key: tuple[str, str], members: int, make: Callable[[], Group]) -> int:
        """Returns the index of the group under (identity, text of its ranks); `make` makes a new one.

        `members`: how many a new one has at most. Raises `ValueError` when the groups have more members than
        any job's, `TooMuchMemoryError` before it makes a group that needs too much.
        """
        if key not in self.groups:
            if self._members > _MOST_MEMBERS:
                raise ValueError(f"the groups of all files together have more than {_MOST_MEMBERS} members")
            self.memory.take(_GROUP + sum(map(_size, key)) + members * _MEMBER)
            group = make()
            self._members += len(group.ranks)
            self._count_ranks(int(group.ranks.max()) if len(group.ranks) else -1)
            self.groups[key] = len(self.group_list)
            self.group_list.append(group)
        return self.groups[key]

    def check_members(self, count: int) -> None:
        """Raises `TooMuchMemoryError` if there is no memory for a list of so many ranks."""
        self.memory.check(count * _MEMBER)

    def _count_ranks(self, highest: int) -> None:
        """Counts what an analysis keeps by rank, with `highest` and the members of all groups."""
        self._highest = max(self._highest, highest)
        named = min(self._members + len(self.sources), self._highest + 1)
        size = named * _NAMED + (self._highest + 1) * _RANK
        if size > self._by_rank:
            self.memory.take(size - self._by_rank)
            self._by_rank = size

    def in_job(self, group: Column, inside: Column) -> Column:
        """Converts ranks in their groups to ranks in the job; a rank out of range becomes -1."""
        out = np.full(len(group), -1, np.int32)
        for index in np.unique(group):
            if index < 0:
                continue
            ranks = self.group_list[int(index)].ranks
            rows = np.flatnonzero((group == index) & (inside >= 0) & (inside < len(ranks)))
            out[rows] = ranks[inside[rows]]
        return out

    def take(self, source: Source) -> bool:
        """Adds the source.

        Returns False if its rank is unknown or already taken. Then it adds a remark, unless the source is a
        copy of the file that was taken.
        """
        if source.rank < 0:
            message = "neither its content nor its name tells its rank, so its operations were left out"
        elif source.rank >= MOST_RANKS:
            message = f"rank {source.rank} is no rank of a job: the file is damaged, so it was left out"
        elif source.rank in self.taken:
            if source.format == "ring" and Path(source.path).name == Path(self.taken[source.rank]).name:
                return False  # a copy of the same ring, as `unicomm run` makes when a rank fails
            message = f"rank {source.rank} has another file, {self.taken[source.rank]}: this one was left out"
        else:
            self._count_ranks(source.rank)
            self.memory.take(_GROUP + _USE * len(source.members))
            self.taken[source.rank] = source.path
            self.sources.append(source)
            return True
        self.remarks.append(InputRemark(source.path, message))
        return False

    def drop_sources(self, keep: int) -> None:
        """Forgets the sources after the first `keep`; their rows, if there are any, belong to none."""
        for source in self.sources[keep:]:
            del self.taken[source.rank]
        del self.sources[keep:]

    def reserve(self, rows: int) -> None:
        """Makes room for `rows` rows in total, at most for those that there is memory for."""
        self._rows.reserve(min(rows, self.memory.left // _ROW))

    def put(
        self, source: Source, out: dict[str, Column], collective: Column, checksums: Checksums | None = None
    ) -> None:
        """Appends the rows of a source, and notes in it its first and newest collectives of each group."""
        self.memory.take(_ROW * len(out["rank"]))
        if checksums is not None:
            self._checksums.append((source, checksums))
        here = self._rows.append(out)
        source.begin, source.end = here.start, here.stop
        rows = np.flatnonzero(collective & (out["group"] >= 0))
        if not len(rows):
            return
        group, seq = out["group"][rows], out["seq"][rows]
        low = int(group.min())
        first = np.full(int(group.max()) - low + 1, -1, np.int64)
        last = first.copy()
        first[group[::-1] - low] = seq[::-1]
        last[group - low] = seq
        done = first * 0 - 1
        over = out["state"][rows] == State.COMPLETED
        done[group[over] - low] = seq[over]
        for at in np.flatnonzero(first >= 0):
            index = int(at) + low
            source.first_seq[index] = int(first[at])
            source.created[index] = max(source.created.get(index, 0), int(last[at]))
            source.completed[index] = max(source.completed.get(index, 0), int(done[at]))
            source.members.setdefault(index, None)

    def finish(self) -> Table:
        """Returns the table. The store is empty afterwards."""
        rows, self._rows = self._rows, _Rows()
        rows.close()
        sources = sorted(self.sources, key=lambda s: s.rank)
        if all(a.end <= b.begin for a, b in pairwise(sources)):
            columns = {name: column[: rows.count] for name, column in rows.columns.items()}
        else:
            columns = {}
            for name in _COLUMNS:  # one at a time, so that only one column is in memory twice
                column = rows.columns.pop(name)
                columns[name] = np.concatenate([column[s.begin : s.end] for s in sources])
            at = 0
            for source in sources:
                source.begin, source.end = at, at + source.end - source.begin
                at = source.end
        calls = np.asarray(self.calls.values or [(0,) * 10], np.int64)
        table = Table(
            **columns,
            calls=Calls(*(np.ascontiguousarray(calls[:, i]) for i in range(10))),
            ops=self.ops.values,
            reductions=self.reductions.values,
            dtypes=self.dtypes.values,
            shapes=self.shapes.values,
            stacks=self.stacks.values,
            threads=self.threads.values,
            groups=self.group_list,
            sources=sources,
            remarks=self.remarks,
            endings=self._endings(sources),
            parts={},
            coming=frozenset(),
            checksums=Checksums.joined([(s.begin, sums) for s, sums in self._checksums if s in sources]),
        )
        for group_index, group in enumerate(table.groups):
            if not group.size:  # no configuration lists its members: take the ranks that used it
                users = [s.rank for s in sources if group_index in s.members]
                group.ranks = np.asarray(users, np.int32)
        unite(table, [key[0] for key in self.groups])
        mark_failed(table)
        _name_groups(table)
        for ending in table.endings:
            _see_alive(table, ending)
        return table

    def _endings(self, sources: list[Source]) -> list[Ending]:
        """Returns how the processes of ranks ended; without those of earlier processes of a rank."""
        rings = [(Path(s.path).stem, s.rank) for s in sources if s.format == "ring"]
        several = Counter(name for name, _ in rings)  # ranks that are threads share a process
        found = self.endings.joined({name: rank for name, rank in rings if several[name] == 1})
        newest = {rank: name for name, rank in rings}
        return [e for e in found if not e.name or newest.get(e.rank, e.name) == e.name]


def _see_alive(table: Table, ending: Ending) -> None:
    """Lets a killed rank count as running if it was seen to live after its last operation."""
    source = table.source_of.get(ending.rank)
    if source is None or source.process != KILLED or not ending.alive_ns:
        return
    if source.begin == source.end or int(table.created_ns[source.end - 1]) <= ending.alive_ns:
        source.process, source.as_of_ns = RUNNING, ending.alive_ns


# torch's names of the default group, its description of it, and that of groups which the program has not
# described.
_DEFAULT_NAMES, _DEFAULT, _UNDESCRIBED = ("", "0"), "default_pg", "undefined"


def _name_groups(table: Table) -> None:
    """Gives the groups the names that reports show; see `Group`."""
    used = set(np.unique(table.group).tolist()).union(*(source.members for source in table.sources))
    groups = [group for index, group in enumerate(table.groups) if index in used]
    names = []
    for group in groups:
        group.recorded = group.name
        if group.desc == _DEFAULT or (not group.uid and group.name in _DEFAULT_NAMES):
            group.desc = ""
            names.append("default")
        else:
            group.desc = "" if group.desc == _UNDESCRIBED else group.desc
            names.append(group.desc or group.name)
    members = [_as_sequence(group.ranks) for group in groups]
    backends = [group.backend for group in groups]
    for group, name in zip(groups, tell_apart(list(zip(names, members, backends, strict=True))), strict=True):
        group.name = name


def _as_sequence(ranks: Column) -> Sequence[int]:
    """Returns ranks as a range if they are many and are one, which needs no memory for each."""
    if len(ranks) > _LONG:
        step = int(ranks[1]) - int(ranks[0])
        if step > 0 and (np.diff(ranks) == step).all():
            return range(int(ranks[0]), int(ranks[-1]) + 1, step)
    found: list[int] = ranks.tolist()
    return found


def unite(table: Table, identities: list[str]) -> None:
    """Merges groups with the same identity (uid, or name) and common members whose lists of members differ.

    The merged group has the members that most sources list. The other sources keep their lists in
    `Source.members`.
    """
    alike: dict[str, list[int]] = {}
    for index, identity in enumerate(identities):
        alike.setdefault(identity, []).append(index)
    several = {i: indices for i, indices in alike.items() if len(indices) > 1}
    if not several:
        return
    listed = np.zeros(len(table.groups), np.int64)
    for source in table.sources:
        for index in source.members:
            listed[index] += 1
    target = np.arange(len(table.groups) + 1)
    target[-1] = -1  # for rows with group -1
    for indices in several.values():
        owner: dict[int, int] = {}
        for index in sorted(indices, key=lambda i: (-int(listed[i]), i)):
            ranks = table.groups[index].ranks.tolist()
            known = next((owner[r] for r in ranks if r in owner), None)
            if known is not None and listed[index]:
                target[index] = known
            for rank in ranks:
                owner.setdefault(rank, int(target[index]))
    moved = np.flatnonzero(target[:-1] != np.arange(len(table.groups)))
    if not len(moved):
        return
    table.group = target[table.group].astype(np.int32)
    for source in table.sources:
        for index in moved.tolist():
            if index not in source.members:
                continue
            to = int(target[index])
            source.members[to] = table.groups[index].ranks
            del source.members[index]
            if index in source.closed:
                source.closed.add(to)
            for kept in (source.first_seq, source.created, source.started, source.completed):
                if index in kept:
                    kept[to] = kept.pop(index)
