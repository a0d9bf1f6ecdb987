"""The dispatch mode that answers operations on hollow tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from unicomm.c10d.calls.dispatcher import LOOKS_AWAY

from ..compat import FakeTensor, TorchDispatchMode, asks_for_shapes, cpu_keys, tree_map
from ..values import reads
from .known import ANSWERS, PREPARES
from .memory import PLAIN, is_hollow, make_up, reserve
from .rules import Operation, Result, Way, operation_of, plan


class HollowTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers operations on hollow tensors while it is entered, and makes large results hollow.

    Everything else runs as it would without the mode.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        setattr(self, LOOKS_AWAY, True)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if asks_for_shapes():
            return func(*args, **kwargs)
        for cls in types:
            if cls not in PLAIN:
                # Fake tensors compute nothing. Other subclasses take the operation apart, within this mode.
                return func(*args, **kwargs) if issubclass(cls, FakeTensor) else NotImplemented
        operation = operation_of(func)
        if operation.way is Way.DECOMPOSE:
            with self:
                if func._can_decompose():
                    return func.decompose(*args, **kwargs)
                return func.redispatch(cpu_keys(func), *args, **kwargs)
        if (known := ANSWERS.get(func)) is not None and (answer := known(*args, **kwargs)) is not None:
            return answer
        if operation.way is Way.RUN:
            return func(*args, **kwargs)
        if (prepare := PREPARES.get(func)) is not None:
            args = prepare(args)
        results, hollow = plan(func, operation, args, kwargs)
        if results is None:
            return func(*args, **kwargs)
        self._write(operation, args, kwargs)
        truth = func.overloadpacket is torch.ops.aten.all
        made = [
            (args[place] if isinstance(place, int) else kwargs[place])
            if place is not None
            else tree_map(lambda one: _make(one, hollow, truth), result)
            for place, result in zip(operation.returns, results, strict=True)
        ]
        if operation.single:
            return made[0]
        return tuple(made) if made else None

    def _write(self, operation: Operation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Gives small arguments that an operation would write values.

        A single number stays what it is if it had a value: it counts something, as overflows or steps.
        """
        for place in operation.written:
            given = (
                kwargs.get(place) if isinstance(place, str) else args[place] if place < len(args) else None
            )
            for tensor in given if isinstance(given, (list, tuple)) else (given,):
                if tensor is not None and not is_hollow(tensor) and (operation.is_out or tensor.numel() != 1):
                    reads.mark([make_up(tensor)], reads.HOLLOW)


def _make(result: Any, hollow: bool, truth: bool) -> Any:
    if not isinstance(result, Result):
        return result
    if result.large:
        return reserve(result.size, result.stride, result.dtype)
    made = make_up(torch.empty_strided(result.size, result.stride, dtype=result.dtype), truth)
    if hollow:
        reads.mark([made], reads.HOLLOW)
    return made
