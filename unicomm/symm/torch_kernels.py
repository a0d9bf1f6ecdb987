"""CPU kernels of the operations of `torch.ops.symm_mem` that torch writes in Python, for GPUs only.

Products and gathers are not split into overlapping pieces, as there is no second stream: the group's own
collectives move whole tensors, and torch multiplies them. Narrower types are summed over the ranks in float32
and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unicomm.c10d import compat
from unicomm.comms.errors import InvalidArgumentError, UnsupportedError

symm_mem = compat.symmetric_memory()
_functional = compat.functional_collectives
_BARRIERS = 3  # the channel of the signal pad that torch's own copy-engine gather uses


class PythonKernel(NamedTuple):
    """A kernel for CPU tensors. `text` says how it moves data."""

    run: Callable[..., Any]
    text: str


# --- data movement ---------------------------------------------------------------------------------------


def _size(group_name: str) -> int:
    return int(compat.group_of_name(group_name).size())


def _narrow_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype.itemsize == 1


def _gathered(tensor: Tensor, dim: int, group_name: str) -> Tensor:
    """Returns the ranks' tensors, concatenated along `dim`, which is the first dimension of the result."""
    front = tensor.movedim(dim, 0).contiguous()
    wire = front.view(torch.uint8) if _narrow_float(front) else front  # no collective knows float8
    size = _size(group_name)
    done = _functional.wait_tensor(_functional.all_gather_into_tensor(wire, size, group_name))
    whole: Tensor = done.view(front.dtype).view(size * front.shape[0], *front.shape[1:])
    return whole


def _scattered(tensor: Tensor, reduce_op: str, dim: int, group_name: str) -> Tensor:
    """Returns this rank's part, along `dim`, of the sum or mean of the ranks' tensors."""
    size, shape = _size(group_name), tensor.shape
    parts = tensor.reshape(*shape[:dim], size, shape[dim] // size, *shape[dim + 1 :])
    parts = parts.movedim(dim, 0).contiguous()
    wire = parts.view(torch.uint8) if _narrow_float(parts) else parts
    each = [1] * size
    done = _functional.wait_tensor(_functional.all_to_all_single(wire, each, each, group_name))
    theirs: Tensor = done.view(parts.dtype)
    if theirs.is_floating_point() and theirs.dtype.itemsize < 4:
        theirs = theirs.float()
    total = theirs.sum(0, dtype=theirs.dtype) if reduce_op == "sum" else theirs.mean(0)
    return total.to(tensor.dtype)


# --- argument checks: the same result on all ranks, before anything is sent ---------------------------------


def _check(good: bool, message: str, hint: str = "") -> None:
    if not good:
        raise InvalidArgumentError(message, hint=hint)


def _check_dim(name: str, dim: int, count: int) -> None:
    _check(0 <= dim < count, f"{name}={dim} of a tensor of {count} dimensions")


def _check_reduction(reduce_op: str, shape: Sequence[int], dim: int, group_name: str) -> None:
    _check(reduce_op in ("sum", "avg"), f"reduce_op={reduce_op!r} is neither sum nor avg")
    size = _size(group_name)
    _check(
        shape[dim] % size == 0,
        f"the product is {list(shape)}: {shape[dim]} rows of dimension {dim} are not {size} equal parts",
    )


def _check_factors(a: Tensor, matrices: Sequence[Tensor]) -> None:
    _check(a.dim() >= 2, f"A is {list(a.shape)}: it has to have two dimensions or more")
    for b in matrices:
        _check(b.dim() == 2, f"B is {list(b.shape)}: it has to be a matrix")


def _check_result_scale(scale: Tensor | None) -> None:
    if scale is not None:
        raise UnsupportedError(
            "torch's float8 product of CPU tensors ignores result_scale",
            hint="pass None, and multiply the result",
        )


# --- products ------------------------------------------------------------------------------------------


def _all_gather_matmul(
    a: Tensor,
    matrices: list[Tensor],
    gather_dim: int,
    group_name: str,
    *,
    return_A: bool = True,  # noqa: N803 - torch passes it by this name
) -> tuple[Tensor | None, list[Tensor]]:
    _check_factors(a, matrices)
    _check_dim("gather_dim", gather_dim, a.dim())
    front = _gathered(a, gather_dim, group_name)
    if gather_dim == a.dim() - 1:
        whole = front.movedim(0, -1).contiguous()
        results = [whole @ b for b in matrices]
    else:
        whole = front.movedim(0, gather_dim)
        results = [(front @ b).movedim(0, gather_dim) for b in matrices]
    return (whole if return_A else None), results


def _all_gather_scaled_matmul(
    a: Tensor,
    matrices: list[Tensor],
    a_scale: Tensor,
    scales: list[Tensor],
    gather_dim: int,
    group_name: str,
    biases: list[Tensor | None],
    result_scales: list[Tensor | None],
    out_dtypes: list[Any],
    use_fast_accum: list[bool],
) -> tuple[Tensor, list[Tensor]]:
    _check_factors(a, matrices)
    _check_dim("gather_dim", gather_dim, a.dim())
    lists: dict[str, Sequence[object]] = {
        "B_scales": scales,
        "biases": biases,
        "result_scales": result_scales,
        "out_dtypes": out_dtypes,
        "use_fast_accum": use_fast_accum,
    }
    for name, values in lists.items():
        _check(len(values) == len(matrices), f"{len(matrices)} matrices in Bs, {len(values)} in {name}")
    for scale in result_scales:
        _check_result_scale(scale)
    dtypes = compat.dtypes_of_scalar_types(out_dtypes)
    last = gather_dim == a.dim() - 1
    whole_rows = list(a.shape[:-1])
    if not last:
        whole_rows[gather_dim] *= _size(group_name)
    sharded = a_scale.dim() == a.dim() and a_scale.shape == (*a.shape[:-1], 1)
    replicated = a_scale.dim() == a.dim() and a_scale.shape == (*whole_rows, 1)
    _check(
        a_scale.numel() == 1 or (not last and (sharded or replicated)),
        f"A_scale is {list(a_scale.shape)} for an A of {list(a.shape)} that is gathered along {gather_dim}",
        "pass one number, or one a row, of this rank's rows or of all; along the last dimension one number",
    )

    front = _gathered(a, gather_dim, group_name)
    rows = front.movedim(0, -1).contiguous() if last else front
    scale = a_scale
    if sharded and not last:  # also when the shape could mean both, as in torch
        scale = _gathered(a_scale, gather_dim, group_name).flatten(0, -2)
    elif replicated and not last:
        scale = a_scale.movedim(gather_dim, 0).flatten(0, -2).contiguous()
    flat = rows.flatten(0, -2)
    results = []
    for b, b_scale, bias, dtype, fast in zip(matrices, scales, biases, dtypes, use_fast_accum, strict=True):
        product = compat.scaled_mm(flat, b, scale, b_scale, bias, out_dtype=dtype, use_fast_accum=fast)
        product = product.view(*rows.shape[:-1], -1)
        results.append(product if last else product.movedim(0, gather_dim))
    return (rows if last else rows.movedim(0, gather_dim)), results


def _matmul_reduce_scatter(a: Tensor, b: Tensor, reduce_op: str, scatter_dim: int, group_name: str) -> Tensor:
    _check_factors(a, [b])
    _check_dim("scatter_dim", scatter_dim, a.dim())
    _check_reduction(reduce_op, (*a.shape[:-1], b.shape[1]), scatter_dim, group_name)
    return _scattered(a @ b, reduce_op, scatter_dim, group_name)


def _scaled_matmul_reduce_scatter(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    reduce_op: str,
    orig_scatter_dim: int,
    scatter_dim_after_maybe_reshape: int,
    group_name: str,
    output_shape: list[int] | None,
    bias: Tensor | None = None,
    result_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    _check_factors(a, [b])
    shape = [*(a.shape if output_shape is None else output_shape)[:-1], b.shape[1]]
    _check_dim("scatter_dim_after_maybe_reshape", scatter_dim_after_maybe_reshape, a.dim())
    _check_dim("orig_scatter_dim", orig_scatter_dim, len(shape))
    _check(
        math.prod(shape[:-1]) == math.prod(a.shape[:-1]),
        f"output_shape {output_shape} has other rows than A, {list(a.shape)}",
    )
    _check_reduction(reduce_op, shape, orig_scatter_dim, group_name)
    _check(
        a_scale.numel() == 1 or a_scale.shape == (*a.shape[:-1], 1),
        f"A_scale is {list(a_scale.shape)} for an A of {list(a.shape)}",
        "pass one number, or one for each row of A",
    )
    _check_result_scale(result_scale)
    scale = a_scale if a_scale.numel() == 1 else a_scale.flatten(0, -2).contiguous()
    product = compat.scaled_mm(
        a.flatten(0, -2).contiguous(),
        b,
        scale,
        b_scale,
        bias,
        out_dtype=out_dtype,
        use_fast_accum=use_fast_accum,
    )
    return _scattered(product.view(shape), reduce_op, orig_scatter_dim, group_name)


# --- collectives ------------------------------------------------------------------------------------------


def _all_gather(tensor: Tensor, group_name: str) -> Tensor:
    return _gathered(tensor.reshape(1) if tensor.dim() == 0 else tensor, 0, group_name)


def _reduce_scatter(tensor: Tensor, reduce_op: str, group_name: str) -> Tensor:
    _check_dim("the first dimension", 0, tensor.dim())
    _check_reduction(reduce_op, tensor.shape, 0, group_name)
    return _scattered(tensor, reduce_op, 0, group_name)


def _all_gather_to_all_out(tensor: Tensor, group_name: str, out: Tensor) -> Tensor:
    shape = (tensor.shape[0] if tensor.dim() else 1) * _size(group_name), *tensor.shape[1:]
    _check(
        out.shape == shape and out.dtype == tensor.dtype and out.is_contiguous(),
        f"out is {out.dtype} {list(out.shape)}: it has to be contiguous {tensor.dtype} {list(shape)}",
    )
    handle = symm_mem.rendezvous(out, group_name)
    _check(
        handle is not None, "out is not in symmetric memory", 'take it from symm_mem.empty(..., device="cpu")'
    )
    handle.barrier(_BARRIERS)
    torch.ops.symm_mem.memcpy_to_multicast_(out, tensor.contiguous(), handle.rank * tensor.nbytes, group_name)
    handle.barrier(_BARRIERS)
    return out


def _all_gather_to_all(tensor: Tensor, group_name: str) -> Tensor:
    rows = (tensor.shape[0] if tensor.dim() else 1) * _size(group_name)
    out = symm_mem.empty([rows, *tensor.shape[1:]], dtype=tensor.dtype, device=torch.device("cpu"))
    return _all_gather_to_all_out(tensor, group_name, out)


_GROUP = "by the group's collectives"
_NO_MULTICAST = "in shared memory, without multicast"
KERNELS = {
    "get_remote_tensors": PythonKernel(compat.get_remote_tensors(), "in shared memory"),
    "fused_all_gather_matmul": PythonKernel(_all_gather_matmul, _GROUP),
    "fused_all_gather_scaled_matmul": PythonKernel(_all_gather_scaled_matmul, _GROUP),
    "fused_matmul_reduce_scatter": PythonKernel(_matmul_reduce_scatter, _GROUP),
    "fused_scaled_matmul_reduce_scatter": PythonKernel(_scaled_matmul_reduce_scatter, _GROUP),
    "_low_contention_all_gather": PythonKernel(_all_gather, _GROUP),
    "_low_contention_reduce_scatter": PythonKernel(_reduce_scatter, _GROUP),
    "_low_contention_all_gather_ce_multicast": PythonKernel(_all_gather_to_all, _NO_MULTICAST),
    "_low_contention_all_gather_ce_multicast_out": PythonKernel(_all_gather_to_all_out, _NO_MULTICAST),
}
