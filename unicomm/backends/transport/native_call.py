"""Collectives of the general path that the native core runs as a whole, as those of the fast path."""

from __future__ import annotations

from typing import Any

import torch

from unicomm import _core
from unicomm.comms.operations.call import Call
from unicomm.comms.operations.reduction import RedOpType

_NATIVE = frozenset(
    {
        "all_reduce",
        "broadcast",
        "all_gather_single",
        "reduce_scatter_single",
        "all_to_all_single",
        "barrier",
    }
)


def has_native_form(call: Call) -> bool:
    """Whether the native core may run the call: the same on all ranks that call the same."""
    if call.name not in _NATIVE or call.wire is not None or call.contributions is not None:
        return False
    op = call.op
    return op is None or (op.type != RedOpType.PREMUL_SUM and _core.fold_defined(call.dtype_code, op.code))


def input_bytes(call: Call) -> int:
    """Returns the bytes of the input as the native core counts them: 0 for a barrier."""
    tensor = _tensors(call)[0]
    return 0 if tensor is None else tensor.nbytes


def run_native(native: _core.SupervisedOperations, call: Call) -> Any:
    """Runs the call. Returns None, or a fault."""
    codes = call.operation.code, call.dtype_code, call.red_code, call.root
    seconds = call.remaining() if call.deadline else call.timeout
    return native.run(*codes, call.count, call.extra, seconds, *_tensors(call))


def _tensors(call: Call) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if call.name == "broadcast":  # of which only the root has an input
        return call.outputs[0], call.outputs[0]
    return (call.inputs[0], call.outputs[0]) if call.outputs else (None, None)
