"""Persistent all-gather: prepared once, run many times into the same tensor."""

from __future__ import annotations

from typing import Protocol

from unicomm.comms.execution.engine import Holder
from unicomm.comms.operations.arrays import Array
from unicomm.comms.operations.table import OPERATIONS

from .backend import PreparesOperations
from .errors import CommError, InvalidArgumentError, NotReadyError
from .options import Hints, Timeout
from .work import Work


class Gathering(Holder, Protocol):
    """The communicator of a handle."""

    def all_gather_single(
        self, output: Array, input: Array, async_op: bool, hints: Hints, timeout: Timeout
    ) -> Work: ...


class AllGatherHandle:
    """A persistent all-gather, returned by `all_gather_p_init`, into the tensor `output`."""

    def __init__(self, comm: Gathering, output: Array, hints: Hints, timeout: Timeout) -> None:
        engine, n = comm._engine, comm._engine.group.size
        engine.check_open("all_gather_single")
        tensor = engine.check.check_tensor(OPERATIONS["all_gather_single"], "output", output)
        if tensor.numel() % n:
            engine.invalid(
                "all_gather_p_init",
                f"output has {tensor.numel()} elements, which {n} ranks cannot share equally",
                "give it n times the elements of the input",
            )
        limit = engine.per_op("all_gather_single", hints, timeout)
        self.output = tensor
        self.timeout = None if timeout is None else limit
        self._comm: Gathering | None = comm

    def run(self, input: Array, async_op: bool, hints: Hints, timeout: Timeout) -> Work:
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


def check_handle(comm: Gathering, handle: object, op: str) -> AllGatherHandle:
    """Returns the handle if `comm` made it and it has not been freed; raises otherwise."""
    error: type[CommError] = InvalidArgumentError
    if not isinstance(handle, AllGatherHandle):
        message, hint = f"handle is a {type(handle).__name__}", "pass what all_gather_p_init returned"
    elif handle._comm is None:
        error, message, hint = NotReadyError, "the handle was freed", "make a new one"
    elif handle._comm is not comm:
        message = f"the handle belongs to communicator '{handle._comm._engine.name}'"
        hint = "use it with the communicator that made it"
    else:
        return handle
    raise comm._engine.error(error, op, message, hint)
