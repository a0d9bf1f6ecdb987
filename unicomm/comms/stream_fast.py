"""A short way for the commonest call on a device: all_reduce of one plain tensor.

It checks, numbers and records as the general path does, but prepares nothing for hooks, profiler or
composition: a call that needs any of it, or is wrong, goes there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from . import profiling, recording
from .fast_path import NoFastPath
from .hooks import next_op_id
from .ops import OPERATIONS
from .profiling_session import described
from .reduction import ReduceOp

if TYPE_CHECKING:
    from .engine import Engine

_ALL_REDUCE = OPERATIONS["all_reduce"].code


class StreamFast(NoFastPath):
    """That of an engine whose operations run on streams. It needs no blocking, for it holds the order."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine
        self._device = engine.member.device

    def all_reduce(  # type: ignore[override]
        self, tensor: Any, op: Any, async_op: bool, hints: Any, timeout: Any
    ) -> Any:
        if tensor.__class__ is not torch.Tensor or op.__class__ is not ReduceOp:
            return False
        if hints or timeout is not None:
            return False
        engine = self._engine
        job = engine.backend.direct_all_reduce(tensor, op)
        if (
            job is None
            or engine.hooks.active
            or profiling.session is not None
            or tensor.device != self._device
            or tensor.layout is not torch.strided
            or not tensor.is_contiguous()
            or tensor.is_neg()
            or not tensor.data_ptr()
        ):
            return False
        with engine._order:
            if engine.finalized or engine.broken is not None or engine.vacant is not None:
                return False
            seq = self.next_seq()
            tensors = [tensor]
            record = engine._recorder.begin(
                engine._recorder_index,
                _ALL_REDUCE,
                seq,
                next_op_id(),
                tensors,
                tensors,
                op.code,
                -1,
                recording.ASYNC if async_op else 0,
                0,
                min(int(engine.timeout * 1000), recording.MOST_MS),
                0,
                False,
            )
            return engine._run(
                *(job, "all_reduce", seq, [record], False, bool(async_op), engine.timeout, None, tensors),
                about=lambda: [described("all_reduce", tensors, tensors)],
            )
