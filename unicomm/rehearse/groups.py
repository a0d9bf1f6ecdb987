"""Groups that some of their members never make, and calls of `new_group` that some ranks do not make.

A real job waits for a member that does not make its group. unicomm does not wait for ranks that are no
members; torch requires their calls, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from unicomm.flight_recorder.analysis.verdict import Finding, Side, Verdict
from unicomm.flight_recorder.ring.reader import InputRemark
from unicomm.flight_recorder.table.table import Table
from unicomm.flight_recorder.texts import capital, ranks_text

from .details import Details


def never_made(table: Table, details: Mapping[int, Details]) -> list[Finding]:
    """Returns a finding about the largest group that some member has not made. The minority is wrong."""
    found = []
    for index, group in enumerate(table.groups):
        present = [rank for rank in group.ranks.tolist() if rank in table.source_of]
        makers = [rank for rank in present if index in table.source_of[rank].members]
        if makers and len(makers) < len(present):
            found.append((len(makers), index, makers, sorted(set(present) - set(makers))))
    if not found:
        return []
    _, index, makers, absent = max(found)
    group = table.groups[index]
    culprits, victims = (absent, makers) if len(absent) <= len(makers) else (makers, absent)
    sides = [Side(makers, f"makes '{group.name}'", _place(index, makers, table, details))]
    for _, other, theirs, _ in found:
        if other != index and set(theirs) & set(absent):
            name, where = table.groups[other].name, _place(other, theirs, table, details)
            sides.append(Side(theirs, f"makes '{name}'", where))
    at = f" at {sides[0].where}" if sides[0].where else ""
    sentence = f"{capital(ranks_text(absent))} never made the group '{group.name}'"
    sentence += f" of {ranks_text(group.ranks.tolist())}, which {ranks_text(makers)} made{at}."
    return [
        Finding(
            Verdict.MEMBERSHIP,
            culprits,
            victims,
            group.name,
            confidence=0.9 if len(culprits) < len(victims) else 0.5,
            sentence=sentence,
            evidence=[f"{ranks_text(s.ranks)}: {s.what}" + f" at {s.where}" * bool(s.where) for s in sides],
            sides=sides,
            next_steps=[
                "call new_group on all ranks, in one order, with one list of ranks",
                f"compare how {ranks_text(absent)} and the others compute the list of ranks",
            ],
        )
    ]


def _place(index: int, makers: list[int], table: Table, details: Mapping[int, Details]) -> str:
    group = table.groups[index]
    key = (group.name, ",".join(str(rank) for rank in group.ranks.tolist()))
    return next((details[r].groups[key] for r in makers if r in details and key in details[r].groups), "")


_STOCK = (
    "This works with unicomm. With torch's own Gloo and NCCL the ranks may hang in this or a later new_group,"
    " or take one group for another: torch requires {}"
)
_SHOWN = 4  # lists of ranks


def calls_of_some(details: Mapping[int, Details]) -> list[InputRemark]:
    """Returns a remark for each line whose calls of `new_group` not all ranks make, or not in one order."""
    callers: dict[tuple[str, int], dict[int, str]] = {}  # by the members, and which call with them it is
    for rank, one in details.items():
        count: Counter[str] = Counter()
        for ranks, where in one.new_groups:
            count[ranks] += 1
            callers.setdefault((ranks, count[ranks]), {})[rank] = where
    missed: dict[str, tuple[set[str], set[int], set[int]]] = {}  # by line: lists, who calls, who does not
    for (ranks, _), places in callers.items():
        if absent := set(details) - set(places):
            lists, who, without = missed.setdefault(places[min(places)], (set(), set(), set()))
            lists.add(ranks)
            who |= set(places)
            without |= absent
    required = "all ranks to call it. Call it on all ranks, or pass use_local_synchronization=True"
    remarks = []
    for where, (lists, who, without) in missed.items():
        texts = [ranks_text(map(int, ranks.split(","))) for ranks in sorted(lists, key=_numbers)]
        said = f"{ranks_text(who)} call{'s' * (len(who) == 1)} new_group for {texts[0]}, and"
        said += f" {ranks_text(without)} do{'es' * (len(without) == 1)} not. "
        if len(texts) > 1:
            more = ", ..." if len(texts) > _SHOWN else ""
            said = (
                f"new_group is called for {'; '.join(texts[:_SHOWN])}{more}, each time by some ranks alone. "
            )
        remarks.append(InputRemark(where, said + _STOCK.format(required)))
    return remarks or _orders(details)


def _orders(details: Mapping[int, Details]) -> list[InputRemark]:
    """Returns a remark if ranks make the same calls of `new_group` in different orders."""
    orders: dict[tuple[str, ...], list[int]] = {}
    for rank, one in details.items():
        orders.setdefault(tuple(ranks for ranks, _ in one.new_groups), []).append(rank)
    if len(orders) < 2:
        return []
    (usual, most), (other, few), *_ = sorted(orders.items(), key=lambda item: (-len(item[1]), item[1]))
    at = next(at for at, (a, b) in enumerate(zip(usual, other, strict=True)) if a != b)
    said = (
        f"{ranks_text(few)} call{'s' * (len(few) == 1)} new_group in another order than {ranks_text(most)}. "
    )
    required = "the same order on all ranks. Make the groups in one order"
    return [InputRemark(details[few[0]].new_groups[at][1], said + _STOCK.format(required))]


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]
