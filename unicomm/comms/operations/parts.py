"""Tensors as flat bytes, whole or cut into one part for each rank."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor's memory as a flat uint8 tensor."""
    flat = tensor.detach().reshape(-1)
    if flat.stride(0) != 1:  # the stride of one element means nothing, but `view` requires 1
        flat = flat.as_strided(flat.shape, (1,))
    return flat if flat.dtype == torch.uint8 else flat.view(torch.uint8)


def copy_memory(to: torch.Tensor, source: torch.Tensor) -> None:
    """Copies a contiguous tensor to another one of the same size, unless both are the same memory.

    CPU tensors of one dtype are copied by the calling thread alone. torch's `copy_` uses OpenMP threads from
    32 768 elements on, which may be single bytes. These threads compete with other ranks that poll on the
    same cores: a copy of 64 KiB then took 10 ms.
    """
    if to.data_ptr() == source.data_ptr():
        return
    if to.is_cpu and source.is_cpu and to.dtype == source.dtype:
        ctypes.memmove(to.data_ptr(), source.data_ptr(), to.nbytes)
    else:
        write(to, source)


def write(to: torch.Tensor, source: torch.Tensor) -> None:
    """Copies values, without autograd.

    A result that was made for inference may only be written in that mode, in which the thread of an operation
    is not. For other tensors the mode is not left either: that would turn autograd on.
    """
    with torch.inference_mode() if to.is_inference() else torch.no_grad():
        to.copy_(source)


def byte_splits(rows: list[int], nbytes: int) -> list[int]:
    """Returns the sizes in bytes of parts that are given in rows of a tensor of `nbytes`."""
    total = sum(rows)
    width = nbytes // total if total else 0
    return [n * width for n in rows]


def parts_of(tensors: Sequence[torch.Tensor], splits: list[int] | None, size: int) -> list[torch.Tensor]:
    """Returns one flat byte tensor per rank.

    The parts come from a list, or from one tensor that is cut by rows or into equal parts.
    """
    if len(tensors) != 1 or (size == 1 and splits is None):
        return [bytes_of(t) for t in tensors]
    flat = bytes_of(tensors[0])
    equal = [flat.numel() // size] * size
    return list(torch.split(flat, equal if splits is None else byte_splits(splits, flat.numel())))
