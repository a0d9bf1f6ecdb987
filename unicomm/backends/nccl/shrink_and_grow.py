"""Creating a reconfigured communicator from that of the previous epoch, by shrinking and growing it.

The library shrinks a communicator to the remaining ranks, in their order, and lets other ranks join behind
them. The ranks of the new epoch tell each other what they have left of the previous one. From that all of
them compute the same plan. Without a plan they create a new communicator.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unicomm.comms.backend import PreviousEpoch, Setup

from .creation import ABORT_SECONDS, Creator
from .library import Library

_SHRINK, _GROW = "CommShrink", "CommGrow"


@dataclass(frozen=True)
class Parent(PreviousEpoch):
    """One rank's communicator of the previous epoch.

    Attributes:
        comm: address of the `ncclComm_t`.
        uid: ID of that epoch. rank, size: in that epoch.
        clean: whether no operation of it was given up. Otherwise it was revoked.
    """

    library: Library
    device: torch.device
    comm: int
    uid: str
    rank: int
    size: int
    clean: bool

    def close(self) -> None:
        # An abort is local, while other ranks may be gone. The new communicator shares nothing with this one.
        self.library.abort(self.comm, self.device, ABORT_SECONDS)


@dataclass(frozen=True)
class Plan:
    """The way from the previous epoch to this one.

    Attributes:
        survivors: number of ranks that were in the previous epoch; they are the first of the new ones.
        lost: ranks of the previous epoch that are not in this one.
    """

    survivors: int
    lost: tuple[int, ...]


def claim(library: Library, parent: Parent | None) -> dict[str, Any]:
    """Returns what a rank tells the others of its library and its previous epoch."""
    can = [name for name in (_SHRINK, _GROW) if library.has(name)]
    if parent is None:
        return {"can": can}
    return {"can": can, "uid": parent.uid, "rank": parent.rank, "size": parent.size, "clean": parent.clean}


def plan_of(claims: Sequence[dict[str, Any]]) -> Plan | None:
    """Returns the plan from the claims of all new ranks in their order; None for a new communicator."""
    uid = claims[0].get("uid")
    old = [one for one in claims if uid and one.get("uid") == uid]  # ranks of other epochs count as new
    count = len(old)
    if not old or any(one is not claims[i] for i, one in enumerate(old)):
        return None  # new ranks stand before old ones
    ranks = [one["rank"] for one in old]
    if ranks != sorted(ranks):
        return None
    lost = tuple(sorted(set(range(old[0]["size"])) - set(ranks)))
    joined = len(claims) > count
    if not lost and not (joined and all(one["clean"] for one in old)):
        return None  # nothing changes, or a revoked communicator would have to grow
    needed = {*((_SHRINK,) if lost else ()), *((_GROW,) if joined else ())}
    if any(not needed <= set(one["can"]) for one in claims):
        return None
    return Plan(count, lost)


def agree_on_plan(setup: Setup, library: Library) -> Plan | None:
    """Returns the plan that all new ranks compute. Collective among them."""
    parent = setup.previous if isinstance(setup.previous, Parent) else None
    claims = setup.rendezvous.exchange("what they have", json.dumps(claim(library, parent)).encode())
    return plan_of([json.loads(one) for one in claims])


def create(plan: Plan, setup: Setup, library: Library, creator: Creator) -> int:
    """Returns the communicator that the plan leads to. Collective among the new ranks."""
    parent = setup.previous
    comm = 0
    if setup.rank < plan.survivors:
        assert isinstance(parent, Parent)
        comm = creator.shrink(parent.comm, plan.lost) if plan.lost else parent.comm
    if plan.survivors == setup.size:
        return comm
    shrunk = comm if plan.lost else 0
    try:
        own = creator.grow_id(comm) if setup.rank == 0 else None
        uid = setup.rendezvous.broadcast("id to grow by", own)
        # A joining rank must find the old ranks in the same call, so none enters before all are here.
        setup.rendezvous.exchange("growing", b"")
        first = setup.rank == 0 or not comm
        grown = creator.grow(comm, setup.size, uid if first else b"", -1 if comm else setup.rank)
    finally:
        if shrunk:
            library.abort(shrunk, setup.device, ABORT_SECONDS)
    return grown
