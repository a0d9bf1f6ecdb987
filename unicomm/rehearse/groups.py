"""Groups that some of their members never make. A real job waits for them when it makes the group."""

from __future__ import annotations

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
