"""Checksums of what an operation reads and writes: in its record, and compared where results must be alike.

The hint `checksum` asks for them (docs/design/checksums.md). The checksums of a collective whose outputs have
the same bits on all ranks (`Operation.alike`) are gathered when it is over, and a rank with other bits is
named on all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from unicomm import _core
from unicomm.comms.errors import SilentCorruptionError
from unicomm.comms.execution.issued import IssuedOperation
from unicomm.comms.failures.faults import minority, rank_list
from unicomm.comms.operations import recording
from unicomm.comms.operations.call import Call
from unicomm.comms.operations.table import OPERATIONS

from . import completion

_PLACE = 256  # bytes of a rank's file:line, of which the end is kept
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Checksums:
    """The checksums of one communicator's operations. One thread at a time calls `run`."""

    def __init__(self, group: completion.Group, recorder: Any) -> None:
        self._group = group
        self._recorder = recorder
        self._mine = np.zeros(1, np.uint64)
        self._of_all = np.zeros(group.size, np.uint64)
        buffers = (self._mine, self._of_all)
        self._mine_bytes, self._all_bytes = (torch.from_numpy(buffer.view(np.uint8)) for buffer in buffers)

    def run(self, op: IssuedOperation) -> None:
        """Runs an operation that blocks the host, with its checksums. Raises what it raises.

        Raises `SilentCorruptionError` on all ranks if their results differ and have to be alike.
        """
        self.note_inputs(op)
        assert op.run is not None
        op.run()
        sums = self.note_outputs(op)
        call = op.calls[0]
        if call.operation.alike and self._group.size > 1:
            self._compare(op, call, sums[0])

    def note_inputs(self, op: IssuedOperation) -> None:
        """Records the checksums of what an operation is about to read."""
        for call, record in zip(op.calls, op.records, strict=True):
            only_root = call.operation.read_at_root
            if call.inputs and not (only_root and call.root != self._group.rank):
                read = call.inputs if call.contributions is None else [call.contributions]
                self._recorder.add_checksum(record, recording.INPUT_CHECKSUM, of(read))

    def note_outputs(self, op: IssuedOperation) -> list[int]:
        """Records the checksums of what an operation has written. Returns them, 0 where it wrote nothing."""
        sums = []
        for call, record in zip(op.calls, op.records, strict=True):
            only_root = call.operation.written_at_root
            wrote = bool(call.outputs) and not (only_root and call.root != self._group.rank)
            sums.append(of(call.outputs) if wrote else 0)
            if wrote:
                self._recorder.add_checksum(record, recording.OUTPUT_CHECKSUM, sums[-1])
        return sums

    def _compare(self, op: IssuedOperation, call: Call, mine: int) -> None:
        """Compares this rank's checksum of the results with the other ranks'."""
        everyone = self._gather(call, mine)
        alike = everyone.count(mine) == len(everyone)
        if not alike and call.op is not None and _may_have_nan(call):
            # Which NaN a sum gives is not defined, and may depend on the processor.
            everyone = self._gather(call, of([_with_one_nan(t) for t in call.outputs]))
            if len(set(everyone)) == 1:
                return
        self._recorder.add_flags(op.records[0], recording.COMPARED)
        if not alike:
            self._blame(op, call, everyone)

    def _gather(self, call: Call, mine: int) -> list[int]:
        self._mine[0] = mine
        self._exchange(call, self._mine_bytes, self._all_bytes)
        sums: list[int] = self._of_all.tolist()
        return sums

    def _exchange(self, call: Call, mine: torch.Tensor, everyone: torch.Tensor) -> None:
        """Gathers some bytes of each rank within the time that is left to the operation."""
        row, byte, left = OPERATIONS["all_gather_single"], torch.uint8, call.remaining()
        small = Call(row, [mine], [everyone], byte, timeout=left)
        small.count, small.deadline = mine.numel(), call.deadline
        completion.collective(self._group, small)

    def _blame(self, op: IssuedOperation, call: Call, sums: list[int]) -> NoReturn:
        size = self._group.size
        text = self._recorder.place(op.records[0]).encode()[-_PLACE:]
        mine = torch.frombuffer(bytearray(text.ljust(_PLACE, b"\0")), dtype=torch.uint8)
        everyone = torch.empty(size * _PLACE, dtype=torch.uint8, device="cpu")
        self._exchange(call, mine, everyone)
        places = [
            bytes(part.numpy()).rstrip(b"\0").decode("utf-8", "replace") for part in everyone.chunk(size)
        ]
        raise corruption(sums, places)


def corruption(sums: Sequence[int], places: Sequence[str]) -> SilentCorruptionError:
    """The error for results that have to be alike: every rank's checksum, and its line ("" if unknown)."""
    culprits = minority(sums)
    ranks: dict[int, list[int]] = defaultdict(list)
    for rank, value in enumerate(sums):
        ranks[value].append(rank)
    sides = sorted(ranks.items(), key=lambda side: (-len(side[1]), side[1]))
    told = "; ".join(f"{rank_list(who)}: checksum {value:016x}{_at(places[who[0]])}" for value, who in sides)
    text = f"the results of the ranks differ, which have to have the same bits; {told}"
    if len(culprits) < len(sums):
        which = f"check the memory and the network of the host of {rank_list(culprits)}"
    else:
        text += "; there is no majority, so any of these ranks may be the one with wrong bits"
        which = "repeat the step with more ranks to see which one is wrong, or check the hosts of all"
    hint = f"do not use this result: go back to the last checkpoint, and {which}"
    return SilentCorruptionError(text, culprits=culprits, hint=hint)


def of(tensors: Sequence[torch.Tensor]) -> int:
    """The checksum of tensors on the CPU, in their order. Those that are not contiguous count in the order of
    their elements."""
    if all(t.is_contiguous() for t in tensors):
        return _core.checksum(tensors)
    return _core.checksum([t.detach().contiguous() for t in tensors])


def _at(place: str) -> str:
    return f" at {place}" if place else ""


def _may_have_nan(call: Call) -> bool:
    return call.dtype is not None and (call.dtype.is_floating_point or call.dtype.is_complex)


def _with_one_nan(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the tensor's bits in which all NaNs are alike."""
    numbers = tensor.detach().contiguous()
    if numbers.is_complex():
        numbers = torch.view_as_real(numbers)
    bits = numbers.view(_WORDS[numbers.element_size()]).clone()
    wide = numbers if numbers.element_size() > 1 else numbers.to(torch.float32)
    bits[wide.isnan()] = torch.iinfo(bits.dtype).max
    return bits
