"""One rank of a random legal program: rank.py SEED [broken].

It says "running" in the middle of its program and "over" after it, and ends when it is told to. If it is
"broken", rank 0 leaves out the next collective of all ranks after "running".
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch

import unicomm
from tests.healthy.legal import WORLD, Program, Step
from tests.processes.programs.common import hear, say

Work = unicomm.Work


class Rank:
    """A rank: its communicators by number of the group, and the operations it has not waited for."""

    def __init__(self, program: Program) -> None:
        self.program = program
        world = unicomm.new_comm(program.backend, torch.device("cpu"), name="world", timeout=60.0)
        self.me, self.comms = world.get_rank(), {WORLD: world}
        self.works: list[Work] = []

    def take(self, step: Step) -> None:
        """Takes a step, if this rank is a member of its group."""
        members = self.program.groups[step.group]
        if self.me not in members:
            return
        if step.work_ms and step.work_ms[self.me]:
            time.sleep(step.work_ms[self.me] / 1000)
        if step.what == "split":
            self.comms[step.group] = self.comms[WORLD].split(list(members), f"group{step.group}")
        elif step.what == "finalize":
            self.comms.pop(step.group).finalize()
        elif step.what == "wait":
            for work in self.works:
                work.wait()
            self.works = []
        else:
            work = OPERATIONS.get(step.what, _batch)(self.comms[step.group], step, len(members))
            if work is not None and step.asynchronous:
                self.works.append(work)


def _tensor(step: Step, numel: int) -> torch.Tensor:
    return torch.ones(numel, dtype=getattr(torch, step.dtype))


def _batch(comm: unicomm.Communicator, step: Step, n: int) -> Work | None:
    """The rank's messages of a step: one by itself, or several as a batch."""
    me = comm.get_rank()
    batch = comm.batch_op_create()
    for sender, receiver in step.pairs:
        tensor = _tensor(step, step.sizes[sender][receiver])
        if step.what == "message" and me in (sender, receiver):
            if me == sender:
                return comm.send(tensor, receiver, async_op=step.asynchronous)
            return comm.recv(tensor, sender, async_op=step.asynchronous)
        if me == sender:
            batch.send(tensor, receiver)
        if me == receiver:
            batch.recv(tensor, sender)
    return batch.issue(async_op=step.asynchronous) if batch.ops else None


def _parts(step: Step, n: int, numel: int = -1) -> list[torch.Tensor]:
    return [_tensor(step, step.numel if numel < 0 else numel) for _ in range(n)]


def _uneven(step: Step, n: int) -> list[torch.Tensor]:
    """The parts of a gather or scatter whose sizes are the first row of the step's sizes."""
    return [_tensor(step, step.sizes[0][i]) for i in range(n)]


def _all_to_all(comm: unicomm.Communicator, step: Step, n: int) -> Work:
    me = comm.get_rank()
    theirs, mine = ([step.sizes[i][me] for i in range(n)], list(step.sizes[me]))
    out, sent = ([_tensor(step, size) for size in sizes] for sizes in (theirs, mine))
    return comm.all_to_all(out, sent, async_op=step.asynchronous)


def _all_to_all_v(comm: unicomm.Communicator, step: Step, n: int) -> Work:
    me = comm.get_rank()
    theirs, mine = ([step.sizes[i][me] for i in range(n)], list(step.sizes[me]))
    out, sent = _tensor(step, sum(theirs)), _tensor(step, sum(mine))
    return comm.all_to_all_v_single(out, sent, theirs, mine, async_op=step.asynchronous)


def _at_root(comm: unicomm.Communicator, step: Step, n: int) -> list[torch.Tensor]:
    return _parts(step, n) if comm.get_rank() == step.root else []


def _red(step: Step) -> unicomm.ReduceOp:
    return getattr(unicomm.ReduceOp, step.red)


Run = Callable[[unicomm.Communicator, Step, int], Work | None]
OPERATIONS: dict[str, Run] = {
    "all_reduce": lambda c, s, n: c.all_reduce(_tensor(s, s.numel), _red(s), async_op=s.asynchronous),
    "broadcast": lambda c, s, n: c.broadcast(_tensor(s, s.numel), s.root, async_op=s.asynchronous),
    "reduce": lambda c, s, n: c.reduce(_tensor(s, s.numel), s.root, _red(s), async_op=s.asynchronous),
    "all_gather": lambda c, s, n: c.all_gather(_parts(s, n), _tensor(s, s.numel), async_op=s.asynchronous),
    "all_gather_single": lambda c, s, n: c.all_gather_single(
        _tensor(s, s.numel * n), _tensor(s, s.numel), async_op=s.asynchronous
    ),
    "all_gather_v": lambda c, s, n: c.all_gather_v(
        _uneven(s, n), _tensor(s, s.sizes[0][c.get_rank()]), async_op=s.asynchronous
    ),
    "reduce_scatter": lambda c, s, n: c.reduce_scatter(
        _tensor(s, s.numel), _parts(s, n), _red(s), async_op=s.asynchronous
    ),
    "reduce_scatter_single": lambda c, s, n: c.reduce_scatter_single(
        _tensor(s, s.numel), _tensor(s, s.numel * n), _red(s), async_op=s.asynchronous
    ),
    "reduce_scatter_v": lambda c, s, n: c.reduce_scatter_v(
        _tensor(s, s.sizes[0][c.get_rank()]), _uneven(s, n), _red(s), async_op=s.asynchronous
    ),
    "all_to_all": _all_to_all,
    "all_to_all_single": lambda c, s, n: c.all_to_all_single(
        _tensor(s, s.numel * n), _tensor(s, s.numel * n), async_op=s.asynchronous
    ),
    "all_to_all_v_single": _all_to_all_v,
    "scatter": lambda c, s, n: c.scatter(
        _tensor(s, s.numel), _at_root(c, s, n), s.root, async_op=s.asynchronous
    ),
    "gather": lambda c, s, n: c.gather(
        _at_root(c, s, n), _tensor(s, s.numel), s.root, async_op=s.asynchronous
    ),
    "gather_single": lambda c, s, n: c.gather_single(
        _tensor(s, s.numel * n) if c.get_rank() == s.root else None,
        _tensor(s, s.numel),
        s.root,
        async_op=s.asynchronous,
    ),
    "barrier": lambda c, s, n: c.barrier(async_op=s.asynchronous),
}


def main(seed: int, broken: bool) -> None:
    torch.set_num_threads(1)
    program = Program.of(seed)
    rank = Rank(program)
    half = len(program.steps) // 2
    for number, step in enumerate(program.steps):
        if number == half:
            say("running")
        if broken and rank.me == 0 and number >= half and step.group == WORLD and step.what in OPERATIONS:
            broken = False
            continue
        rank.take(step)
    say("over")
    hear()
    for comm in rank.comms.values():
        comm.finalize()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:] == ["broken"])
