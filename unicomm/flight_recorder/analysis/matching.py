"""Matches the calls of a collective on all ranks, and sends with receives, and finds those that differ.

The time is linear in the number of rows: every row is compared with one reference of its collective, and only
the first few collectives with a difference are examined closely.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from unicomm.flight_recorder.formats.operation_names import OpKind
from unicomm.flight_recorder.ring.reader import State
from unicomm.flight_recorder.table.collectives import CollectiveIndex, CollectiveRows, rows_of
from unicomm.flight_recorder.table.table import Column, Table

_CLOSE_LOOKS = 16  # the number of differing collectives of a group to examine, the first ones
_NO_REFERENCE = -1

_BY_INPUT = ("all_reduce", "reduce", "all_gather", "all_gather_single", "gather", "gather_single")
_BY_OUTPUT = ("reduce_scatter", "reduce_scatter_single", "scatter")
_OWN_SIZE = ("all_gather_v", "reduce_scatter_v", "all_to_all_v_single", "all_to_all")
# In a coalesced collective of several operations, those whose inputs have one size on all ranks.
_EVEN = frozenset({"all_reduce", "reduce", "broadcast", "all_gather", "all_gather_single"})
_EVEN |= {"reduce_scatter", "reduce_scatter_single"}
EXCHANGES = ("all_to_all", "all_to_all_single", "all_to_all_v_single")


@dataclass
class CallSignatures:
    """The signature of each call: what the calls of all ranks in one collective must have in common.

    Attributes:
        ids: a number for each signature, so equal for calls that agree.
        op, root, red, dtype, numel, split: the parts of the signatures; -1 if the operation ignores the part.
            `split` numbers the sizes of the parts of an uneven gather or scatter, which all ranks must name.
    """

    ids: Column
    op: Column
    root: Column
    red: Column
    dtype: Column
    numel: Column
    split: Column

    def difference(self, a: int, b: int) -> str:
        """Returns the first part in which two calls differ: op, root, dtype, red, numel or split; else ""."""
        for part in ("op", "root", "dtype", "red", "numel", "split"):
            column = getattr(self, part)
            if column[a] != column[b]:
                return part
        return ""


def call_signatures(table: Table) -> CallSignatures:
    """Returns the signatures of the distinct calls of a table."""
    calls = table.calls
    op_names = np.asarray(table.ops, object)[calls.op]

    def has(*ops: str) -> Column:
        return np.isin(op_names.astype(str), ops)

    numel = np.full(len(calls), -1, np.int64)
    dtype = np.where(calls.in_dtype > 0, calls.in_dtype, calls.out_dtype).astype(np.int64)
    by_input, by_output, both = has(*_BY_INPUT), has(*_BY_OUTPUT), has("broadcast")
    numel[by_input] = calls.in_numel[by_input]
    numel[by_output] = calls.out_numel[by_output]
    numel[both] = np.maximum(calls.in_numel, calls.out_numel)[both]
    # torch has one name for even and uneven splits: all count as even unless one call has uneven splits.
    even = has("all_to_all_single")
    if even.any() and (calls.in_numel[even] == calls.out_numel[even]).all():
        numel[even] = calls.in_numel[even]
    mixed = np.asarray(["+" in op and _EVEN.issuperset(op.split("+")) for op in table.ops])[calls.op]
    numel[mixed] = calls.in_numel[mixed]
    known = by_input | by_output | both | has(*_OWN_SIZE) | even
    dtype[by_output] = calls.out_dtype[by_output]
    dtype[~known] = -1
    red = np.where(has("all_reduce", "reduce", *(o for o in table.ops if "scatter" in o)), calls.red, -1)
    red = np.where(has("scatter"), -1, red)
    root = calls.root
    # Dumps tell neither reductions nor roots: beside rings, these are not compared.
    if (red == 0).any() and (red > 0).any():
        red[:] = -1
    rooted = has("broadcast", "reduce", "gather", "scatter")
    if (root[rooted] < 0).any() and (root[rooted] >= 0).any():
        root = np.full_like(root, -1)
    split = _splits(table, has("all_gather_v"), calls.out_shape)
    split = np.where(has("reduce_scatter_v"), _splits(table, has("reduce_scatter_v"), calls.in_shape), split)
    parts = np.stack([calls.op, root, red, dtype, numel, split], axis=1)
    _, ids = np.unique(parts, axis=0, return_inverse=True)
    return CallSignatures(ids.reshape(-1).astype(np.int32), calls.op, root, red, dtype, numel, split)


def _splits(table: Table, wanted: Column, shape: Column) -> Column:
    """Returns a number for the sizes of the several tensors of each wanted call; -1 for a single tensor."""
    out = np.full(len(shape), -1, np.int64)
    known: dict[tuple[int, ...], int] = {}
    for call in np.flatnonzero(wanted).tolist():
        shapes = table.shapes[int(shape[call])]
        if len(shapes) > 1:
            sizes = tuple(math.prod(one) for one in shapes)
            out[call] = known.setdefault(sizes, len(known))
    return out


def divergences(table: Table, signatures: CallSignatures, cells: CollectiveIndex) -> list[CollectiveRows]:
    """Returns the first collectives of each group whose calls differ, by group and seq."""
    reference = np.full(cells.count, _NO_REFERENCE, np.int32)
    bad = np.zeros(cells.count, np.bool_)
    for rows, cell in cells.chunks():
        ids = signatures.ids[table.call[rows]]
        have = reference[cell]
        fresh = have == _NO_REFERENCE
        if fresh.any():
            reference[cell[fresh]] = ids[fresh]
            have = reference[cell]
        differ = have != ids
        if differ.any():
            bad[cell[differ]] = True
    chosen: list[int] = []
    seen: dict[int, int] = {}
    for index in np.flatnonzero(bad):
        group, _ = cells.key(int(index))
        seen[group] = seen.get(group, 0) + 1
        if seen[group] <= _CLOSE_LOOKS:
            chosen.append(int(index))
    return list(rows_of(table, cells, chosen))


def uneven_exchanges(table: Table, cells: CollectiveIndex) -> list[CollectiveRows]:
    """Returns the all_to_all and all_gather_v whose sent elements do not add up to the received ones.

    Only collectives with a row of every member are compared.
    """
    ops = np.asarray([o in EXCHANGES for o in table.ops], np.bool_)[table.calls.op]
    gathers = np.asarray([o == "all_gather_v" for o in table.ops], np.bool_)[table.calls.op]
    if not (ops.any() or gathers.any()):
        return []
    sent, received, out_low, out_high, count = (np.zeros(cells.count, np.int64) for _ in range(5))
    is_gather = np.zeros(cells.count, np.bool_)
    out_low += np.iinfo(np.int64).max
    for rows, cell in cells.chunks():
        call = table.call[rows]
        # An entry without sizes, as of a call whose parts torch did not record, says nothing about them.
        mine = (ops[call] | gathers[call]) & ((table.calls.in_shape | table.calls.out_shape)[call] > 0)
        call, at = call[mine], cell[mine]
        if not len(call):
            continue
        np.add.at(sent, at, table.calls.in_numel[call])
        np.add.at(received, at, table.calls.out_numel[call])
        np.minimum.at(out_low, at, table.calls.out_numel[call])
        np.maximum.at(out_high, at, table.calls.out_numel[call])
        np.add.at(count, at, 1)
        is_gather[at[gathers[call]]] = True
    bad = np.where(is_gather, (out_low != sent) | (out_high != sent), sent != received) & (count > 0)
    chosen = []
    for index in np.flatnonzero(bad):
        group, _ = cells.key(int(index))
        if count[index] == table.groups[group].size:
            chosen.append(int(index))
    found = list(rows_of(table, cells, chosen[:_CLOSE_LOOKS]))
    known = {(one.group, one.seq) for one in found}
    return found + [one for one in unfit_parts(table)[:_CLOSE_LOOKS] if (one.group, one.seq) not in known]


def unfit_parts(table: Table) -> list[CollectiveRows]:
    """Returns the exchanges in which a rank sends another rank more or less than that expects.

    Only exchanges are compared whose parts are known on all members.
    """
    exchanges: dict[tuple[int, int], list[int]] = {}
    for row in table.parts:
        exchanges.setdefault((int(table.group[row]), int(table.seq[row])), []).append(row)
    out = []
    for (group, seq), rows in exchanges.items():
        ranks = table.groups[group].ranks.tolist()
        by_rank = {int(table.rank[row]): table.parts[row] for row in rows}
        if len(by_rank) < len(ranks):
            continue
        sent, taken = (np.asarray([by_rank[rank][i] for rank in ranks]) for i in (0, 1))
        if (sent != taken.T).any():
            out.append(CollectiveRows(group, seq, np.asarray(sorted(rows))))
    return sorted(out, key=lambda one: (one.group, one.seq))


@dataclass
class Messages:
    """Sends and receives.

    Attributes:
        rows: all P2P rows with a known peer.
        partner: for each of `rows`, the row of the other side, -1 if there is none.
        unknown: for each of `rows`, whether the record of the other side may be overwritten or missing.
    """

    rows: Column
    partner: Column
    unknown: Column


def messages(table: Table) -> Messages:
    """Pairs the k-th send of a channel (group, sender, receiver) with its k-th receive."""
    kinds = table.calls.kind
    is_p2p = (kinds == OpKind.SEND) | (kinds == OpKind.RECV)
    rows: Column = np.zeros(0, np.int64)
    if is_p2p.any():
        rows = np.flatnonzero(is_p2p[table.call] & (table.peer >= 0) & (table.group >= 0))
    if not len(rows):
        return Messages(rows, rows, np.zeros(0, np.bool_))
    send = kinds[table.call[rows]] == OpKind.SEND
    rank, peer = table.rank[rows].astype(np.int64), table.peer[rows].astype(np.int64)
    n = int(max(rank.max(), peer.max())) + 1
    source = np.where(send, rank, peer)
    target = np.where(send, peer, rank)
    _, channel = np.unique((table.group[rows] * n + source) * n + target, return_inverse=True)
    channel = channel.reshape(-1).astype(np.int64)
    exact = np.zeros(n, np.bool_)
    wrapped = np.zeros(n, np.bool_)
    present = np.zeros(n, np.bool_)
    for one in table.sources:
        if one.rank < n:
            exact[one.rank], wrapped[one.rank], present[one.rank] = one.exact_p2p, one.wrapped, True
    side = channel * 2 + send  # one direction of one channel
    order = np.argsort(side, kind="stable")
    starts = np.searchsorted(side[order], np.arange(int(side.max()) + 2))
    count = np.empty(len(rows), np.int64)
    count[order] = np.arange(len(rows)) - starts[side[order]]
    number = table.seq[rows].copy()
    counted = ~(exact[rank] & exact[peer])
    number[counted] = count[counted] + 1
    if (wrapped & ~exact).any():
        _align_tails(table, rows, channel, send, number, wrapped[rank] & counted)
    low = int(number.min())
    span = int(number.max()) - low + 1
    if span > (1 << 62) // (int(channel.max()) + 1):
        return Messages(rows, np.full(len(rows), -1, np.int64), np.ones(len(rows), np.bool_))
    key = channel * span + (number - low)
    partner = np.full(len(rows), -1, np.int64)
    sends, receives = np.flatnonzero(send), np.flatnonzero(~send)
    _, a, b = np.intersect1d(key[sends], key[receives], assume_unique=False, return_indices=True)
    partner[sends[a]], partner[receives[b]] = rows[receives[b]], rows[sends[a]]
    # A partner is overwritten if its number is less than the first one that its side of the channel still
    # has.
    first = np.full(int(side.max()) + 2, np.iinfo(np.int64).max)
    np.minimum.at(first, side, number)
    other = channel * 2 + ~send
    unknown = (partner < 0) & (~present[peer] | (wrapped[peer] & (number < first[other])))
    return Messages(rows, partner, unknown)


def _align_tails(
    table: Table, rows: Column, channel: Column, send: Column, number: Column, lost: Column
) -> None:
    """Shifts the numbers of channels with lost records, so that the last completed messages are a pair."""
    done = table.state[rows] == State.COMPLETED
    last = np.full((2, int(channel.max()) + 1), -1, np.int64)
    for i, side in enumerate((send, ~send)):
        np.maximum.at(last[i], channel[side & done], number[side & done])
    touched = np.zeros(last.shape[1], np.bool_)
    touched[channel[lost]] = True
    shift = np.where(touched & (last >= 0).all(axis=0), last[0] - last[1], 0)
    number += np.where(send, 0, shift[channel])


def mismatched_messages(table: Table, found: Messages) -> Column:
    """Returns the rows of sends whose receive has another number or type of elements.

    In unicomm's own records such a message has failed. If all have completed, and the sizes of a channel are
    the same in another order, the program told the messages apart by tags, which records do not have.
    """
    calls = table.calls
    call = table.call[found.rows]
    sends = np.flatnonzero((calls.kind[call] == OpKind.SEND) & (found.partner >= 0))
    a, b = call[sends], table.call[found.partner[sends]]
    sent = np.where(calls.in_numel[a] > 0, calls.in_numel[a], calls.out_numel[a])
    taken = np.where(calls.out_numel[b] > 0, calls.out_numel[b], calls.in_numel[b])
    sent_type = np.where(calls.in_dtype[a] > 0, calls.in_dtype[a], calls.out_dtype[a])
    taken_type = np.where(calls.out_dtype[b] > 0, calls.out_dtype[b], calls.in_dtype[b])
    bad = (sent != taken) | (sent_type != taken_type)
    if not bad.any():
        return found.rows[:0]
    rows, partner = found.rows[sends], found.partner[sends]
    ours = np.zeros(int(max(table.rank[rows].max(), table.peer[rows].max())) + 1, np.bool_)
    for source in table.sources:
        if 0 <= source.rank < len(ours):
            ours[source.rank] = source.exact_p2p
    over = (table.state[rows] == State.COMPLETED) & (table.state[partner] == State.COMPLETED)
    over &= ours[table.rank[rows]] & ours[table.peer[rows]]
    of_send, of_receive = np.stack([sent, sent_type], axis=1), np.stack([taken, taken_type], axis=1)
    keys = np.stack([table.group[rows], table.rank[rows], table.peer[rows]], axis=1)
    _, channel = np.unique(keys, axis=0, return_inverse=True)
    order = np.argsort(channel.reshape(-1), kind="stable")
    bounds = np.searchsorted(channel.reshape(-1)[order], np.arange(int(channel.max()) + 2))
    for one in np.unique(channel.reshape(-1)[bad & over]).tolist():
        here = order[bounds[one] : bounds[one + 1]]
        here = here[over[here]]
        if Counter(map(tuple, of_send[here].tolist())) == Counter(map(tuple, of_receive[here].tolist())):
            bad[here] = False
    out: Column = rows[bad]
    return out
