"""Findings about data that changed on the way, from the checksums in records.

The outputs of a collective that the ranks have compared (COMPARED) must have the same checksum on all of
them, and a message the same where it was sent and where it was received.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from unicomm.flight_recorder.formats.operation_names import OpKind
from unicomm.flight_recorder.ring.reader import COMPARED, INPUT_CHECKSUM, OUTPUT_CHECKSUM, State
from unicomm.flight_recorder.table.rows import at_place, op_text, place
from unicomm.flight_recorder.table.table import Column, Table
from unicomm.flight_recorder.texts import capital, ranks_text

from .call_mismatches import CLEAR, UNDECIDED, Mismatch
from .matching import Messages
from .verdict import Finding, Side, Verdict

_MOST = 16  # findings
_SAME_RESULT = (
    "the ranks compared their results of this operation, which must have the same bits on all of them"
)
_PROBLEM = (
    "memory without error correction, an overclocked or failing part, or a defect of a driver or library"
)


def corrupted(table: Table, found: Messages) -> list[Mismatch]:
    """Returns the first operation of each group, and the first message of each channel, with changed data."""
    if not len(table.checksums):
        return []
    return [*_collectives(table), *_messages(table, found)][:_MOST]


def _collectives(table: Table) -> list[Mismatch]:
    sums = table.checksums
    both = np.uint16(COMPARED | OUTPUT_CHECKSUM)
    at = np.flatnonzero((sums.flags & both) == both)
    at = at[(table.group[sums.rows[at]] >= 0) & (table.kind[sums.rows[at]] == OpKind.COLLECTIVE)]
    rows = sums.rows[at]
    key = np.stack([table.group[rows].astype(np.int64), table.seq[rows]], axis=1)
    keys, of = np.unique(key, axis=0, return_inverse=True)
    of = of.reshape(-1)
    first = np.zeros(len(keys), np.uint64)
    first[of] = sums.output[at]
    differ = np.zeros(len(keys), np.bool_)
    differ[of[first[of] != sums.output[at]]] = True
    out: dict[int, Mismatch] = {}
    for number in np.flatnonzero(differ).tolist():  # by group and sequence number
        group = int(keys[number][0])
        if group in out:
            out[group].times += 1
        else:
            mine = of == number
            out[group] = _collective(table, rows[mine], sums.output[at[mine]])
    for one in out.values():
        if one.times > 1:
            more = f"the results of {one.times - 1} later operations of the group differ as well"
            one.finding.evidence.append(more)
    return list(out.values())


def _collective(table: Table, rows: Column, outputs: Column) -> Mismatch:
    votes = Counter(outputs.tolist()).most_common()
    tied = votes[0][1] == votes[1][1]
    sides = [(value, rows[outputs == np.uint64(value)]) for value, _ in votes]
    ranks = [sorted(int(r) for r in table.rank[of]) for _, of in sides]
    culprits = sorted(r for i, some in enumerate(ranks) for r in some if tied or i > 0)
    row, group = int(rows[0]), int(table.group[rows[0]])
    what = f"the result of {op_text(table, row)}{at_place(table, int(sides[-1][1][0]))}"
    if tied:
        said = (
            f"{capital(ranks_text(culprits))} have different bits in {what}. There is no majority, so any of"
        )
        said += " them may be wrong."
    else:
        verb = "have" if len(culprits) > 1 else "has"
        said = f"{capital(ranks_text(culprits))} {verb} other bits than {ranks_text(ranks[0])} in {what}."
    evidence = [_SAME_RESULT]
    evidence += [
        f"{ranks_text(who)}: checksum {value:016x}" for (value, _), who in zip(sides, ranks, strict=True)
    ]
    finding = Finding(
        Verdict.SILENT_CORRUPTION,
        culprits,
        sorted(set(table.groups[group].ranks.tolist()) - set(culprits)),
        table.groups[group].name,
        int(table.seq[row]),
        table.op_name(row),
        UNDECIDED if tied else CLEAR if votes[0][1] * 3 >= len(rows) * 2 else 0.9,
        said,
        evidence,
        [
            Side(who, f"{table.describe(int(of[0]))}, checksum {value:016x}", place(table, int(of[0])))
            for (value, of), who in zip(sides, ranks, strict=True)
        ],
        next_steps=[
            "do not use this result: go back to the checkpoint before it",
            f"test the memory of the hosts of {ranks_text(culprits)}: {_PROBLEM}",
        ],
        since_ns=int(table.completed_ns[rows].max()),
    )
    unfinished = bool((table.state[rows] != State.COMPLETED).any())
    return Mismatch(finding, group, int(table.seq[row]), unfinished)


def _messages(table: Table, found: Messages) -> list[Mismatch]:
    """Compares sends with their receives, where both have a checksum and one size and type."""
    calls, sums = table.calls, table.checksums
    sends = np.flatnonzero((calls.kind[table.call[found.rows]] == OpKind.SEND) & (found.partner >= 0))
    send, receive = found.rows[sends], found.partner[sends]
    a, b = sums.find(send), sums.find(receive)
    known = (a >= 0) & (b >= 0)
    send, receive, a, b = send[known], receive[known], a[known], b[known]
    known = ((sums.flags[a] & INPUT_CHECKSUM) > 0) & ((sums.flags[b] & OUTPUT_CHECKSUM) > 0)
    known &= calls.in_numel[table.call[send]] == calls.out_numel[table.call[receive]]
    known &= calls.in_dtype[table.call[send]] == calls.out_dtype[table.call[receive]]
    bad = np.flatnonzero(known & (sums.input[a] != sums.output[b]))
    out: dict[tuple[int, int, int], Mismatch] = {}
    for i in bad.tolist():
        channel = (int(table.group[send[i]]), int(table.rank[send[i]]), int(table.rank[receive[i]]))
        if channel in out:
            out[channel].times += 1
        else:
            values = int(sums.input[a[i]]), int(sums.output[b[i]])
            out[channel] = _message(table, int(send[i]), int(receive[i]), values)
    for one in out.values():
        if one.times > 1:
            one.finding.evidence.append(f"so did {one.times - 1} later messages between these ranks")
    return list(out.values())


def _message(table: Table, send: int, receive: int, sums: tuple[int, int]) -> Mismatch:
    source, target = int(table.rank[send]), int(table.rank[receive])
    group = int(table.group[send])
    finding = Finding(
        Verdict.SILENT_CORRUPTION,
        sorted((source, target)),
        [],
        table.groups[group].name,
        int(table.seq[send]),
        "send",
        UNDECIDED,
        f"Rank {target} received other bits{at_place(table, receive)} than rank {source} sent in"
        f" {op_text(table, send)}{at_place(table, send)}. Either rank or the way between them changed them.",
        [
            "both sides have the checksum of the message, and its size and type are the same",
            f"rank {source}: sent checksum {sums[0]:016x}; rank {target}: received checksum {sums[1]:016x}",
        ],
        [
            Side([source], f"{table.describe(send)}, checksum {sums[0]:016x}", place(table, send)),
            Side([target], f"{table.describe(receive)}, checksum {sums[1]:016x}", place(table, receive)),
        ],
        next_steps=[
            "check that the program does not write to the sent tensor before the send has completed",
            f"test the memory of the hosts of ranks {source} and {target}: {_PROBLEM}",
        ],
        since_ns=int(table.completed_ns[receive]),
    )
    return Mismatch(finding, group, -1, False)
