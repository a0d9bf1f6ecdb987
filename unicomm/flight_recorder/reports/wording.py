"""Short plain words for ranks, times and places."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from unicomm.flight_recorder.ring.ranks import format_ranks
from unicomm.flight_recorder.table.columns import Table, user_frame


def ranks_text(ranks: Iterable[int], most: int = 60) -> str:
    """ "rank 3" or "ranks 0-2,5"; long lists are cut."""
    several = sorted(ranks)
    text = ", ".join(_runs(several))
    if len(text) > most:
        text = format_ranks(several).replace(",", ", ")  # with steps: shorter, but harder to read
    if len(text) > most:
        text = text[:most].rsplit(",", 1)[0] + f", ... ({len(several)} ranks)"
    return f"rank{'' if len(several) == 1 else 's'} {text}"


def _runs(ranks: list[int]) -> Iterator[str]:
    at = 0
    while at < len(ranks):
        end = at
        while end + 1 < len(ranks) and ranks[end + 1] == ranks[end] + 1:
            end += 1
        yield f"{ranks[at]}-{ranks[end]}" if end > at + 1 else ", ".join(map(str, ranks[at : end + 1]))
        at = end + 1


def span(ns: float) -> str:
    """A duration in its natural unit."""
    for unit, size in (("h", 3.6e12), ("min", 6e10), ("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if abs(ns) >= size:
            return f"{ns / size:.3g} {unit}"
    return f"{ns:.0f} ns"


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def place(table: Table, row: int) -> str:
    """file:line of the user's call, "" where it is not known."""
    frame = user_frame(table.stack(row))
    return str(frame) if frame and frame.file else ""


def at_place(table: Table, row: int) -> str:
    where = place(table, row)
    return f" at {where}" if where else ""


def number(table: Table, row: int) -> str:
    """ "all_reduce #5 of 'tp'" """
    group = int(table.group[row])
    name = table.groups[group].name if group >= 0 else "?"
    return f"{table.op_name(row)} #{int(table.seq[row])} of '{name}'"
