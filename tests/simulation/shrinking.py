"""Makes a failing program as short as possible: fewer faults, operations and ranks, smaller numbers."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

from .program import Program

Fails = Callable[[Program], bool]

_SCHEDULES = 6  # schedules that are tried for a shorter program, whose steps come in another order


def shrink(program: Program, fails: Fails, seconds: float = 60.0) -> Program:
    """The shortest program found within `seconds` that still `fails`. Deterministic as long as time lasts."""
    end = time.monotonic() + seconds
    best = program
    progress = True
    while progress and time.monotonic() < end:
        progress = False
        for candidate in _shorter(best):
            if time.monotonic() > end:
                break
            if (found := _failing(candidate, fails)) is not None:
                best, progress = found, True
                break
    return best


def _failing(program: Program, fails: Fails) -> Program | None:
    for attempt in range(_SCHEDULES):
        tried = program if attempt == 0 else {**program, "schedule": 1000 * attempt + 7}
        if fails(tried):
            return tried
    return None


def _shorter(program: Program) -> Iterator[Program]:
    """Shorter programs, those that leave out most first."""
    for name in ("faults", "ops"):
        yield from _without(program, name)
    n = program["ranks"]
    for rank in range(n - 1, -1, -1):
        if n > 2 and (smaller := _without_rank(program, rank)) is not None:
            yield smaller
    if program["host"] != -1:
        yield {**program, "host": -1}
    yield from _simpler(program)


def _without(program: Program, name: str) -> Iterator[Program]:
    items: list[Any] = program[name]
    size = len(items)
    while size >= 1:
        for start in range(0, len(items), size):
            rest = items[:start] + items[start + size :]
            smaller = {**program, name: rest}
            if name == "ops":
                smaller["faults"] = _moved(program["faults"], start, min(size, len(items) - start))
            if rest or name == "faults":
                yield smaller
        size //= 2


def _moved(faults: list[dict[str, Any]], start: int, count: int) -> list[dict[str, Any]]:
    """The faults when `count` operations from `start` on are left out."""
    moved = []
    for fault in faults:
        at = fault["op"]
        if at >= start + count:
            at -= count
        elif at >= start:
            at = max(0, start - 1)
        moved.append({**fault, "op": at})
    return moved


def _without_rank(program: Program, rank: int) -> Program | None:
    """The program of one rank less; None if a fault or an operation is that rank's."""

    def new(r: int) -> int:
        return r - (r > rank)

    smaller = copy.deepcopy(program)
    smaller["ranks"] -= 1
    if smaller["host"] == rank:
        smaller["host"] = -1
    smaller["host"] = new(smaller["host"])
    for fault in smaller["faults"]:
        if rank in (fault["rank"], fault.get("peer")):
            return None
        fault["rank"] = new(fault["rank"])
        if "peer" in fault:
            fault["peer"] = new(fault["peer"])
    for op in smaller["ops"]:
        if op.get("rank") == rank:
            return None
        if "rank" in op:
            op["rank"] = new(op["rank"])
        if "ranks" in op:
            op["ranks"] = [new(r) for r in op["ranks"] if r != rank]
        if "parts" in op:
            op["parts"] = [part for part in ([new(r) for r in p if r != rank] for p in op["parts"]) if part]
        if "sends" in op:
            op["sends"] = [[new(m[0]), new(m[1]), *m[2:]] for m in op["sends"] if rank not in m[:2]]
        if "knows" in op:
            op["knows"] = [new(r) for r in op["knows"] if r != rank]
    return smaller


def _simpler(program: Program) -> Iterator[Program]:
    """Programs of the same length with smaller numbers."""
    for i, op in enumerate(program["ops"]):
        for name, plain in (("later", False), ("any", False), ("count", 1), ("kind", "barrier")):
            if name in op and op[name] != plain:
                yield _changed(program, i, {name: plain})
        for k in range(len(op.get("sends", []))):
            yield _changed(program, i, {"sends": op["sends"][:k] + op["sends"][k + 1 :]})
    for i, fault in enumerate(program["faults"]):
        if fault["after"] > 1:
            for after in (1, fault["after"] // 2):
                faults = [*program["faults"]]
                faults[i] = {**fault, "after": after}
                yield {**program, "faults": faults}


def _changed(program: Program, i: int, fields: dict[str, Any]) -> Program:
    ops = [*program["ops"]]
    ops[i] = {**ops[i], **fields}
    return {**program, "ops": ops}
