"""A SHMEM library's memory in this process: one symmetric heap, allocated at creation and never later.

SHMEM libraries have one world per process, and all of it takes part in an allocation. So the first
communicator allocates enough for the communicators that are split from it: the heap has a region for each.
The members of a new communicator agree on a region; other ranks need not call. A rank can be in as many
communicators as there are regions.

A region has three words for each PE, and staging memory for chunks. The words count the chunks that came from
that PE, the chunks of this PE that it has taken, and its signals in barriers. They only grow, also from one
communicator to the next in a region, and each end keeps the counts that the other end will reach. So nothing
has to be cleared, and late signals for a communicator that has ended are not mistaken for new ones.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from unicomm.comms.backend import Setup, SetupRendezvous
from unicomm.comms.errors import BackendError, CommError, UnsupportedError
from unicomm.comms.operations.symmetric_table import Capability
from unicomm.comms.streams import Streams

_PAGE = 4096
_WORD = 8
_DRAIN_SECONDS = 5.0  # time in which the stream of a communicator that begins or ends must become empty
_CURE = "see the library's own output; docs/shmem.md lists its requirements"
RELEASED = 1 << 62  # value of a rank's words that ends all its waits


def _pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


def current_stream(streams: Streams | None) -> int:
    """Returns the native pointer of the current stream; 0 on the host."""
    return 0 if streams is None else streams.handle(streams.current())


def drain(streams: Streams | None) -> bool:
    """Waits until the current stream has completed its work. Returns whether it did in time."""
    if streams is None:
        return True
    event = streams.record(streams.current())
    end = time.monotonic() + _DRAIN_SECONDS
    while not streams.is_over(event):
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


@dataclass
class Region:
    """One communicator's part of the heap, at the same offset on all PEs. Addresses are this PE's.

    Attributes:
        words: address of the words. staging: address of the memory for chunks. nbytes: size of the latter.
        sent, received: number of chunks to and from each PE.
        signalled, awaited: number of barrier signals to and from each PE.
    """

    number: int
    words: int
    staging: int
    nbytes: int
    pes: int
    sent: Counter[int] = field(default_factory=Counter)
    received: Counter[int] = field(default_factory=Counter)
    signalled: Counter[int] = field(default_factory=Counter)
    awaited: Counter[int] = field(default_factory=Counter)

    def under_way(self, pes: Sequence[int]) -> tuple[int, int]:
        """Returns how many more chunks, and barrier signals, this PE sent to `pes` than it took of theirs."""
        return (
            sum(self.sent[pe] - self.received[pe] for pe in pes),
            sum(self.signalled[pe] - self.awaited[pe] for pe in pes),
        )

    def arrived_word(self, pe: int) -> int:
        """Returns the address of the word that counts the chunks which came from `pe`."""
        return self.words + _WORD * pe

    def taken_word(self, pe: int) -> int:
        """Returns the address of the word that counts the chunks which `pe` has taken."""
        return self.words + _WORD * (self.pes + pe)

    def barrier_word(self, pe: int) -> int:
        """Returns the address of the word that counts the barrier signals of `pe`."""
        return self.words + _WORD * (2 * self.pes + pe)


_kept: list[Heap] = []  # heaps that stay until the process ends


class Heap:
    """This process's end of the library's world. Communicators share it; the last one closes it.

    Attributes:
        domain: the end of the world, from the table. None after the end.
        nbytes: size of the heap.
        released_words: address of as many words as a region has, all of them RELEASED.
    """

    def __init__(self, domain: Any, capabilities: Capability, pe: int, pes: int) -> None:
        self.domain, self._capabilities = domain, capabilities
        self.pe, self.pes = pe, pes
        self.nbytes = 0
        self.regions: list[Region] = []
        self.released_words = 0
        self._free: set[int] = set()
        self._users = 0
        self._lock = threading.Lock()

    def can_address(self, region: Region, pe: int) -> bool:
        """Returns whether this process can address that PE's memory."""
        if Capability.POINTER not in self._capabilities:
            return False
        return self.domain.ptr(region.words, _WORD, pe)[0] is None

    @property
    def words_bytes(self) -> int:
        """Size of a region's words, in whole pages."""
        return _pages(3 * _WORD * self.pes)

    def allocate(
        self, regions: int, staging: int, device: torch.device, streams: Streams | None, timeout: float
    ) -> str:
        """Allocates the regions and clears their words on the current stream. Collective.

        Returns what failed, or "".
        """
        words, staging, stream = self.words_bytes, _pages(staging), current_stream(streams)
        self.nbytes = words + regions * (words + staging)
        fault, at = self.domain.allocate(self.nbytes, _PAGE, timeout)
        if fault is not None:
            return fault[3] or "not all ranks called it in time"
        self.released_words = at
        at += words
        clear = torch.zeros(words // _WORD, dtype=torch.int64, device=device)
        released = torch.full_like(clear, RELEASED)
        faults = [self.domain.put(self.released_words, released.data_ptr(), words, self.pe, stream)]
        for number in range(regions):
            self.regions.append(Region(number, at, at + words, staging, self.pes))
            faults.append(self.domain.put(at, clear.data_ptr(), words, self.pe, stream))
            at += words + staging
        self._free = set(range(regions))
        faults.append(self.domain.quiet(stream))
        if not drain(streams):
            return "the device is busy with other work"
        return next((fault[3] for fault in faults if fault is not None), "")

    def acquire_region(self, rendezvous: SetupRendezvous, pes: Sequence[int]) -> Region:
        """Returns a region that is free on all members of a new communicator, `pes`. All of them call it.

        A message that nobody has received would be taken for one of the new communicator, so regions in which
        members have such are left alone for good.
        """
        attempt = 0
        while True:
            with self._lock:
                free = sorted(self._free)
            answers = rendezvous.exchange(f"free regions {attempt}", json.dumps(free).encode())
            common = set.intersection(*(set(json.loads(text)) for text in answers))
            if not common:
                raise UnsupportedError(
                    f"no room for another communicator: this heap has {len(self.regions)} regions, and each "
                    "is in use on one of these ranks, or was given up after an error",
                    hint="finalize communicators that are not needed, or give the first one a larger hint "
                    "'communicators'",
                )
            chosen: int = min(common)
            with self._lock:  # another thread of this rank may have taken the region meanwhile
                own = chosen in self._free
                self._free.discard(chosen)
            region, free_again = self.regions[chosen], own
            try:
                mine = json.dumps([own, *region.under_way(pes)]).encode()
                told = [json.loads(text) for text in rendezvous.exchange(f"region {attempt}", mine)]
                if all(owned for owned, *_ in told):
                    free_again = False
                    # No pair has received more than was sent, so if the sums are equal all pairs are.
                    if not any(map(sum, zip(*(balance for _, *balance in told), strict=True))):
                        with self._lock:
                            self._users += 1
                        return region
            finally:
                if free_again:
                    self._free_region(chosen)
            attempt += 1

    def _free_region(self, number: int) -> None:
        with self._lock:
            self._free.add(number)

    def release_region(self, region: Region, clean: bool) -> None:
        """Called when a communicator ends; the last one ends this process's part in the world.

        If the end is not `clean`, other ranks may still write to the region and streams may wait for its
        words. Then the region stays unused, and the heap stays until the process ends.
        """
        if clean:
            self._free_region(region.number)
        else:
            _kept.append(self)
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if last and self not in _kept:
            self.domain.leave()
            self.domain = None


def join_world(table: Any, setup: Setup, title: str, heap_bytes: int) -> Heap:
    """Initialises the library for the ranks of `setup` and returns a heap without regions. Collective.

    `title` is the library's name in errors.
    """
    rendezvous = setup.rendezvous
    uid, trouble = b"", ""
    if rendezvous.rank == 0:
        fault, uid = table.unique_id(rendezvous.size, heap_bytes)
        trouble = "" if fault is None else fault[3]
    own = json.dumps([trouble, uid.hex()]).encode() if rendezvous.rank == 0 else None
    trouble, uid_text = json.loads(rendezvous.broadcast("symmetric heap", own))
    if trouble:
        raise BackendError(f"{title}: {trouble}", culprits=[rendezvous.labels[0]], hint=_CURE)
    timeout = max(0.1, 0.8 * rendezvous.remaining())
    fault, domain = table.init(bytes.fromhex(uid_text), rendezvous.rank, rendezvous.size, setup.name, timeout)
    heap = Heap(domain, Capability(table.capabilities), rendezvous.rank, rendezvous.size)
    trouble = "" if fault is None else fault[3] or "not all ranks called it in time"
    raise_if_any_failed(rendezvous, "symmetric heap made", trouble, title)
    return heap


def raise_if_any_failed(
    rendezvous: SetupRendezvous,
    step: str,
    trouble: str,
    title: str,
    error: type[CommError] = BackendError,
    hint: str = _CURE,
) -> None:
    """Raises `error` on all ranks if one of them passes a non-empty `trouble`. Collective."""
    troubles = [text.decode() for text in rendezvous.exchange(step, trouble.encode())]
    if bad := [r for r, text in enumerate(troubles) if text]:
        raise error(
            f"{title}: {troubles[bad[0]]} (on rank {rendezvous.labels[bad[0]]})",
            culprits=[rendezvous.labels[r] for r in bad],
            hint=hint,
        )
