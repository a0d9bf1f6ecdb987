"""What a reconfigured communicator is made from: the one before, by shrinking and growing it, or nothing.

The library shrinks a communicator to those ranks that are left, in their order, and lets others join behind
them. What the ranks of an attempt have, they tell each other; all come to the same plan from that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from unicomm.comms.backend import PreviousEpoch, Setup

from .library import Library
from .making import ABORTS, Maker

_SHRINK, _GROW = "CommShrink", "CommGrow"


@dataclass(frozen=True)
class Parent(PreviousEpoch):
    """The communicator of the epoch before, as one rank has it.

    Attributes:
        comm: the library's. uid: of the epoch. rank, size: in it.
        clean: nothing of it was given up; else it was revoked.
    """

    library: Library
    on_device: Callable[[], AbstractContextManager[Any]]
    comm: int
    uid: str
    rank: int
    size: int
    clean: bool

    def close(self) -> None:
        """Local: others may be gone. What was made from it shares nothing with it."""
        with self.on_device():
            self.library.native.abort(self.comm, ABORTS)


@dataclass(frozen=True)
class Plan:
    """How to come from the epoch before to this one.

    Attributes:
        survivors: how many ranks were in it; they are the first of the new ones.
        lost: ranks of the epoch before that are not in this one.
    """

    survivors: int
    lost: tuple[int, ...]


def claim(library: Library, parent: Parent | None) -> dict[str, Any]:
    """What a rank says of itself."""
    can = [name for name in (_SHRINK, _GROW) if library.has(name)]
    if parent is None:
        return {"can": can}
    return {"can": can, "uid": parent.uid, "rank": parent.rank, "size": parent.size, "clean": parent.clean}


def plan_of(claims: Sequence[dict[str, Any]]) -> Plan | None:
    """The plan of ranks that say this, in the order of the new ranks; None: make a new communicator."""
    uid = claims[0].get("uid")
    old = [one for one in claims if uid and one.get("uid") == uid]  # of other epochs: they join, as new ones
    count = len(old)
    if not old or any(one is not claims[i] for i, one in enumerate(old)):
        return None  # newcomers stand in front of ranks that were there
    ranks = [one["rank"] for one in old]
    if ranks != sorted(ranks):
        return None
    lost = tuple(sorted(set(range(old[0]["size"])) - set(ranks)))
    joined = len(claims) > count
    if not lost and not (joined and all(one["clean"] for one in old)):
        return None  # nothing changes, or what was given up cannot grow
    needed = {*((_SHRINK,) if lost else ()), *((_GROW,) if joined else ())}
    if any(not needed <= set(one["can"]) for one in claims):
        return None
    return Plan(count, lost)


def agreed(setup: Setup, library: Library) -> Plan | None:
    """Collective among the new ranks."""
    parent = setup.previous if isinstance(setup.previous, Parent) else None
    told = setup.rendezvous.exchange("what they have", json.dumps(claim(library, parent)).encode())
    return plan_of([json.loads(one) for one in told])


def make(plan: Plan, setup: Setup, library: Library, maker: Maker) -> int:
    """Collective among the new ranks: the communicator that the plan leads to."""
    parent = setup.previous
    comm = 0
    if setup.rank < plan.survivors:
        assert isinstance(parent, Parent)
        comm = maker.shrink(parent.comm, plan.lost) if plan.lost else parent.comm
    if plan.survivors == setup.size:
        return comm
    shrunk = comm if plan.lost else 0
    try:
        mine = maker.grow_id(comm) if setup.rank == 0 else None
        uid = setup.rendezvous.broadcast("id to grow by", mine)
        # Who joins has to find the others there: none is more than this meeting ahead.
        setup.rendezvous.exchange("growing", b"")
        first = setup.rank == 0 or not comm
        grown = maker.grow(comm, setup.size, uid if first else b"", -1 if comm else setup.rank)
    finally:
        if shrunk:
            Parent(library, maker.on_device, shrunk, "", 0, 0, True).close()
    return grown
