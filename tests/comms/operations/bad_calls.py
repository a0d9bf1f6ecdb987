"""What the tests of wrong calls share: the calls as data, and the ranks that try them.

One rank makes the bad call, synchronously and asynchronously, while the others do nothing. Had anything been
sent or numbered, the good calls that all ranks make then would disagree.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tests import recorded
from unicomm import Communicator, InvalidArgumentError, P2POp, ReduceOp
from unicomm.testing import run_ranks

N, BAD = 3, 1  # ranks, and the one that is wrong
SUM = ReduceOp.SUM
NONE: list[torch.Tensor] = []


@dataclass
class Case:
    op: str
    what: str
    call: Callable[[Communicator, bool], object]
    says: str
    error: type[Exception] = InvalidArgumentError

    def __str__(self) -> str:
        return f"{self.op}-{self.what}".replace(" ", "_")


def f(n: int = 6, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(n, dtype=dtype)


def several(n: int = 6, count: int = N, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [f(n, dtype) for _ in range(count)]


def filled(comm: Communicator, *entries: P2POp) -> Callable[[bool], object]:
    batch = comm.batch_op_create()
    batch.ops.extend(entries)
    return batch.issue


def bad_calls(cases: list[Case], backend: str, raised: Callable[..., BaseException]) -> None:
    meeting = threading.Barrier(N, timeout=30)

    def program(comm: Communicator) -> None:
        try:
            try_all(comm)
        except BaseException:
            meeting.abort()  # the others need not wait for this rank
            raise

    def try_all(comm: Communicator) -> None:
        for number, case in enumerate(cases, 1):
            meeting.wait()
            if comm.get_rank() == BAD:
                before = recorded.total()
                for async_op in (False, True):
                    error = raised(case.call, comm, async_op)
                    assert type(error) is case.error, (str(case), repr(error))
                    where = (error.op, error.comm, error.rank, error.seq)
                    assert where == (case.op, "ranks", BAD, None), str(case)
                    assert error.hint, str(case)
                    assert re.search(case.says, error.message), (str(case), error.message)
                    assert f"[{case.op}, communicator 'ranks', rank {BAD}] " in str(error)
                assert recorded.total() == before, str(case)
            meeting.wait()
            x = torch.ones(6)
            assert comm.all_reduce(x, SUM, False).seq == number, str(case)
            if comm.get_rank() != 2:
                message = torch.tensor([7.0 * (1 - comm.get_rank())])
                move = comm.send if comm.get_rank() == 0 else comm.recv
                assert move(message, 1 - comm.get_rank(), False).seq == number, str(case)
                assert backend == "fake" or message.item() == 7.0, str(case)
            assert backend == "fake" or x.tolist() == [3.0] * 6, str(case)

    run_ranks(program, N, backend=backend)
