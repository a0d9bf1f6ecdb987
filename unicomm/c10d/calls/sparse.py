"""The sum of all ranks' sparse tensors, as DistributedDataParallel needs it for sparse gradients."""

from __future__ import annotations

from typing import Any

import torch

from unicomm.comms.communicator import Communicator
from unicomm.comms.errors import MismatchError, UnsupportedError
from unicomm.comms.failures.faults import minority
from unicomm.comms.operations.reduction import ReduceOp

Tensor = torch.Tensor


def all_reduce_sparse(comm: Communicator, tensor: Tensor, op: ReduceOp, timeout: Any) -> None:
    """Makes `tensor`, of layout sparse_coo, the coalesced sum of all ranks' tensors. Called by all ranks.

    Returns when it is done. Gathers all indices and values, whose number may differ between ranks. Raises
    `UnsupportedError` for reductions other than SUM and other sparse layouts, and `MismatchError` if the
    ranks' tensors have different shapes.
    """
    if op != ReduceOp.SUM or tensor.layout != torch.sparse_coo:
        raise UnsupportedError(
            f"no all_reduce by {op} of tensors of layout {tensor.layout}",
            op="all_reduce",
            comm=comm.get_name(),
            rank=comm.get_rank(),
            hint="sparse tensors are reduced by SUM and in layout sparse_coo; else call to_dense() first",
        )
    size, device = comm.get_size(), tensor.device
    mine = tensor.detach().coalesce()
    indices, values = mine.indices(), mine.values().contiguous()
    header = torch.tensor([indices.shape[1], mine.sparse_dim(), *mine.shape], device=device)
    headers = torch.empty((size, len(header)), dtype=header.dtype, device=device)
    comm.all_gather_single(headers, header, async_op=False, timeout=timeout)
    shapes = [tuple(row[1:]) for row in headers.tolist()]
    if len(set(shapes)) > 1:
        raise MismatchError(
            "sparse tensors of different shapes: "
            + ", ".join(f"rank {r} {list(shape[1:])}" for r, shape in enumerate(shapes)),
            op="all_reduce",
            comm=comm.get_name(),
            rank=comm.get_rank(),
            culprits=minority(shapes),
            hint="all ranks pass tensors of one shape with the same sparse dimensions",
        )
    counts = headers[:, 0].tolist()
    all_indices = [indices.new_empty((n, indices.shape[0])) for n in counts]
    all_values = [values.new_empty((n, *values.shape[1:])) for n in counts]
    comm.all_gather_v(all_indices, indices.t().contiguous(), async_op=False, timeout=timeout)
    comm.all_gather_v(all_values, values, async_op=False, timeout=timeout)
    total = torch.sparse_coo_tensor(
        torch.cat(all_indices).t(), torch.cat(all_values), mine.shape, check_invariants=False
    )
    with torch.no_grad():
        tensor.copy_(total.coalesce())
