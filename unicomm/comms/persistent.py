"""Persistent all-gather: prepared once, run many times into the same tensor."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from unicomm.comms.operations.arrays import Array
from unicomm.comms.operations.table import OPERATIONS

from .backend import PreparesOperations
from .errors import CommError, InvalidArgumentError, NotReadyError
from .work import Work

if TYPE_CHECKING:
    from unicomm.comms.options import Hints

    from .communicator import Communicator


class AllGatherHandle:
    """What `all_gather_p_init` returns: the tensor that each `all_gather_p_exec` fills."""

    def __init__(
        self, comm: Communicator, output: Array, hints: Hints, timeout: timedelta | float | None
    ) -> None:
        comm._engine.check_open("all_gather_single")
        n = comm.get_size()
        tensor = comm._engine.check.check_tensor(OPERATIONS["all_gather_single"], "output", output)
        if tensor.numel() % n:
            raise InvalidArgumentError(
                f"output has {tensor.numel()} elements, which {n} ranks cannot share equally",
                op="all_gather_p_init",
                comm=comm.get_name(),
                rank=comm.get_rank(),
                hint="give it n times the elements of the input",
            )
        limit = comm._engine.per_op("all_gather_single", hints, timeout)
        self.output = tensor
        self.timeout = None if timeout is None else limit
        self._comm: Communicator | None = comm

    def run(self, input: Array, async_op: bool, hints: Hints, timeout: timedelta | float | None) -> Work:
        assert self._comm is not None
        limit = self.timeout if timeout is None else timeout
        engine = self._comm._engine
        if isinstance(engine.backend, PreparesOperations):
            tensors = (self.output, input)
            return engine.collective("all_gather_single", tensors, async_op, hints, limit, prepared=self)
        return self._comm.all_gather_single(self.output, input, async_op, hints, limit)

    def free(self) -> None:
        comm, self._comm = self._comm, None
        if comm is not None:
            comm._engine.release(self)


def check_handle(comm: Communicator, handle: object, op: str) -> AllGatherHandle:
    """The handle, if it is one of this communicator's that was not freed."""
    error: type[CommError] = InvalidArgumentError
    if not isinstance(handle, AllGatherHandle):
        message, hint = f"handle is a {type(handle).__name__}", "pass what all_gather_p_init returned"
    elif handle._comm is None:
        error, message, hint = NotReadyError, "the handle was freed", "make a new one"
    elif handle._comm is not comm:
        message = f"the handle belongs to communicator '{handle._comm.get_name()}'"
        hint = "use it with the communicator that made it"
    else:
        return handle
    raise error(message, op=op, comm=comm.get_name(), rank=comm.get_rank(), hint=hint)
