"""The scene `symmetric`: puts with signals, waits for signals, windows and exchanges of experts."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable

import torch

import unicomm
from tests.chaos.spec import CLOSING, Say, Spec, WrongDataError, connect, strike
from unicomm import Communicator, symm

_COUNT, _HEAP = 20_000, 64 << 20
_EXPERTS, _ROWS, _WIDTH = 2, 24, 16


class Symmetric:
    """What all ranks have, and the operations on it. After the barrier at a step's end nobody reads more."""

    def __init__(self, comm: Communicator) -> None:
        self.comm, self.me, self.n = comm, comm.get_rank(), comm.get_size()
        self.to, self.back = (self.me + 1) % self.n, (self.me - 1) % self.n
        symm.init(comm, heap_bytes=_HEAP)
        self.rows = symm.empty(self.n, _COUNT, comm=comm)  # a row for each rank that writes
        self.pad = symm.empty(self.n, dtype=torch.int64, comm=comm).zero_()
        self.window = comm.new_window(symm.empty(self.n, _COUNT, comm=comm))
        self.counter = comm.new_window(symm.empty(1, dtype=torch.int64, comm=comm).zero_())
        self.exchange = symm.ExpertExchange(comm, experts=_EXPERTS, rows=_ROWS, width=_WIDTH)
        comm.barrier(False)

    def same(self, got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        if not torch.equal(got, expected):
            raise WrongDataError(
                f"{what}: {got.flatten()[:8].tolist()}, not {expected.flatten()[:8].tolist()}"
            )

    def value(self, rank: int, step: int) -> torch.Tensor:
        return torch.arange(_COUNT, dtype=torch.float32).fmod_(13).add_(rank * 3 + step % 5)

    def put_with_signal(self, step: int, rng: random.Random) -> None:
        mine = self.rows[self.me]
        mine.copy_(self.value(self.me, step))
        symm.put_signal(mine, self.pad[self.me], step + 1, self.to, self.comm)
        symm.wait_signal(self.pad[self.back], step + 1, self.back, self.comm)
        self.same(self.rows[self.back], self.value(self.back, step), "a put with a signal")

    def relay(self, step: int, rng: random.Random) -> None:
        """From rank to rank: each waits for the signal of the one before it."""
        first = self.rows[0]
        if self.me == 0:
            first.copy_(self.value(0, step))
        else:
            symm.wait_signal(self.pad[0], step + 1, self.back, self.comm)
        if self.to != 0:
            symm.put_signal(first, self.pad[0], step + 1, self.to, self.comm)
        self.same(first, self.value(0, step), "a relayed put")

    def window_with_signal(self, step: int, rng: random.Random) -> None:
        self.window.put(self.value(self.me, step), self.to, self.me * _COUNT, False)
        self.window.signal(self.to, False)
        self.window.wait_signal(self.back, False)
        self.same(self.window.get_tensor()[self.back], self.value(self.back, step), "a window's put")

    def add(self, step: int, rng: random.Random) -> None:
        root = rng.randrange(self.n)
        before = self.counter.map_remote_tensor(root).clone()
        self.comm.barrier(False)
        for _ in range(20):
            self.counter.fetch_add(root, 0, 1)
        self.comm.barrier(False)
        self.same(self.counter.map_remote_tensor(root), before + 20 * self.n, "fetch_add")

    def experts(self, step: int, rng: random.Random) -> None:
        """Each expert multiplies its rows by its own number; the gradient is that number."""
        goes = [sorted(rng.randrange(self.n * _EXPERTS) for _ in range(_ROWS)) for _ in range(self.n)][
            self.me
        ]
        splits = [goes.count(e) for e in range(self.n * _EXPERTS)]
        x = (torch.arange(float(_ROWS * _WIDTH)).view(_ROWS, _WIDTH) + self.me).requires_grad_()
        rows, route = self.exchange.dispatch(x, splits)
        done = [rows[block] * (_EXPERTS * self.me + e + 1) for e, block in enumerate(route.blocks)]
        out = self.exchange.combine(torch.cat(done), route)
        factor = torch.tensor(goes, dtype=torch.float32).add_(1).view(-1, 1).expand(_ROWS, _WIDTH)
        self.same(out.detach(), x.detach() * factor, "what experts made")
        out.sum().backward()
        assert x.grad is not None
        self.same(x.grad, factor, "the gradient through experts")

    def all_reduce(self, step: int, rng: random.Random) -> None:
        self.rows[self.me].copy_(self.value(self.me, step))
        mine = self.rows[0]
        self.comm.barrier(False)
        mine.copy_(self.value(self.me, step))
        got = symm.one_shot_all_reduce(mine, self.comm)
        total = self.value(0, step).mul_(self.n).add_(3 * sum(range(self.n)))
        self.same(got, total, "one_shot_all_reduce")

    def allocate(self, step: int, rng: random.Random) -> None:
        """Memory that is given back, and more than there is, which all ranks are refused."""
        made = symm.empty(rng.choice((1, 1000, 500_000)), comm=self.comm).fill_(1.0)
        try:
            symm.empty(_HEAP, comm=self.comm)
        except unicomm.InvalidArgumentError:
            pass
        else:
            raise WrongDataError("there was room for more than the heap has")
        symm.free(made, self.comm)


KINDS: dict[str, Callable[..., None]] = {
    name: f for name, f in vars(Symmetric).items() if name not in ("same", "value") and name[0] != "_"
}


def play(spec: Spec, say: Say, closing: contextlib.ExitStack) -> None:
    comm = connect(spec)
    closing.callback(comm.finalize, CLOSING)
    comm.set_timeout(spec.timeout)
    has = Symmetric(comm)
    rng = random.Random(spec.seed)
    for step in range(spec.steps):
        say("step", step)
        if step == spec.at:
            strike(spec)
        KINDS[rng.choice(sorted(KINDS))](has, step, rng)
        comm.barrier(False)
    say("step", spec.steps)
    comm.barrier(False)
    comm.finalize()
