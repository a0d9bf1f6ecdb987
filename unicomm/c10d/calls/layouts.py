"""Tensors that communicators refuse and torch's process groups take: other layouts in memory.

A communicator moves contiguous memory. A process group also takes tensors that fill their memory in another
order (channels_last, transposed): it moves a contiguous copy and writes the results back. The values are
right even if the ranks' tensors are laid out differently. A tensor with gaps in its memory stays an error:
torch's Gloo would write into the gaps.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from unicomm.c10d.process_group_work import ProcessGroupWork
from unicomm.comms.operations.parts import write

Tensor = torch.Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in an argument: a tensor, or lists of them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_in(part)


def is_permuted(tensor: Tensor) -> bool:
    """Whether the elements fill their memory without gaps, but not in their order."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return False
    step = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != step:
            return False
        step *= size
    return True


class Contiguous:
    """Contiguous copies of the permuted tensors among a collective's arguments.

    `arguments`: those of the call with the copies in place of the tensors. The first receives the results.
    """

    def __init__(self, arguments: Sequence[Any]) -> None:
        self._outputs: list[tuple[Tensor, Tensor]] = []
        self._lock = threading.Lock()
        self.arguments = [self._copied(value, at == 0) for at, value in enumerate(arguments)]

    def _copied(self, value: Any, written: bool) -> Any:
        if isinstance(value, (list, tuple)):
            return [self._copied(v, written) for v in value]
        if not isinstance(value, Tensor) or not is_permuted(value):
            return value
        copy = value.detach().contiguous()
        if written:
            self._outputs.append((value, copy))
        return copy

    def write_back(self) -> None:
        """Writes the results into the caller's tensors. Once; a second call waits for the first."""
        with self._lock:
            for tensor, copy in self._outputs:
                write(tensor, copy)
            self._outputs = []

    def attach(self, work: ProcessGroupWork, first: Any) -> None:
        """Has the results written back when `work` has succeeded. `first`: the caller's first argument."""
        if self._outputs:
            work.then_do(self.write_back, list(tensors_in(first)), first)
