"""What the ranks of a chaos round do: random legal operations, the same on all ranks, with known results.

Everything follows from a seed, so that a round can be repeated. A rank tells the conductor each step that it
begins, and at the end what became of it: `right` (all results were), `wrong` (one was not, with what), or the
class of the error it got, with its culprits and when.
"""

from __future__ import annotations

import os
import random
import resource
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

import unicomm
from unicomm import Communicator, ReduceOp

SUM = ReduceOp.SUM
COUNTS = (1, 7, 300, 20_000, 60_000, 150_000)


@dataclass(frozen=True)
class Spec:
    """A round: `timeout` is that of operations. Steps at which something happens to this rank, or -1: it
    aborts, leaves, has no file descriptors left (all ranks know that one: they split then).
    """

    seed: int
    rank: int
    size: int
    backend: str
    steps: int
    timeout: float
    port: int
    prefix: str
    folder: str
    abort_at: int = -1
    leave_at: int = -1
    starve_at: int = -1
    starve_me: bool = False


class WrongDataError(Exception):
    pass


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
        allocates = self.comm.get_capabilities().allocates
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
    parts = [list(range(cut)), list(range(cut, spec.size))]
    seeds = [rng.random(), rng.random()]
    which = spec.rank >= cut
    part = parts[which]
    child = comm.split(part, f"part{step}")
    own = random.Random(seeds[which])
    try:
        for i in range(3):
            Steps(child, part, spec.rank).run(step + i, own)
    except unicomm.CommError as error:
        error.culprits = tuple(part[r] for r in error.culprits)  # as the round numbers them
        raise
    child.finalize()


def work(spec: Spec, say: Callable[..., None]) -> None:
    rng = random.Random(spec.seed)
    store = dist.PrefixStore(spec.prefix, dist.TCPStore("127.0.0.1", spec.port, is_master=False))
    comm = unicomm.new_comm(
        spec.backend,
        torch.device("cpu"),
        name="chaos",
        store=store,
        rank=spec.rank,
        size=spec.size,
        timeout=60,
    )
    comm.set_timeout(spec.timeout)
    say("ready")
    for step in range(spec.steps):
        say("step", step)
        if step == spec.abort_at:
            # From another thread, some time into this step's operations.
            threading.Timer(random.Random(spec.seed).random() * 0.003, comm.abort).start()
        if step == spec.leave_at:
            break
        if step == spec.starve_at and spec.starve_me:
            used = len(os.listdir("/proc/self/fd"))
            resource.setrlimit(
                resource.RLIMIT_NOFILE, (used + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
            )
        if step % 7 == 3 or step == spec.starve_at:
            split(comm, spec, step, rng)
        else:
            Steps(comm, list(range(spec.size)), spec.rank).run(step, rng)
    comm.finalize()


def main(spec: Spec, link: Connection) -> None:
    """A rank, in a process of its own."""
    torch.set_num_threads(1)
    os.environ["UNICOMM_TRACE_DIR"] = spec.folder
    os.environ.update(RANK=str(spec.rank), WORLD_SIZE=str(spec.size), LOCAL_RANK=str(spec.rank))

    def say(*what: Any) -> None:
        link.send((time.monotonic(), *what))

    try:
        work(spec, say)
    except WrongDataError as error:
        say("end", "wrong", [], str(error))
    except unicomm.CommError as error:
        say("end", type(error).__name__, list(error.culprits), str(error))
    except Exception as error:
        say("end", f"unexpected {type(error).__name__}", [], repr(error))
    else:
        say("end", "right", [], "")
