"""Ranks as threads that reconfigure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import unicomm
import unicomm.profiler
from tests.threads import outcomes
from unicomm import Communicator, ReduceOp

SUM = ReduceOp.SUM
LONG = 30.0


class Cast:
    """Communicators of one process that have nothing in common yet, each played by a thread when asked to."""

    def __init__(
        self, backend: str, n: int, timeout: float = LONG, hints: dict[str, str] | None = None
    ) -> None:
        self.backend = backend
        self.comms = [
            unicomm.new_comm(
                backend, "cpu", name="cast", enable_reconfigure=True, timeout=timeout, hints=hints
            )
            for _ in range(n)
        ]
        self.handles = [comm.get_init_handle() for comm in self.comms]
        self.uuid = 100

    def play(self, who: Sequence[int], act: Callable[[Communicator, int], Any]) -> dict[int, Any]:
        """`act(comm, number)` of each, side by side; what each returns or raises."""
        calls = [partial(act, self.comms[i], i) for i in who]
        return dict(zip(who, outcomes(calls, within=3 * LONG), strict=True))

    def become(self, order: Sequence[int], unordered: bool = False, **options: Any) -> None:
        """All of `order` reconfigure to that, and check what they are then."""
        self.uuid += 1
        handles: Any = [self.handles[i] for i in order]
        handles = set(handles) if unordered else handles

        def act(comm: Communicator, i: int) -> tuple[str, int]:
            work = comm.reconfigure(self.uuid, handles, **options)
            assert work.is_completed()
            work.wait()
            if not unordered:
                assert comm.get_rank() == list(order).index(i)
            self.check(comm, i, order)
            return comm.get_uid(), comm.get_rank()

        found = self.play(order, act)
        failed = [result for result in found.values() if isinstance(result, Exception)]
        if failed:
            raise failed[0]
        assert sorted(rank for _, rank in found.values()) == list(range(len(order)))
        if self.backend != "fake":
            assert len({uid for uid, _ in found.values()}) == 1

    def check(self, comm: Communicator, i: int, order: Sequence[int]) -> None:
        assert (comm.get_size(), comm.get_name(), comm.is_aborted()) == (len(order), "cast", False)
        x = torch.full((5,), float(i + 1))
        work = comm.all_reduce(x, SUM, False)
        work.wait_blocking()  # also where the device does it
        assert work.seq == 1
        out = torch.zeros(2 * len(order))
        comm.all_gather_single(out, torch.full((2,), float(comm.get_rank())), True).wait_blocking()
        if self.backend != "fake":
            assert x.tolist() == [float(sum(order) + len(order))] * 5
            assert out.tolist() == [float(r) for r in range(len(order)) for _ in range(2)]

    def finalize(self) -> None:
        for comm in self.comms:
            comm.finalize()
