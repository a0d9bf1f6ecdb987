"""Persistent all-gather: prepared once, run many times into the same tensor."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from .errors import InvalidArgumentError, NotReadyError
from .options import seconds
from .work import Work

if TYPE_CHECKING:
    from .communicator import Communicator
    from .engine import Hints


class AllGatherHandle:
    """What `all_gather_p_init` returns: the tensor that each `all_gather_p_exec` fills."""

    def __init__(
        self, comm: Communicator, output: torch.Tensor, hints: Hints, timeout: timedelta | float | None
    ) -> None:
        comm._engine.check_open("all_gather_single")
        n = comm.get_size()
        row = comm._engine.check.call("barrier", ()).operation
        comm._engine.check.check_tensor(row, "output", output)
        if output.numel() % n:
            raise InvalidArgumentError(
                f"output has {output.numel()} elements, which {n} ranks cannot share equally",
                op="all_gather_p_init",
                comm=comm.get_name(),
                rank=comm.get_rank(),
                hint="give it n times the elements of the input",
            )
        comm._engine.per_op("all_gather_single", hints, timeout)
        self.output = output
        self.timeout = None if timeout is None else seconds(timeout, comm.get_timeout())
        self._comm: Communicator | None = comm

    def run(
        self,
        comm: Communicator,
        input: torch.Tensor,
        async_op: bool,
        hints: Hints,
        timeout: timedelta | float | None,
    ) -> Work:
        self._check(comm)
        limit = self.timeout if timeout is None else timeout
        return comm.all_gather_single(self.output, input, async_op, hints, limit)

    def free(self, comm: Communicator) -> None:
        self._check(comm)
        self._comm = None

    def _check(self, comm: Communicator) -> None:
        if self._comm is comm:
            return
        where = {"op": "all_gather_p_exec", "comm": comm.get_name(), "rank": comm.get_rank()}
        if self._comm is None:
            raise NotReadyError("the handle was freed", hint="make a new one", **where)  # type: ignore[arg-type]
        raise InvalidArgumentError(
            f"the handle belongs to communicator '{self._comm.get_name()}'",
            hint="use it with the communicator that made it",
            **where,  # type: ignore[arg-type]
        )
