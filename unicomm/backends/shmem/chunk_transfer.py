"""Bytes between the ranks of a communicator: chunks are put into the receiver's memory, each with a signal.

A pair of ranks has slots in the receiver's region. The sender puts a chunk into the next slot, and the same
call adds one to the receiver's word. The receiver's stream waits for that, copies the chunk to its
destination and adds one to the sender's word. The sender waits for that before it uses the slot again. The
host does not wait if the library's calls do not.

All ranks put their first chunks before they wait for any, and take the chunks of a round before they put
chunks that need the same slots. So no circle of waiting ranks arises, whatever the sizes are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from unicomm.comms.operations.symmetric_table import Compare, SignalOp

from .heap import Heap, Region

SLOTS = 2  # of a pair: one is filled while the other is emptied
_LINE = 128
_LONG = 1e9  # seconds; the fault watch and the stream watchdog end waits that take too long

Chunk = tuple[int, int]  # address, bytes


def least_staging(size: int) -> int:
    """Returns the minimum of bytes that a region of `size` ranks needs for chunks."""
    return (SLOTS * size + 1) * _LINE


class ChunkTransfer:
    """Moves the bytes of one communicator.

    `pes` are the members' numbers in the heap. `check` raises the error of a fault that the table returned.
    """

    def __init__(
        self, heap: Heap, region: Region, rank: int, pes: Sequence[int], check: Callable[[Any], None]
    ) -> None:
        self._domain, self._region, self._check = heap.domain, region, check
        self._rank, self._size = rank, len(pes)
        self._pe, self._pes = heap.pe, pes
        # The slots of each rank, and one slot for chunks that other ranks cannot read at their own place.
        self._chunk_bytes = region.nbytes // (SLOTS * self._size + 1) // _LINE * _LINE
        self._own_slot = region.staging + SLOTS * self._size * self._chunk_bytes
        self._addressable = [heap.can_address(region, pe) for pe in pes]

    # --- several ranks, each with its bytes --------------------------------------------------------------

    def move(
        self,
        outgoing: Mapping[int, Sequence[torch.Tensor]],
        incoming: Mapping[int, Sequence[torch.Tensor]],
        stream: int,
    ) -> None:
        """Puts on the stream the transfer of tensors to and from other ranks, by rank and in order.

        A message has the same size at its two ends. The order of the ranks is staggered, so that not all
        ranks send to the same one at once.
        """
        steps = range(1, self._size)
        puts = [(r, self._chunks_of(outgoing[r])) for r in self._ranks_at(steps, 1) if r in outgoing]
        gets = [(r, self._chunks_of(incoming[r])) for r in self._ranks_at(steps, -1) if r in incoming]
        while puts or gets:
            puts = [(r, chunks) for r, chunks in puts if self._advance(self._put, r, chunks, stream)]
            gets = [(r, chunks) for r, chunks in gets if self._advance(self._get, r, chunks, stream)]

    def _ranks_at(self, steps: Sequence[int], direction: int) -> list[int]:
        return [(self._rank + direction * step) % self._size for step in steps]

    @staticmethod
    def _advance(
        act: Callable[[int, Chunk, int], None], rank: int, chunks: Iterator[Chunk], stream: int
    ) -> bool:
        """Transfers the next chunk. Returns whether there was one."""
        chunk = next(chunks, None)
        if chunk is not None:
            act(rank, chunk, stream)
        return chunk is not None

    def _chunks_of(self, tensors: Sequence[torch.Tensor]) -> Iterator[Chunk]:
        """Yields the chunks of messages. An empty message has one chunk, for its signal."""
        for tensor in tensors:
            at, left = tensor.data_ptr(), tensor.nbytes
            while True:
                size = min(left, self._chunk_bytes)
                yield at, size
                at, left = at + size, left - size
                if not left:
                    break

    # --- one chunk ---------------------------------------------------------------------------------------

    def _put(self, rank: int, chunk: Chunk, stream: int) -> None:
        region, pe = self._region, self._pes[rank]
        at, nbytes = chunk
        count = region.sent[pe]
        region.sent[pe] = count + 1
        if count >= SLOTS:
            self._await(region.taken_word(pe), count - SLOTS + 1, rank, stream)
        if nbytes and not self._addressable[rank]:
            self._check(self._domain.put(self._own_slot, at, nbytes, self._pe, stream))
            self._check(self._domain.quiet(stream))  # completes the put, which is needed in own memory too
            at = self._own_slot
        slot = self._slot(self._rank, count)
        word = region.arrived_word(self._pe)
        self._check(self._domain.put_signal(slot, at, nbytes, word, 1, int(SignalOp.ADD), pe, stream))

    def _get(self, rank: int, chunk: Chunk, stream: int) -> None:
        region, pe = self._region, self._pes[rank]
        at, nbytes = chunk
        count = region.received[pe]
        region.received[pe] = count + 1
        self._await(region.arrived_word(pe), count + 1, rank, stream)
        if nbytes:
            self._check(self._domain.get(at, self._slot(rank, count), nbytes, self._pe, stream))
        self._signal(region.taken_word(self._pe), pe, stream)

    def _slot(self, sender: int, count: int) -> int:
        return self._region.staging + (sender * SLOTS + count % SLOTS) * self._chunk_bytes

    def _await(self, word: int, count: int, rank: int, stream: int) -> None:
        compare = int(Compare.GE)
        self._check(self._domain.wait_signal(word, compare, count, self._pes[rank], _LONG, stream))

    def _signal(self, word: int, pe: int, stream: int) -> None:
        self._check(self._domain.put_signal(word, word, 0, word, 1, int(SignalOp.ADD), pe, stream))

    # --- all ranks together ------------------------------------------------------------------------------

    def broadcast(self, tensor: torch.Tensor, root: int, stream: int) -> None:
        """Sends the root's tensor down a binomial tree, chunk by chunk. So all levels are busy at once."""
        place = (self._rank - root) % self._size
        reach = 1
        while reach <= place:
            reach *= 2
        parent = (self._rank - reach // 2) % self._size
        children = []
        while place + reach < self._size:
            children.append((self._rank + reach) % self._size)
            reach *= 2
        for chunk in self._chunks_of([tensor]):
            if place:
                self._get(parent, chunk, stream)
            for rank in children:
                self._put(rank, chunk, stream)

    def barrier(self, stream: int) -> None:
        """Runs a dissemination barrier: in each round a rank signals another one, at twice the distance."""
        region, reach = self._region, 1
        while reach < self._size:
            to, source = self._ranks_at([reach], 1)[0], self._ranks_at([reach], -1)[0]
            to_pe, source_pe = self._pes[to], self._pes[source]
            region.signalled[to_pe] += 1
            self._signal(region.barrier_word(self._pe), to_pe, stream)
            region.awaited[source_pe] += 1
            self._await(region.barrier_word(source_pe), region.awaited[source_pe], source, stream)
            reach *= 2
