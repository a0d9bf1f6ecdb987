"""CallMismatches: findings about collectives whose calls differ. A vote decides which ranks are wrong."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np

from unicomm.flight_recorder.formats.operation_names import OpKind
from unicomm.flight_recorder.ring.reader import State
from unicomm.flight_recorder.table.collectives import CollectiveRows
from unicomm.flight_recorder.table.rows import find_row
from unicomm.flight_recorder.table.table import Column, Table
from unicomm.flight_recorder.texts import capital, ranks_text

from .call_sites import CallSites, Parting
from .matching import CallSignatures
from .verdict import Finding, Side, Verdict

_OF_PART = {
    "op": Verdict.WRONG_OPERATION,
    "root": Verdict.ROOT_MISMATCH,
    "dtype": Verdict.DTYPE_MISMATCH,
    "red": Verdict.REDUCTION_MISMATCH,
    "numel": Verdict.SIZE_MISMATCH,
    "split": Verdict.SPLIT_MISMATCH,
}
_WORD = {
    Verdict.ROOT_MISMATCH: "root",
    Verdict.DTYPE_MISMATCH: "element type",
    Verdict.REDUCTION_MISMATCH: "reduction",
    Verdict.SIZE_MISMATCH: "size",
    Verdict.SPLIT_MISMATCH: "the sizes of the parts",
}
_WINDOW = 8  # the number of operations within which a swapped order is searched
_MOST_SIBLINGS = 32
_SHOWN_PARTS = 8
_FOREVER = 1 << 62
CLEAR, BY_HISTORY, UNDECIDED = 0.97, 0.75, 0.5


@dataclass
class Mismatch:
    """A finding about calls that differ, and its first occurrence.

    Attributes:
        seq, until: the first and the last collective of the group that belong to it; -1 for messages.
        derails: whether the later operations of the ranks in the group do not match because of it.
        times: the number of occurrences.
    """

    finding: Finding
    group: int
    seq: int
    derails: bool
    until: int = -1
    times: int = 1


class CallMismatches:
    """Decides who is wrong in collectives whose calls differ.

    The majority of the ranks is right. Without a majority, other groups of the same kind decide by their
    collective of the same number, then the calls that each side made before at this place of its loop.
    """

    def __init__(self, table: Table, signatures: CallSignatures, sites: CallSites) -> None:
        self.table, self.signatures, self.sites = table, signatures, sites
        self._siblings: dict[str, list[int]] | None = None

    def collectives(self, found: list[CollectiveRows]) -> list[Mismatch]:
        out: list[Mismatch] = []
        derailed: dict[int, dict[int, int]] = defaultdict(
            dict
        )  # by group and rank: the last affected collective
        merged: dict[tuple[int, Verdict, tuple[int, ...]], Mismatch] = {}
        for one in sorted(found, key=lambda d: (d.group, d.seq)):
            ranks = self.table.rank[one.rows]
            explained = [r for r, until in derailed[one.group].items() if until >= one.seq]
            rows = one.rows[~np.isin(ranks, explained)]
            ids = self.signatures.ids[self.table.call[rows]]
            if len(rows) < 2 or (ids == ids[0]).all():
                continue
            for mismatch in self._one(one.group, one.seq, rows, ids):
                key = (one.group, mismatch.finding.verdict, tuple(mismatch.finding.culprits))
                if key in merged:
                    merged[key].times += 1
                    continue
                merged[key] = mismatch
                out.append(mismatch)
                until = _FOREVER if mismatch.derails and mismatch.until < 0 else mismatch.until
                for rank in mismatch.finding.culprits:
                    derailed[one.group][rank] = max(until, derailed[one.group].get(rank, -1))
        for mismatch in out:
            if mismatch.times > 1:
                mismatch.finding.evidence.append(
                    f"the same difference is in {mismatch.times - 1} of the next differing collectives"
                )
        return out

    def _one(self, group: int, seq: int, rows: Column, ids: Column) -> list[Mismatch]:
        sides = {int(label): rows[ids == label] for label in np.unique(ids)}
        order, confidence = self._vote(group, seq, sides)
        right, *others = (sides[label] for label in order)
        wrong_by_verdict: dict[Verdict, list[Column]] = defaultdict(list)
        for side in others:
            part = self.signatures.difference(self._call(right), self._call(side))
            wrong_by_verdict[_OF_PART.get(part, Verdict.WRONG_OPERATION)].append(side)
        return [
            self._mismatch(kind, group, seq, right, wrong_sides, confidence)
            for kind, wrong_sides in wrong_by_verdict.items()
        ]

    def _call(self, rows: Column) -> int:
        return int(self.table.call[rows[0]])

    def _vote(self, group: int, seq: int, sides: dict[int, Column]) -> tuple[list[int], float]:
        """Returns the sides, the right one first, and the confidence."""
        votes = {label: len(rows) for label, rows in sides.items()}
        order = sorted(votes, key=lambda label: -votes[label])
        if votes[order[0]] > votes[order[1]]:
            share = votes[order[0]] / sum(votes.values())
            return order, CLEAR if share >= 2 / 3 else 0.9
        tied = [label for label in order if votes[label] == votes[order[0]]]
        for opinion in (
            self._sibling_votes(group, seq, sides),
            self._history(sides, 2),
            self._history(sides, 1),
        ):
            best = sorted(tied, key=lambda label: -opinion[label])
            if opinion[best[0]] > opinion[best[1]]:
                return [best[0], *(label for label in order if label != best[0])], BY_HISTORY
        return order, UNDECIDED

    def _loose(self, call: int) -> tuple[int, ...]:
        a = self.signatures
        return int(a.op[call]), int(a.dtype[call]), int(a.numel[call]), int(a.red[call]), int(a.split[call])

    def _sibling_votes(self, group: int, seq: int, sides: dict[int, Column]) -> Counter[int]:
        """Counts the votes of groups of the same kind (name without digits, description, size)."""
        table = self.table
        if self._siblings is None:
            self._siblings = defaultdict(list)
            for index in range(len(table.groups)):
                self._siblings[self._family(index)].append(index)
        meant = {self._loose(self._call(rows)): label for label, rows in sides.items()}
        votes: Counter[int] = Counter()
        for other in self._siblings[self._family(group)][:_MOST_SIBLINGS]:
            if other == group:
                continue
            for rank in table.groups[other].ranks.tolist():
                row = find_row(table, rank, other, seq)
                if row is not None:
                    label = meant.get(self._loose(int(table.call[row])))
                    if label is not None:
                        votes[label] += 1
                    break
        return votes

    def _family(self, index: int) -> str:
        group = self.table.groups[index]
        return f"{re.sub(r'[0-9]+', '', group.name)}|{group.desc}|{group.size}"

    def _history(self, sides: dict[int, Column], length: int) -> Counter[int]:
        """Counts how often each side made its call before: after the same operation (2), or at all (1)."""
        out: Counter[int] = Counter()
        for label, rows in sides.items():
            row = int(rows[0])
            ids = self._before(row)
            hits = ids == label
            if length == 2 and len(ids) > 1:
                hits = hits[1:] & (ids[:-1] == ids[-1])
            out[label] = int(hits.sum())
        return out

    def _before(self, row: int) -> Column:
        """Returns the signatures of the earlier collectives of a row's rank in the row's group."""
        table = self.table
        begin = table.source_of[int(table.rank[row])].begin
        same = table.group[begin:row] == table.group[row]
        same &= table.calls.kind[table.call[begin:row]] == OpKind.COLLECTIVE
        ids: Column = self.signatures.ids[table.call[begin:row][same]]
        return ids

    def _mismatch(
        self,
        kind: Verdict,
        group: int,
        seq: int,
        right: Column,
        wrong_sides: list[Column],
        confidence: float,
    ) -> Mismatch:
        table, wrong = self.table, np.concatenate(wrong_sides)
        note = ""
        derails, until = False, -1
        if swapped := self._swapped(right, wrong):
            kind, until = Verdict.ORDER_SWAP, seq + swapped - 1
            note = f"#{seq} to #{until} hold the same operations in another order"
        elif kind is Verdict.WRONG_OPERATION:
            note, derails = self._shift(right, wrong), True
        finding = self._finding(kind, group, seq, right, wrong_sides, confidence, note)
        unfinished = bool((table.state[np.concatenate([right, wrong])] != State.COMPLETED).any())
        return Mismatch(finding, group, seq, derails or unfinished, until)

    def _finding(
        self,
        kind: Verdict,
        group: int,
        seq: int,
        right: Column,
        wrong_sides: list[Column],
        confidence: float,
        note: str,
    ) -> Finding:
        table, wrong = self.table, np.concatenate(wrong_sides)
        name = table.groups[group].name
        culprits = sorted(int(r) for r in table.rank[wrong])
        majority = sorted(int(r) for r in table.rank[right])
        if confidence == UNDECIDED:
            culprits = sorted({*culprits, *majority})
        a, b = int(right[0]), int(wrong[0])
        places = self.sites.places
        if kind is Verdict.ORDER_SWAP:  # both pass the same lines
            places = self.sites.own_places
        where = [places(a, int(rows[0])) for rows in wrong_sides]
        there, here = where[0]
        who, others = ranks_text(table.rank[wrong]), ranks_text(table.rank[right])
        what = self._parts if kind is Verdict.SPLIT_MISMATCH else table.describe
        said = (
            f"{capital(who)} called {what(b)}{_at(here)}"
            f" where {others} called {what(a)}{_at(there)} (#{seq} of '{name}')."
        )
        if kind is Verdict.ORDER_SWAP:
            said = f"{capital(who)} issued operations of '{name}' in another order from #{seq} on. " + said
        elif kind in _WORD:
            said = f"{capital(who)} differed in {_WORD[kind]}. " + said
        if confidence == UNDECIDED:
            said += " There is no majority, so either side may be wrong."
        return Finding(
            verdict=kind,
            culprits=culprits,
            victims=sorted(set(table.groups[group].ranks.tolist()) - set(culprits)),
            group=name,
            seq_num=seq,
            operation=table.op_name(a),
            confidence=confidence,
            sentence=said,
            evidence=self._evidence(what(a), right, wrong, confidence, note),
            sides=[
                Side(sorted(int(r) for r in table.rank[rows]), what(int(rows[0])), place)
                for rows, place in zip(
                    (right, *wrong_sides), (there, *(one for _, one in where)), strict=True
                )
            ],
            next_steps=_next_steps(kind, here, there, who),
            since_ns=int(table.created_ns[wrong].min()),
        )

    def parted(self, group: int, parting: Parting, later: Finding) -> Finding:
        """Returns the finding about ranks that made a call of their own. `later` is its consequence."""
        table = self.table
        right, wrong = (
            np.asarray([find_row(table, rank, group, parting.seq) for rank in ranks], np.int64)
            for ranks in (parting.right, parting.wrong)
        )
        confidence = UNDECIDED
        if parting.decided:
            confidence = CLEAR if len(right) >= 2 * len(wrong) else 0.9
        who = ranks_text(parting.wrong)
        calls = f"{abs(parting.extra)} {'more' if parting.extra > 0 else 'fewer'}"
        calls += f" call{'s' * (abs(parting.extra) > 1)} here than by {ranks_text(parting.right)}"
        note = f"{calls}, by {who}: from here on they are out of step"
        kind = Verdict.WRONG_OPERATION
        finding = self._finding(kind, group, parting.seq, right, [wrong], confidence, note)
        ids = self.signatures.ids[table.call[np.concatenate([right, wrong])]]
        if (ids == ids[0]).all():
            finding.sentence += " These calls fit, so nothing failed there."
        if (later.group, later.seq_num) != (finding.group, finding.seq_num):
            finding.evidence.append(f"it shows later: {later.sentence}")
        finding.victims = sorted({*finding.victims, *later.victims, *later.culprits} - {*finding.culprits})
        finding.edges = later.edges
        return finding

    def _parts(self, row: int) -> str:
        """Returns an uneven gather or scatter with the sizes of its parts: "all_gather_v of parts 5, 6"."""
        table = self.table
        side = "out_shape" if table.op_name(row) == "all_gather_v" else "in_shape"
        shapes = table.shapes[int(getattr(table.calls, side)[table.call[row]])]
        sizes = [math.prod(shape) for shape in shapes]
        more = f", ... ({len(sizes)} parts)" if len(sizes) > _SHOWN_PARTS else ""
        return f"{table.op_name(row)} of parts {', '.join(map(str, sizes[:_SHOWN_PARTS]))}{more}"

    def _evidence(self, agreed: str, right: Column, wrong: Column, confidence: float, note: str) -> list[str]:
        table = self.table
        lines = [f"{len(right)} of {len(right) + len(wrong)} ranks agree: {agreed}"]
        if confidence == BY_HISTORY:
            lines = ["no majority: earlier calls of these ranks and of similar groups decide who is wrong"]
        elif confidence == UNDECIDED:
            lines = ["no majority, and no earlier call distinguishes the two sides"]
        if note:
            lines.append(note)
        over = int((table.state[right] == State.COMPLETED).sum())
        if over:
            lines.append(f"it completed on {over} ranks nevertheless: their results may be wrong")
        return lines

    def _swapped(self, right: Column, wrong: Column) -> int:
        """Returns over how many operations both sides made the same calls in another order; else 0."""
        mine, theirs = self._from(int(wrong[0])), self._from(int(right[0]))
        for width in range(2, min(_WINDOW, len(mine), len(theirs)) + 1):
            if Counter(mine[:width]) == Counter(theirs[:width]):
                return width
        return 0

    def _shift(self, right: Column, wrong: Column) -> str:
        """Says whether an operation was left out or added, judging by its neighbours; "" if unknown."""
        mine, theirs = self._from(int(wrong[0])), self._from(int(right[0]))
        other = self.table.op_name(int(right[0]))
        if len(mine) > 1 and mine[: len(theirs) - 1] == theirs[1 : len(mine) + 1]:
            return f"from here on it is one ahead: it left out this {other}"
        if len(theirs) > 1 and mine[1 : len(theirs)] == theirs[: len(mine) - 1] and len(mine) > 1:
            return "from here on it is one behind: it issued one more"
        earlier = self._before(int(right[0]))
        right_label, label = (int(self.signatures.ids[self._call(rows)]) for rows in (right, wrong))
        places = np.flatnonzero(earlier[:-1] == right_label)
        if len(places) and bool((earlier[places + 1] == label).mean() > 0.9):
            op = self.table.op_name(int(wrong[0]))
            return f"{op} is what follows {other} elsewhere: it was left out, or the two were swapped"
        return ""

    def _from(self, row: int) -> list[int]:
        """Returns the signatures of a row's collective and the following ones, at most twice the window."""
        table = self.table
        end = table.source_of[int(table.rank[row])].end
        same = table.group[row:end] == table.group[row]
        same &= table.calls.kind[table.call[row:end]] == OpKind.COLLECTIVE
        ids: list[int] = self.signatures.ids[table.call[row:end][same][: 2 * _WINDOW]].tolist()
        return ids


def _at(place: str) -> str:
    return f" at {place}" if place else ""


def _next_steps(kind: Verdict, wrong: str, right: str, who: str) -> list[str]:
    look = f"look at {wrong}" if wrong else f"look at what {who} calls"
    beside = f" beside {right}" if right and right != wrong else ""
    steps = {
        Verdict.WRONG_OPERATION: "a branch that not all ranks take (by rank, data, exception) leads there",
        Verdict.ORDER_SWAP: "issue them in one order on all ranks: sets, threads and hooks have none",
        Verdict.SIZE_MISMATCH: "print the shape on all ranks before it: uneven last batches are common",
        Verdict.DTYPE_MISMATCH: "print the dtype on all ranks before the call: autocast on some is common",
        Verdict.ROOT_MISMATCH: "all ranks must name the same root; in subgroups mind global and group ranks",
        Verdict.REDUCTION_MISMATCH: "all ranks must pass the same reduction",
        Verdict.SPLIT_MISMATCH: "all ranks must name the same sizes of the parts: exchange the sizes first",
    }
    return [look + beside, steps[kind]]
