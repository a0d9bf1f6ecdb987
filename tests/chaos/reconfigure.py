"""The scene `reconfigure`: in each step all ranks reconfigure, in another order, and use what they have then.

Who gets an error reconfigures once more, with the ranks that no fault hits: that has to succeed.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence

import unicomm
from tests.chaos.operations import Steps
from tests.chaos.spec import CLOSING, Say, Spec, WrongDataError, open_store
from unicomm import Communicator

_AGAIN = 60.0  # seconds for the attempt after an error: the others may get theirs much later


class Member:
    """A rank with a communicator that is reconfigured; `handles` are those of all ranks of the round."""

    def __init__(self, comm: Communicator, handles: Sequence[str], me: int) -> None:
        self.comm, self.handles, self.me = comm, handles, me
        self.order: list[int] = []  # ranks of the round, by their rank in the communicator

    def become(self, uuid: int, order: list[int], timeout: float) -> None:
        self.order = order
        self.comm.reconfigure(uuid, [self.handles[r] for r in order], timeout)
        if self.comm.get_rank() != order.index(self.me) or self.comm.get_size() != len(order):
            raise WrongDataError(f"rank {self.comm.get_rank()} of {self.comm.get_size()} in {order}")

    def use(self, step: int, rng: random.Random) -> None:
        steps = Steps(self.comm, self.order, self.me)
        for i in range(2):
            steps.run(step + i, rng)
        # A rank that has left the barrier reconfigures, which ends the others' barrier (docs/reconfigure.md).
        with contextlib.suppress(unicomm.AbortedError):
            self.comm.barrier(False)


def play(spec: Spec, say: Say, closing: contextlib.ExitStack) -> None:
    comm = unicomm.new_comm(
        spec.backend, "cpu", name="chaos", enable_reconfigure=True, timeout=spec.timeout, hints=spec.hints
    )
    closing.callback(comm.finalize, CLOSING)
    member = Member(comm, _exchange(spec, comm.get_init_handle()), spec.rank)
    rng = random.Random(spec.seed)
    try:
        for step in range(spec.steps):
            order = _order(spec, rng)
            say("step", step)
            member.become(step, order, spec.timeout)
            member.use(step, rng)
    except unicomm.CommError as error:
        error.culprits = tuple(member.order[r] for r in error.culprits)  # as the round numbers them
        say("end", type(error).__name__, list(error.culprits), str(error))
        if spec.rank not in spec.victims:
            _go_on(spec, say, member)
        raise
    comm.finalize()


def _order(spec: Spec, rng: random.Random) -> list[int]:
    """All ranks in any order. The rank that the fault hits is the first or not, if the round says so."""
    order = list(range(spec.size))
    rng.shuffle(order)
    (victim,) = spec.victims
    if spec.leads is not None and spec.leads != (order[0] == victim):
        at = order.index(victim) if spec.leads else -1
        order[0], order[at] = order[at], order[0]
    return order


def _go_on(spec: Spec, say: Say, member: Member) -> None:
    rest = [r for r in range(spec.size) if r not in spec.victims]
    member.comm.set_timeout(_AGAIN)
    try:
        member.become(1000, rest, _AGAIN)
        member.use(0, random.Random(spec.seed))
    except (unicomm.CommError, WrongDataError) as error:
        say("afterwards", f"the next reconfigure failed: {type(error).__name__} {error}")
    else:
        say("afterwards", "")


def _exchange(spec: Spec, handle: str) -> list[str]:
    store = open_store(spec)
    store.set(f"handle{spec.rank}", handle)
    return [store.get(f"handle{r}").decode() for r in range(spec.size)]
