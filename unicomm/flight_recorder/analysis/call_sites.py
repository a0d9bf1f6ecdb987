"""CallSites: the lines from which the ranks of a group make their calls, and where ranks part ways.

Ranks may meet in one collective from different lines of the program. That is legal if the lines are two
branches of one call: `if rank == 0: broadcast(x, 0) else: broadcast(y, 0)`. It is a fault if one rank makes a
call that the others do not make, such as an evaluation on rank 0. That rank is then out of step, and nothing
fails until two calls differ in type or size. So a finding alone does not tell where the fault is.

The calls of two ranks in a group are aligned as two texts are, at the least cost: equal calls are a pair,
calls that fit but come from two lines are a pair at a cost, and a call that one rank makes alone is a gap at
a higher cost (O. Gotoh, "An improved algorithm for matching biological sequences", 1982). The fault is at the
last gap before the finding after which the two ranks were not in step again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from unicomm.flight_recorder.formats.operation_names import OpKind
from unicomm.flight_recorder.ring.call_path import CallPath, Frame, Whose
from unicomm.flight_recorder.ring.reader import State
from unicomm.flight_recorder.table.rows import place
from unicomm.flight_recorder.table.table import Column, Table

from .matching import CallSignatures

# Costs of an alignment.
_OTHER_ARGUMENTS = 2  # a pair of calls from one line that do not fit
_OTHER_LINE = 3  # a pair of calls that fit, from two lines
_GAP, _LONGER = 12, 2  # a call that one rank alone makes, and each further one next to it
_OTHER_CALL = 20  # a pair of calls that differ in everything: less than two gaps
_NEVER = 1 << 24

_MOST_CALLS = 1024  # of two ranks that are aligned, from their first difference on
_MOST_KINDS = 32  # sequences of a group that are compared with the most frequent one


@dataclass(frozen=True)
class Parting:
    """Where ranks of a group part ways.

    Attributes:
        seq: the collective in which they still meet, or no longer do, from different lines.
        right, wrong: the ranks that are there from the line of the majority, and the others. Of two equal
            halves, either may be wrong.
        extra: the calls that the wrong ranks make more than the right ones; negative if they make fewer.
    """

    seq: int
    right: list[int]
    wrong: list[int]
    extra: int

    @property
    def decided(self) -> bool:
        return len(self.right) > len(self.wrong)


@dataclass(frozen=True)
class _Calls:
    """The calls of some ranks in a group: lines, signatures, and whether nothing would follow."""

    ranks: list[int]
    sites: Column
    signatures: Column
    whole: bool


class CallSites:
    """Compares the lines from which ranks call.

    Args:
        table: the operations that the ranks have issued.
        program: all operations that they would issue, if that is known, as in a rehearsal. Its groups and
            calls are those of `table`.
    """

    def __init__(self, table: Table, signatures: CallSignatures, program: Table | None = None) -> None:
        self.table, self.signatures = table, signatures
        self._program = program or table
        self._known_end = program is not None
        self._partings: dict[tuple[int, int], Parting | None] = {}

    # --- lines --------------------------------------------------------------------------------------

    @cached_property
    def _site_of_stack(self) -> Column:
        """A number for the line of each stack, with the user's lines that led there."""
        known: dict[tuple[str, ...], int] = {}
        paths = (tuple(map(str, _users(stack) or stack)) for stack in self._program.stacks)
        return np.asarray([known.setdefault(path, len(known)) for path in paths], np.int64)

    def places(self, right: int, wrong: int) -> tuple[str, str]:
        """Returns the lines, "file:line", that distinguish two rows' calls, "" where they are unknown.

        That is the innermost line that the other rank does not pass in this group. In a function that both
        call, it is the line of the call.
        """
        a, b = (_users(self.table.stack(row)) for row in (right, wrong))
        return self._place(right, a, b, wrong), self._place(wrong, b, a, right)

    def own_places(self, right: int, wrong: int) -> tuple[str, str]:
        """Returns the innermost lines of the user in two rows' calls."""
        return place(self.table, right), place(self.table, wrong)

    def _place(self, row: int, own: list[Frame], other: list[Frame], other_row: int) -> str:
        if not own or not other or str(own[0]) == str(other[0]):
            passed = self._passed(int(self.table.rank[other_row]), int(self.table.group[row]))
            for frame in own:
                if str(frame) not in passed:
                    return str(frame)
            for mine, theirs in zip(reversed(own), reversed(other), strict=False):
                if str(mine) != str(theirs):
                    return str(mine)
        return place(self.table, row)

    def _passed(self, rank: int, group: int) -> set[str]:
        """Returns the lines that lead a rank to its collectives in a group."""
        rows = self._rows(rank, group)
        stacks = np.unique(self._program.frame[rows]).tolist()
        return {str(f) for stack in stacks for f in self._program.stacks[stack] if f.whose is Whose.USER}

    def _rows(self, rank: int, group: int) -> Column:
        program = self._program
        source = program.source_of[rank]
        span = slice(source.begin, source.end)
        mine = program.group[span] == group
        mine &= program.calls.kind[program.call[span]] == OpKind.COLLECTIVE
        rows: Column = np.flatnonzero(mine) + source.begin
        return rows

    # --- where ranks part ways ------------------------------------------------------------------------

    def parting(self, group: int, seq: int) -> Parting | None:
        """Returns where the ranks went out of step that are not in step at collective `seq` of a group.

        None if they are in step, if the lines do not tell, or if records are missing.
        """
        key = (group, seq)
        if key not in self._partings:
            self._partings[key] = self._find(group, seq)
        return self._partings[key]

    def _find(self, group: int, seq: int) -> Parting | None:
        members = [r for r in self.table.groups[group].ranks.tolist() if r in self._program.source_of]
        if any(self._program.source_of[r].first_seq.get(group, 1) != 1 for r in members):
            return None
        kinds = sorted(self._kinds(group, members), key=lambda one: (-len(one.ranks), one.ranks))
        if not kinds:
            return None
        usual, *others = kinds[:_MOST_KINDS]
        found = [(gap, one) for one in others if (gap := _gap(one, usual, seq - 1)) is not None]
        if not found:
            return None
        at = min(gap.at for gap, _ in found)
        wrong = [rank for gap, one in found if gap.at == at for rank in one.ranks]
        site = usual.sites[at]
        right = [r for one in kinds if len(one.sites) > at and one.sites[at] == site for r in one.ranks]
        right = [rank for rank in right if rank not in wrong]
        extra = next(gap.extra for gap, _ in found if gap.at == at)
        if len(wrong) > len(right):
            right, wrong, extra = wrong, right, -extra
        return Parting(at + 1, sorted(right), sorted(wrong), extra)

    def lone_message(self, group: int, rank: int, peer: int, send: bool) -> int | None:
        """Returns the first row of the messages that a rank issues alone, None if the lines do not tell.

        Only in a rehearsal, where all messages of both ranks are known. If the rank has n messages more than
        the other side, and one line issues n of them, and the other side has no line with as many, then that
        line has no counterpart.
        """
        program = self._program
        if not (self._known_end and self._whole(rank) and self._whole(peer)):
            return None
        own = self._messages(group, rank, peer, OpKind.SEND if send else OpKind.RECV)
        others = self._messages(group, peer, rank, OpKind.RECV if send else OpKind.SEND)
        extra = len(own) - len(others)
        if extra < 1 or extra == len(own):
            return None
        sites = self._site_of_stack[program.frame[own]]
        found, counts = np.unique(sites, return_counts=True)
        theirs = np.unique(self._site_of_stack[program.frame[others]], return_counts=True)[1]
        lone = found[counts == extra]
        if len(lone) != 1 or (theirs == extra).any():
            return None
        at = int(own[sites == lone[0]][0]) - program.source_of[rank].begin
        source = self.table.source_of[rank]
        return source.begin + at if source.begin + at < source.end else None

    def _messages(self, group: int, rank: int, peer: int, kind: OpKind) -> Column:
        program = self._program
        source = program.source_of[rank]
        span = slice(source.begin, source.end)
        mine = (program.group[span] == group) & (program.peer[span] == peer)
        mine &= program.calls.kind[program.call[span]] == kind
        rows: Column = np.flatnonzero(mine) + source.begin
        return rows

    def _whole(self, rank: int) -> bool:
        """Returns whether all operations of a rank are known: it has come to its end, and raised nothing."""
        source = self._program.source_of.get(rank)
        if source is None or not self._known_end or source.end == source.begin:
            return False
        raised = any(ending.raised is not None for ending in self._program.endings if ending.rank == rank)
        return not raised and bool(self._program.state[source.end - 1] == State.COMPLETED)

    def _kinds(self, group: int, members: list[int]) -> Iterator[_Calls]:
        program = self._program
        ranks: dict[tuple[bytes, bytes, bool], list[int]] = {}
        for rank in members:
            rows = self._rows(rank, group)
            if (program.frame[rows] == 0).any():
                continue  # lines are unknown
            sites = self._site_of_stack[program.frame[rows]]
            signatures = self.signatures.ids[program.call[rows]].astype(np.int64)
            ranks.setdefault((sites.tobytes(), signatures.tobytes(), self._whole(rank)), []).append(rank)
        for (lines, calls, whole), of in ranks.items():
            yield _Calls(of, np.frombuffer(lines, np.int64), np.frombuffer(calls, np.int64), whole)


def _users(stack: CallPath) -> list[Frame]:
    return [frame for frame in stack if frame.whose is Whose.USER and frame.file]


@dataclass(frozen=True)
class _Gap:
    at: int  # the place in both sequences
    extra: int


def _gap(one: _Calls, usual: _Calls, until: int) -> _Gap | None:
    """Returns the gap from which on two sequences are out of step at the place `until`."""
    most = min(len(one.sites), len(usual.sites))
    same = (one.sites[:most] == usual.sites[:most]) & (one.signatures[:most] == usual.signatures[:most])
    start = int(np.argmin(same)) if not same.all() else most
    if start > until:
        return None
    ends = (slice(start, start + _MOST_CALLS),)
    whole = one.whole and usual.whole and max(len(one.sites), len(usual.sites)) - start <= _MOST_CALLS
    pairs = _aligned(
        (one.sites[ends], one.signatures[ends]), (usual.sites[ends], usual.signatures[ends]), whole
    )
    shift, gap = 0, None
    before = (-1, -1)
    for mine, theirs in pairs:
        skipped = mine - before[0], theirs - before[1]
        if skipped[0] != skipped[1]:
            at = before[0] + 1 + start
            if at > until:
                break
            shift += skipped[0] - skipped[1]
            gap = gap or _Gap(at, shift)
        if shift == 0:
            gap = None
        before = mine, theirs
    if gap is not None and gap.at < most and one.sites[gap.at] != usual.sites[gap.at]:
        return gap
    return _without_twin(one, usual, until) if whole else None


def _without_twin(one: _Calls, usual: _Calls, until: int) -> _Gap | None:
    """Returns the first pair of calls from two lines that are not two branches of one call.

    That is so if one rank calls more often from one of the lines, and both call equally often from the other
    one. It is needed where a library makes calls at fixed places, as DDP does when it rebuilds its buckets:
    then the cheapest alignment has no gap at the fault.
    """
    extra = len(one.sites) - len(usual.sites)
    if not extra:
        return None
    size = int(max(one.sites.max(initial=0), usual.sites.max(initial=0))) + 1
    more = np.bincount(one.sites, minlength=size) - np.bincount(usual.sites, minlength=size)
    shared = min(len(one.sites), len(usual.sites), until + 1)
    mine, theirs = one.sites[:shared], usual.sites[:shared]
    lonely = (mine != theirs) & ((more[mine] * extra > 0) & (more[theirs] == 0))
    lonely |= (mine != theirs) & ((more[theirs] * extra < 0) & (more[mine] == 0))
    return _Gap(int(np.argmax(lonely)), extra) if lonely.any() else None


def _aligned(one: tuple[Column, Column], other: tuple[Column, Column], whole: bool) -> list[tuple[int, int]]:
    """Returns the pairs of the cheapest alignment of two sequences, each of lines and signatures.

    A last pair stands behind both ends. `whole`: whether nothing would follow; else the calls at the end of
    one sequence that have no counterpart cost nothing. Of equally cheap alignments, gaps come late.
    """
    n, m = len(one[0]), len(other[0])
    across = np.arange(m + 1) * _LONGER
    pair, down, right = (np.full((n + 1, m + 1), _NEVER, np.int32) for _ in range(3))
    pair[0, 0] = 0
    right[0, 1:] = _GAP + across[:-1]
    for i in range(1, n + 1):
        best = np.minimum(np.minimum(pair[i - 1], down[i - 1]), right[i - 1])
        site, fits = (one[part][i - 1] == other[part] for part in (0, 1))
        cost = np.where(fits, np.where(site, 0, _OTHER_LINE), np.where(site, _OTHER_ARGUMENTS, _OTHER_CALL))
        pair[i, 1:] = best[:-1] + cost
        down[i] = np.minimum(down[i - 1] + _LONGER, best + _GAP)
        least = np.minimum.accumulate(np.minimum(pair[i], down[i]) - across)
        right[i, 1:] = least[:-1] + _GAP + across[:-1]
    best = np.minimum(np.minimum(pair, down), right)
    i, j = n, m
    if not whole:
        ends = [(int(best[n, k]), -n - k, n, k) for k in range(m + 1)]
        ends += [(int(best[k, m]), -m - k, k, m) for k in range(n + 1)]
        _, _, i, j = min(ends)
    pairs = [(i, j)] if whole else []
    while i or j:
        value = best[i, j]
        if value == down[i, j]:
            while i > 1 and down[i, j] == down[i - 1, j] + _LONGER:
                i -= 1
            i -= 1
        elif value == right[i, j]:
            while j > 1 and right[i, j] == right[i, j - 1] + _LONGER:
                j -= 1
            j -= 1
        else:
            i, j = i - 1, j - 1
            pairs.append((i, j))
    return pairs[::-1]
