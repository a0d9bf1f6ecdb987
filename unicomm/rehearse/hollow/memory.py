"""Which tensors are hollow, how they are allocated, and the values that are made up for small results.

A hollow tensor is an ordinary CPU tensor whose storage has at least `least` bytes. The storage is address
space that the kernel has reserved; its pages do not exist until something touches them, which nothing does.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

#: Bytes from which a storage is hollow. Smaller tensors are computed.
LEAST = 1 << 16
_M_MMAP_THRESHOLD = -3
PLAIN: Collection[type] = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})

_least = sys.maxsize
_least_before = sys.maxsize  # while `computed` is entered


def set_least(least: int | None) -> None:
    """Has storages of `least` or more bytes be hollow in this process, none if it is None."""
    global _least
    _least = sys.maxsize if least is None else least
    if least is None:
        return
    # glibc else takes memory of up to 32 MiB from its heap, where touched pages are used again. Without glibc
    # only some more pages are touched.
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, max(least, LEAST))


@contextmanager
def computed() -> Iterator[None]:
    """Has all tensors be computed while it is entered."""
    global _least, _least_before
    if _least == sys.maxsize:
        yield
        return
    _least_before, _least = _least, sys.maxsize
    try:
        yield
    finally:
        _least, _least_before = _least_before, sys.maxsize


def was_hollow(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is hollow, or was made so before `computed` was entered."""
    return _is_hollow(tensor, min(_least, _least_before))


def is_hollow(tensor: torch.Tensor) -> bool:
    """Returns whether the values of a tensor are not computed."""
    return _is_hollow(tensor, _least)


def _is_hollow(tensor: torch.Tensor, least: int) -> bool:
    if tensor.numel() * tensor.element_size() >= least:  # FSDP2 frees storages of tensors that live on
        return tensor.device.type == "cpu" and tensor.__class__ in PLAIN
    if tensor.device.type != "cpu" or tensor.__class__ not in PLAIN or tensor.layout is not torch.strided:
        return False
    return tensor.untyped_storage().nbytes() >= least


def is_large(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> bool:
    """Returns whether a tensor that is to be allocated would be hollow."""
    last = 1
    for n, step in zip(size, stride, strict=True):
        if not n:
            return False
        last += (n - 1) * step
    return last * dtype.itemsize >= _least


def reserve(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns a tensor whose memory nobody has touched."""
    try:
        return torch.empty_strided(size, stride, dtype=dtype)
    except RuntimeError:
        # The kernel refuses a single allocation that is larger than its memory, unless nothing is promised.
        last = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        flat = torch.frombuffer(mmap.mmap(-1, last * dtype.itemsize, flags=flags), dtype=dtype)
        return flat.as_strided(size, stride)


def make_up(tensor: torch.Tensor, truth: bool = False) -> torch.Tensor:
    """Fills a small tensor with values of which programs can compute logarithms, quotients and indices.

    Floats become positive: 1 if there is one element, else different numbers from 1/128 to 1/64, so that
    products of small matrices neither overflow nor vanish at once. Integers become 0, a single one 1.
    Booleans become `truth`.
    """
    n = tensor.numel()
    if tensor.dtype == torch.bool:
        return tensor.fill_(truth)
    if n == 1:
        return tensor.fill_(1)
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.zero_()
    # Steps by the golden ratio spread evenly, and neighbours differ.
    spread = torch.arange(n, dtype=torch.float32).mul_(0.618034).frac_().add_(1).mul_(1 / 128)
    return tensor.copy_(spread.view(tensor.shape))
