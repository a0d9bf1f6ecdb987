"""Groups that some of their members never make, and calls of `new_group` that some ranks do not make.

A real job waits for a member that does not make its group. torch requires the calls of ranks that are no
members, too; unicomm does not wait for these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from unicomm.flight_recorder.analysis.verdict import Finding, Side, Verdict
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


_SHOWN = 4  # lists of ranks


def calls_of_some(details: Mapping[int, Details]) -> list[Finding]:
    """Returns a finding for each line whose calls of `new_group` not all ranks make, or not in one order.

    The line is the innermost one of the call path that the ranks without the call never pass on their way to
    `new_group`.
    """
    lines = {r: {line for _, path in one.new_groups for line in path} for r, one in details.items()}
    calls: dict[tuple[str, int], dict[int, tuple[str, ...]]] = {}  # by the members, and which call with them
    for rank, one in details.items():
        count: Counter[str] = Counter()
        for ranks, path in one.new_groups:
            count[ranks] += 1
            calls.setdefault((ranks, count[ranks]), {})[rank] = path
    missed: dict[str, tuple[set[str], set[int], set[int]]] = {}  # by line: lists, who calls, who does not
    for (ranks, _), paths in calls.items():
        if absent := set(details) - set(paths):
            passed = set[str]().union(*(lines[rank] for rank in absent))
            path = paths[min(paths)]
            line = next((line for line in path if line not in passed), path[0] if path else "")
            lists, who, without = missed.setdefault(line, (set(), set(), set()))
            lists.add(ranks)
            who |= set(paths)
            without |= absent
    findings = []
    for where, (lists, who, without) in missed.items():
        texts = [_ranks(ranks) for ranks in sorted(lists, key=_numbers)]
        said = (
            f"{capital(ranks_text(who))} call{'s' * (len(who) == 1)} new_group for {texts[0]} at {where}, and"
        )
        said += f" {ranks_text(without)} do{'es' * (len(without) == 1)} not."
        if len(texts) > 1:
            more = ", ..." if len(texts) > _SHOWN else ""
            said = f"new_group at {where} is called for {'; '.join(texts[:_SHOWN])}{more},"
            said += " each time by some ranks alone."
        few = who if len(who) < len(without) or len(texts) > 1 else without
        sides = [Side(sorted(who), f"new_group of {texts[0]}", where)]
        sides += [Side(sorted(without), "does not call it")] * (len(texts) == 1)
        cure = "call it on all ranks, in one order, or pass use_local_synchronization=True"
        findings.append(_of_torch(said, sides, few, set(details) - few, cure))
    return findings or _orders(details)


def _orders(details: Mapping[int, Details]) -> list[Finding]:
    """Returns a finding if ranks make the same calls of `new_group` in different orders."""
    orders: dict[tuple[str, ...], list[int]] = {}
    for rank, one in details.items():
        orders.setdefault(tuple(ranks for ranks, _ in one.new_groups), []).append(rank)
    if len(orders) < 2:
        return []
    (usual, most), (other, few), *_ = sorted(orders.items(), key=lambda item: (-len(item[1]), item[1]))
    at = next(at for at, (a, b) in enumerate(zip(usual, other, strict=True)) if a != b)
    paths = [details[ranks[0]].new_groups[at][1] for ranks in (most, few)]
    places = [path[0] if path else "" for path in paths]
    said = f"{capital(ranks_text(few))} call{'s' * (len(few) == 1)} new_group in another order at {places[1]}"
    said += f" than {ranks_text(most)} at {places[0]}."
    sides = [
        Side(ranks, f"new_group of {_ranks(order[at])}", where)
        for ranks, order, where in zip((most, few), (usual, other), places, strict=True)
    ]
    return [_of_torch(said, sides, set(few), set(most), "make the groups in one order on all ranks")]


def _of_torch(said: str, sides: list[Side], culprits: set[int], victims: set[int], cure: str) -> Finding:
    said += " With torch's own Gloo and NCCL this or a later new_group hangs, or takes one group for another."
    return Finding(
        Verdict.MEMBERSHIP,
        sorted(culprits),
        sorted(victims),
        confidence=0.8,
        sentence=said,
        evidence=["torch requires that all ranks call new_group, in one order; unicomm does not"],
        sides=sides,
        next_steps=[cure],
    )


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def _ranks(text: str) -> str:
    return ranks_text(_numbers(text)) if text else "no rank"
