"""SizeMismatches: findings about all_to_all, all_gather_v, and messages whose sizes do not fit."""

from __future__ import annotations

from collections import Counter

import numpy as np

from unicomm.flight_recorder.ring.reader import State
from unicomm.flight_recorder.table.collectives import CollectiveRows
from unicomm.flight_recorder.table.rows import at_place, op_text, place
from unicomm.flight_recorder.table.table import Column, Table
from unicomm.flight_recorder.texts import capital, ranks_text

from .call_mismatches import BY_HISTORY, UNDECIDED, Mismatch
from .matching import Messages
from .verdict import Finding, Side, Verdict

_MOST = 32  # findings


class SizeMismatches:
    """Decides whose sizes are wrong."""

    def __init__(self, table: Table) -> None:
        self.table = table

    def exchanges(self, found: list[CollectiveRows]) -> list[Mismatch]:
        """Returns mismatches of the first all_to_all and all_gather_v whose parts do not fit."""
        out = []
        for one in found:
            table, rows = self.table, one.rows
            culprits, note, confidence = self._odd_one(rows)
            group = table.groups[one.group]
            chosen = rows[np.isin(table.rank[rows], culprits)] if culprits else rows
            row = int(chosen[0])
            sent, taken = (
                int(getattr(table.calls, c)[table.call[rows]].sum()) for c in ("in_numel", "out_numel")
            )
            who = ranks_text(culprits) if culprits else "some rank"
            finding = Finding(
                Verdict.SPLIT_MISMATCH,
                culprits,
                sorted(set(group.ranks.tolist()) - set(culprits)),
                group.name,
                one.seq,
                table.op_name(row),
                confidence,
                f"{capital(who)} has parts in {op_text(table, row)} that do not fit the other ranks'"
                f"{at_place(table, row)}: {note}.",
                self._differing_parts(rows)
                or [f"the ranks send {sent} elements in total and expect {taken}"],
                [Side([int(table.rank[row])], table.describe(row), place(table, row))],
                next_steps=[
                    f"compare the split sizes that {who} passes with those of the other ranks"
                    + (f" ({place(table, row)})" if place(table, row) else ""),
                    "rank i's input split j must equal rank j's output split i",
                ],
                since_ns=int(table.created_ns[rows].min()),
            )
            unfinished = bool((table.state[rows] != State.COMPLETED).any())
            out.append(Mismatch(finding, one.group, one.seq, unfinished))
        return out[:4]

    def _differing_parts(self, rows: Column) -> list[str]:
        """Returns the first part whose receiver expects another size, if the parts are known."""
        table = self.table
        sent, taken = (
            {int(table.rank[r]): table.parts[r][i] for r in rows.tolist() if r in table.parts} for i in (0, 1)
        )
        ranks = table.groups[int(table.group[rows[0]])].ranks.tolist()
        for i, a in enumerate(ranks):
            for j, b in enumerate(ranks):
                if a in sent and b in taken and sent[a][j] != taken[b][i]:
                    return [f"elements from rank {a} to rank {b}: {sent[a][j]} sent, {taken[b][i]} expected"]
        return []

    def _odd_one(self, rows: Column) -> tuple[list[int], str, float]:
        """Returns (culprits, reason, confidence), by the shapes of the parts if known, else by history."""
        table = self.table
        ins, outs = self._parts(rows, "in"), self._parts(rows, "out")
        n = len(rows)
        # Sort all lists by rank of the group.
        order = np.argsort(_position(table, rows))
        ins, outs, rows = [ins[i] for i in order], [outs[i] for i in order], rows[order]
        if all(len(i) == n for i in ins) and all(len(o) == n for o in outs):
            wrong = np.asarray(ins) != np.asarray(outs).T
            blame = wrong.sum(axis=0) + wrong.sum(axis=1)
        elif all(len(i) == 1 for i in ins) and all(len(o) == n for o in outs):
            wrong = np.asarray([[o[j] != ins[j][0] for j in range(n)] for o in outs])
            if (wrong.sum(axis=0) * 2 > n).any():
                blame = np.where(wrong.sum(axis=0) * 2 > n, wrong.sum(axis=0), 0)
            else:
                blame = wrong.sum(axis=1)
        else:
            blame = np.zeros(n)
        if blame.any() and (blame == blame.max()).sum() * 2 <= n:
            culprits = [int(r) for r in table.rank[rows[blame == blame.max()]]]
            return culprits, "its parts differ from those that the other ranks expect", 0.9
        calls = table.call[rows]
        rare = np.asarray([int((table.call[self._span(int(r))] == table.call[r]).sum()) for r in rows])
        if rare.min() < rare.max() and (rare == rare.min()).sum() * 2 < n:
            culprits = [int(r) for r in table.rank[rows[rare == rare.min()]]]
            return culprits, "it had other sizes in earlier steps", 0.7
        pairs = list(
            zip(table.calls.in_numel[calls].tolist(), table.calls.out_numel[calls].tolist(), strict=True)
        )
        usual, count = Counter(pairs).most_common(1)[0]
        if count * 2 > n and count < n:
            odd = [int(table.rank[row]) for row, pair in zip(rows, pairs, strict=True) if pair != usual]
            return odd, "its sizes differ from those of the majority", 0.8
        return [], "the sent and the expected elements differ", 0.5

    def _parts(self, rows: Column, side: str) -> list[list[int]]:
        """Returns the elements of each tensor of the rows' calls; [] where only their sum is known.

        A record of ours has the shape of the first of several tensors, and so has a dump made from it.
        """
        table = self.table
        out = []
        for row in rows.tolist():
            if row in table.parts:
                out.append(table.parts[row][0 if side == "in" else 1])
                continue
            shapes = table.shapes[int(getattr(table.calls, f"{side}_shape")[table.call[row]])]
            ours = table.source_of[int(table.rank[row])].exact_p2p
            out.append([] if ours and len(shapes) > 1 else _counts(shapes))
        return out

    def _span(self, row: int) -> slice:
        source = self.table.source_of[int(self.table.rank[row])]
        return slice(source.begin, source.end)

    def messages(self, found: Messages, bad: Column) -> list[Mismatch]:
        """Returns a mismatch for each channel with a send whose receive has another size or type."""
        table = self.table
        partner = dict(zip(found.rows.tolist(), found.partner.tolist(), strict=True))
        out: dict[tuple[int, int, int], Mismatch] = {}
        for send in bad.tolist():
            receive = partner[send]
            channel = (int(table.group[send]), int(table.rank[send]), int(table.rank[receive]))
            if channel in out:
                out[channel].times += 1
                continue
            if len(out) >= _MOST:
                break
            usual_send = self._usual(send, receive)
            culprits, confidence = [channel[1], channel[2]], UNDECIDED
            if usual_send != 0:
                culprits, confidence = [channel[2] if usual_send > 0 else channel[1]], BY_HISTORY
            unfinished = State.COMPLETED not in (table.state[send], table.state[receive])
            said = (
                f"Rank {channel[1]} sends {table.describe(send)}{at_place(table, send)}, but"
                f" rank {channel[2]} receives {table.describe(receive)}{at_place(table, receive)}"
                f" (message #{int(table.seq[send])} of '{table.groups[channel[0]].name}')."
            )
            evidence = ["sender and receiver name each other, and their messages have the same number"]
            if confidence == BY_HISTORY:
                evidence.append(
                    f"rank {culprits[0]} had another size in its earlier messages; the other side had not"
                )
            finding = Finding(
                Verdict.P2P_SIZE_MISMATCH,
                sorted(culprits),
                sorted({channel[1], channel[2]} - set(culprits)),
                table.groups[channel[0]].name,
                int(table.seq[send]),
                "send",
                confidence,
                said,
                evidence,
                [
                    Side([channel[1]], table.describe(send), place(table, send)),
                    Side([channel[2]], table.describe(receive), place(table, receive)),
                ],
                next_steps=["give both sides the same size and type; where the size varies, send it first"],
                since_ns=int(table.created_ns[send]),
            )
            out[channel] = Mismatch(finding, channel[0], -1, unfinished)
        return list(out.values())

    def _usual(self, send: int, receive: int) -> int:
        """Returns a positive number if the send resembles earlier messages more than the receive does."""
        table = self.table
        score = []
        for row in (send, receive):
            span = self._span(row)
            before = slice(span.start, row)
            same = (table.peer[before] == table.peer[row]) & (table.call[before] == table.call[row])
            score.append(int(same.sum()))
        return score[0] - score[1]


def _counts(shapes: tuple[tuple[int, ...], ...]) -> list[int]:
    return [int(np.prod(shape, dtype=np.int64)) for shape in shapes]


def _position(table: Table, rows: Column) -> list[int]:
    """Returns the ranks of rows in their group."""
    ranks = table.groups[int(table.group[rows[0]])].ranks.tolist()
    place_of = {r: i for i, r in enumerate(ranks)}
    return [place_of.get(int(r), len(ranks)) for r in table.rank[rows]]
