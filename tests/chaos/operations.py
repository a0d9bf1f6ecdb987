"""The scene `operations`: random collectives, messages, batches, objects and splits, with known results.

The other scenes use `Steps` as well, to find out whether a communicator works.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable
from typing import Any

import torch

import unicomm
from tests.chaos.spec import CLOSING, SPLITS, Say, Spec, WrongDataError, connect, strike
from unicomm import Communicator, ReduceOp
from unicomm.testing import conformance

SUM = ReduceOp.SUM
COUNTS = (1, 7, 300, 20_000, 60_000, 150_000)


def value(rank: int, step: int, count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32).fmod_(13).add_(rank * 3 + step % 5)


def total(ranks: list[int], step: int, count: int) -> torch.Tensor:
    return value(0, step, count).mul_(len(ranks)).add_(3 * sum(ranks))


class Steps:
    """The operations; `group` are the numbers of `comm`'s ranks in the round."""

    def __init__(self, comm: Communicator, group: list[int], me: int) -> None:
        self.comm, self.group, self.me = comm, group, me
        self.n = len(group)
        self.mine = group.index(me)

    def make(self, data: torch.Tensor, rng: random.Random) -> torch.Tensor:
        """Now and then in memory that others read directly; the choice may differ between ranks."""
        allocates = conformance.has_memory(self.comm)
        if rng.random() < 0.5 and allocates:
            return self.comm.mem_allocator.empty(data.shape).copy_(data)
        return data

    def run(self, step: int, rng: random.Random) -> None:
        kind = rng.choice(sorted(KINDS))
        count = rng.choice(COUNTS)
        root = rng.randrange(self.n)
        own = random.Random(rng.random() + (self.me if rng.random() < 0.3 else 0))
        KINDS[kind](self, step, count, root, own)

    def same(self, got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        if not torch.equal(got, expected):
            raise WrongDataError(f"{what} on {self.group}: {got[:8].tolist()}, not {expected[:8].tolist()}")

    def all_reduce(self, step: int, count: int, root: int, rng: random.Random) -> None:
        x = self.make(value(self.me, step, count), rng)
        self.comm.all_reduce(x, SUM, False)
        self.same(x, total(self.group, step, count), "all_reduce")

    def all_reduces_at_once(self, step: int, count: int, root: int, rng: random.Random) -> None:
        tensors = [self.make(value(self.me, step + i, count), rng) for i in range(4)]
        works = [self.comm.all_reduce(x, SUM, True) for x in tensors]
        for i, (work, x) in enumerate(zip(works, tensors, strict=True)):
            work.wait()
            self.same(x, total(self.group, step + i, count), "an asynchronous all_reduce")

    def broadcast(self, step: int, count: int, root: int, rng: random.Random) -> None:
        x = self.make(value(self.me, step, count), rng)
        self.comm.broadcast(x, root, False)
        self.same(x, value(self.group[root], step, count), "broadcast")

    def all_gather(self, step: int, count: int, root: int, rng: random.Random) -> None:
        count = -(-count // self.n)
        x = self.make(value(self.me, step, count), rng)
        out = torch.zeros(self.n * count)
        self.comm.all_gather_single(out, x, False)
        self.same(out, torch.cat([value(r, step, count) for r in self.group]), "all_gather")

    def reduce_scatter(self, step: int, count: int, root: int, rng: random.Random) -> None:
        count = -(-count // self.n)
        x = self.make(value(self.me, step, count * self.n), rng)
        out = torch.zeros(count)
        self.comm.reduce_scatter_single(out, x, SUM, False)
        expected = total(self.group, step, count * self.n)[self.mine * count : (self.mine + 1) * count]
        self.same(out, expected, "reduce_scatter")

    def all_to_all(self, step: int, count: int, root: int, rng: random.Random) -> None:
        count = -(-count // self.n)
        x = self.make(value(self.me, step, count * self.n), rng)
        out = torch.zeros(count * self.n)
        self.comm.all_to_all_single(out, x, False)
        part = slice(self.mine * count, (self.mine + 1) * count)
        expected = torch.cat([value(r, step, count * self.n)[part] for r in self.group])
        self.same(out, expected, "all_to_all")

    def gather(self, step: int, count: int, root: int, rng: random.Random) -> None:
        x = self.make(value(self.me, step, count), rng)
        outs = [torch.zeros(count) for _ in self.group] if self.mine == root else []
        self.comm.gather(outs, x, root, False)
        for r, out in zip(self.group, outs, strict=False):
            self.same(out, value(r, step, count), "gather")

    def ring(self, step: int, count: int, root: int, rng: random.Random) -> None:
        if self.n == 1:
            return
        to, back = (self.mine + 1) % self.n, (self.mine - 1) % self.n
        x, y = self.make(value(self.me, step, count), rng), torch.zeros(count)
        self.comm.batch_op_create().send(x, to).recv(y, back).issue(False)
        self.same(y, value(self.group[back], step, count), "a message")

    def relay(self, step: int, count: int, root: int, rng: random.Random) -> None:
        """One message after the other, from rank to rank."""
        x = self.make(value(self.group[0], step, count), rng) if self.mine == 0 else torch.zeros(count)
        if self.mine > 0:
            self.comm.recv(x, self.mine - 1, False)
        if self.mine < self.n - 1:
            self.comm.send(x, self.mine + 1, False)
        self.same(x, value(self.group[0], step, count), "a relayed message")

    def messages_at_once(self, step: int, count: int, root: int, rng: random.Random) -> None:
        """Asynchronous ones between pairs of ranks."""
        peer = self.mine ^ 1
        if peer >= self.n:
            return
        ins = [self.make(value(self.me, step + i, count), rng) for i in range(3)]
        outs = [torch.zeros(count) for _ in ins]
        works = []
        for x, y in zip(ins, outs, strict=True):
            for act, tensor in ((self.comm.send, x), (self.comm.recv, y))[:: 1 if self.mine < peer else -1]:
                works.append(act(tensor, peer, True))
        for work in works:
            work.wait()
        for i, y in enumerate(outs):
            self.same(y, value(self.group[peer], step + i, count), "an asynchronous message")

    def objects(self, step: int, count: int, root: int, rng: random.Random) -> None:
        everyone: list[Any] = [None] * self.n
        unicomm.objcol.all_gather_object(self.comm, everyone, {"rank": self.me, "step": step})
        if everyone != [{"rank": r, "step": step} for r in self.group]:
            raise WrongDataError(f"objects on {self.group}: {everyone}")

    def barrier(self, step: int, count: int, root: int, rng: random.Random) -> None:
        self.comm.barrier(False)


KINDS: dict[str, Callable[..., None]] = {
    name: f for name, f in vars(Steps).items() if name not in ("make", "run", "same") and name[0] != "_"
}


def split(comm: Communicator, spec: Spec, step: int, rng: random.Random) -> None:
    """A part of the ranks works on its own for a while."""
    cut = rng.randrange(1, spec.size)
    ranks = list(range(spec.size))
    rng.shuffle(ranks)
    parts = [sorted(ranks[:cut]), sorted(ranks[cut:])]
    seeds = [rng.random(), rng.random()]
    which = spec.rank in parts[1]
    part = parts[which]
    child = comm.split(part, f"part{step}")
    assert child is not None
    own = random.Random(seeds[which])
    try:
        for i in range(3):
            Steps(child, part, spec.rank).run(step + i, own)
    except Exception as error:  # also of the program, which has no memory
        if isinstance(error, unicomm.CommError):
            error.culprits = tuple(part[r] for r in error.culprits)  # as the round numbers them
        with contextlib.suppress(unicomm.CommError):
            child.finalize(CLOSING)
        raise
    child.finalize()


def play(spec: Spec, say: Say, closing: contextlib.ExitStack) -> None:
    comm = connect(spec)
    closing.callback(comm.finalize, CLOSING)
    rng = random.Random(spec.seed)
    comm.set_timeout(spec.timeout)
    for step in range(spec.steps):
        say("step", step)
        if step == spec.at and spec.fate == "leave":
            break
        if step == spec.at and spec.fate == "abort":
            # From another thread, some time into this step's operations.
            threading.Timer(random.Random(spec.seed).random() * 0.003, comm.abort).start()
        elif step == spec.at:
            strike(spec)
        if step in SPLITS or step == spec.split_at:
            split(comm, spec, step, rng)
        else:
            Steps(comm, list(range(spec.size)), spec.rank).run(step, rng)
    else:
        say("step", spec.steps)
        # Else a rank that has no more messages with one that is stopped would be right to end well.
        comm.barrier(False)
    comm.finalize()
