"""Bytes between the ranks of a communicator: chunks are put into the receiver's room, each with a signal.

A pair has some slots in the receiver's region. The sender puts a chunk into the next one and adds one to the
receiver's word in the same call; the receiver's stream waits for that, copies the chunk to where it belongs
and adds one to the sender's word, which waits for it before it uses the slot again. The host waits for
nothing where the library's calls do not.

All ranks put their first chunks before they wait for any, and take the chunks of a round before they put
those that need the same slots: so nobody waits in a circle, whatever the sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from unicomm.comms.memory.symmetric import Compare, SignalOp

from .heap import Heap, Region

SLOTS = 2  # of a pair: one is filled while the other is emptied
_LINE = 128
_LONG = 1e9  # seconds: whoever watches ends what takes too long

Piece = tuple[int, int]  # address, bytes


def least_room(size: int) -> int:
    """Bytes that a region of so many ranks has to have."""
    return (SLOTS * size + 1) * _LINE


class Pipe:
    """`pes`: the communicator's members, as the heap numbers them. `check` raises the error of a fault."""

    def __init__(
        self, heap: Heap, region: Region, rank: int, pes: Sequence[int], check: Callable[[Any], None]
    ) -> None:
        self._domain, self._region, self._check = heap.domain, region, check
        self._rank, self._size = rank, len(pes)
        self._pe, self._pes = heap.pe, pes
        # Slots of each rank, and one where this rank stages what others cannot read where it lies.
        self.chunk = region.nbytes // (SLOTS * self._size + 1) // _LINE * _LINE
        self._stage = region.room + SLOTS * self._size * self.chunk
        self._direct = [heap.addresses(region, pe) for pe in pes]

    # --- several ranks, each with its bytes --------------------------------------------------------------

    def move(
        self,
        outgoing: Mapping[int, Sequence[torch.Tensor]],
        incoming: Mapping[int, Sequence[torch.Tensor]],
        stream: int,
    ) -> None:
        """Puts on the stream: what goes to other ranks and what comes from them, by rank, in order.

        A message has the same size at its two ends. Staggered, so that not all talk to the same one at once.
        """
        ways = range(1, self._size)
        puts = [(r, self._chunks(outgoing[r])) for r in self._around(ways, 1) if r in outgoing]
        gets = [(r, self._chunks(incoming[r])) for r in self._around(ways, -1) if r in incoming]
        while puts or gets:
            puts = [(r, chunks) for r, chunks in puts if self._step(self.put, r, chunks, stream)]
            gets = [(r, chunks) for r, chunks in gets if self._step(self.get, r, chunks, stream)]

    def _around(self, steps: Sequence[int], direction: int) -> list[int]:
        return [(self._rank + direction * step) % self._size for step in steps]

    @staticmethod
    def _step(
        act: Callable[[int, Piece, int], None], rank: int, chunks: Iterator[Piece], stream: int
    ) -> bool:
        chunk = next(chunks, None)
        if chunk is not None:
            act(rank, chunk, stream)
        return chunk is not None

    def _chunks(self, tensors: Sequence[torch.Tensor]) -> Iterator[Piece]:
        for tensor in tensors:
            yield from self.chunks(tensor)

    def chunks(self, tensor: torch.Tensor) -> Iterator[Piece]:
        """A message's pieces; one without bytes has one, for its signal."""
        at, left = tensor.data_ptr(), tensor.nbytes
        while True:
            size = min(left, self.chunk)
            yield at, size
            at, left = at + size, left - size
            if not left:
                return

    # --- a chunk -----------------------------------------------------------------------------------------

    def put(self, rank: int, chunk: Piece, stream: int) -> None:
        region, pe = self._region, self._pes[rank]
        at, nbytes = chunk
        count = region.put[pe]
        region.put[pe] = count + 1
        if count >= SLOTS:
            self._await(region.taken(pe), count - SLOTS + 1, rank, stream)
        if nbytes and not self._direct[rank]:
            self._check(self._domain.put(self._stage, at, nbytes, self._pe, stream))
            self._check(self._domain.quiet(stream))  # not before need it be there, even in the own memory
            at = self._stage
        slot = self._slot(self._rank, count)
        word = region.data(self._pe)
        self._check(self._domain.put_signal(slot, at, nbytes, word, 1, int(SignalOp.ADD), pe, stream))

    def get(self, rank: int, chunk: Piece, stream: int) -> None:
        region, pe = self._region, self._pes[rank]
        at, nbytes = chunk
        count = region.got[pe]
        region.got[pe] = count + 1
        self._await(region.data(pe), count + 1, rank, stream)
        if nbytes:
            self._check(self._domain.get(at, self._slot(rank, count), nbytes, self._pe, stream))
        self._signal(region.taken(self._pe), pe, stream)

    def _slot(self, sender: int, count: int) -> int:
        return self._region.room + (sender * SLOTS + count % SLOTS) * self.chunk

    def _await(self, word: int, count: int, rank: int, stream: int) -> None:
        compare = int(Compare.GE)
        self._check(self._domain.wait_signal(word, compare, count, self._pes[rank], _LONG, stream))

    def _signal(self, word: int, pe: int, stream: int) -> None:
        self._check(self._domain.put_signal(word, word, 0, word, 1, int(SignalOp.ADD), pe, stream))

    # --- all ranks together --------------------------------------------------------------------------------

    def broadcast(self, tensor: torch.Tensor, root: int, stream: int) -> None:
        """Down a binomial tree, chunk by chunk: all levels of it move at the same time."""
        place = (self._rank - root) % self._size
        reach = 1
        while reach <= place:
            reach *= 2
        above = (self._rank - reach // 2) % self._size
        below = []
        while place + reach < self._size:
            below.append((self._rank + reach) % self._size)
            reach *= 2
        for chunk in self.chunks(tensor):
            if place:
                self.get(above, chunk, stream)
            for rank in below:
                self.put(rank, chunk, stream)

    def barrier(self, stream: int) -> None:
        """Rounds in which each rings at another one, twice as far away each time."""
        region, reach = self._region, 1
        while reach < self._size:
            to, source = self._around([reach], 1)[0], self._around([reach], -1)[0]
            region.rung[self._pes[to]] += 1
            self._signal(region.bell(self._pe), self._pes[to], stream)
            region.heard[self._pes[source]] += 1
            self._await(region.bell(self._pes[source]), region.heard[self._pes[source]], source, stream)
            reach *= 2
