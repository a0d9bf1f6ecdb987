"""A SHMEM library's memory in this process: one symmetric heap, allocated at creation, never later.

SHMEM libraries have one world a process, and only all of it allocates. So what the first communicator
allocates is enough for those that are split from it: the heap has a region for each. Which one a new
communicator gets, its members agree on; others need not come. A rank is in no more communicators than
there are regions.

A region has words for each PE, and room for chunks: how many chunks have come from that PE, how many of ours
it has taken, how often it has rung at barriers. These only grow, and each end counts what the other will have
done, also from one communicator to the next in a region. So nothing has to be cleared, and what a rank has
still to say of a communicator that has ended is not taken for something else.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from unicomm.comms.backend import SetupRendezvous
from unicomm.comms.errors import BackendError, CommError, UnsupportedError
from unicomm.comms.memory.symmetric import Capability

_PAGE = 4096
_WORD = 8
RELEASED = 1 << 62  # what a rank's words say when it waits no more


def _pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


@dataclass
class Region:
    """One communicator's part of the heap, at the same place on all PEs; addresses are this PE's.

    Attributes:
        data, taken, bells: where the words lie, one for each PE. room: where chunks do. nbytes: of the room.
        put, got, rung, heard: what this PE has done for each other one, and has waited for.
    """

    number: int
    words: int
    room: int
    nbytes: int
    pes: int
    put: list[int] = field(default_factory=list)
    got: list[int] = field(default_factory=list)
    rung: list[int] = field(default_factory=list)
    heard: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        for counts in (self.put, self.got, self.rung, self.heard):
            counts.extend([0] * self.pes)

    def data(self, pe: int) -> int:
        return self.words + _WORD * pe

    def taken(self, pe: int) -> int:
        return self.words + _WORD * (self.pes + pe)

    def bell(self, pe: int) -> int:
        return self.words + _WORD * (2 * self.pes + pe)


_kept: list[Heap] = []


class Heap:
    """This process's end of the library's world. Communicators share it; the last one closes it."""

    def __init__(self, domain: Any, capabilities: Capability, pe: int, pes: int) -> None:
        self.domain, self._capabilities = domain, capabilities
        self.pe, self.pes = pe, pes
        self.nbytes = 0
        self.regions: list[Region] = []
        self.high = 0  # as many words as a region has, all of them RELEASED
        self._free: set[int] = set()
        self._users = 0
        self._lock = threading.Lock()

    def addresses(self, region: Region, pe: int) -> bool:
        """Whether that PE's memory can be addressed here."""
        if Capability.POINTER not in self._capabilities:
            return False
        return self.domain.ptr(region.words, _WORD, pe)[0] is None

    @property
    def words_bytes(self) -> int:
        return _pages(3 * _WORD * self.pes)

    def fill(
        self,
        regions: int,
        room: int,
        device: torch.device,
        stream: int,
        emptied: Callable[[], bool],
        timeout: float,
    ) -> str:
        """Collective: allocates the regions and clears their words, on that stream. "" or what failed.

        `emptied` waits until the stream has done that.
        """
        words, room = self.words_bytes, _pages(room)
        self.nbytes = words + regions * (words + room)
        fault, at = self.domain.allocate(self.nbytes, _PAGE, timeout)
        if fault is not None:
            return fault[3] or "the ranks did not come to it in time"
        self.high = at
        at += words
        clear = torch.zeros(words // _WORD, dtype=torch.int64, device=device)
        high = torch.full_like(clear, RELEASED)
        faults = [self.domain.put(self.high, high.data_ptr(), words, self.pe, stream)]
        for number in range(regions):
            self.regions.append(Region(number, at, at + words, room, self.pes))
            faults.append(self.domain.put(at, clear.data_ptr(), words, self.pe, stream))
            at += words + room
        self._free = set(range(regions))
        faults.append(self.domain.quiet(stream))
        if not emptied():
            return "the device is busy with something else"
        return next((fault[3] for fault in faults if fault is not None), "")

    def take(self, rendezvous: SetupRendezvous) -> Region:
        """A region that none of the new communicator's members uses; called by all of them."""
        attempt = 0
        while True:
            with self._lock:
                free = sorted(self._free)
            told = rendezvous.exchange(f"free regions {attempt}", json.dumps(free).encode())
            common = set.intersection(*(set(json.loads(text)) for text in told))
            if not common:
                raise UnsupportedError(
                    f"no room for another communicator: this heap has {len(self.regions)} regions, and each "
                    "of them is in use on one of these ranks, or was given up after an error",
                    hint="finalize communicators that are not needed, or give the first one a larger hint "
                    "'communicators'",
                )
            chosen: int = min(common)
            with self._lock:  # another thread of this rank may be at the same
                mine = chosen in self._free
                self._free.discard(chosen)
            if all(said == b"y" for said in rendezvous.exchange(f"region {attempt}", b"y" if mine else b"n")):
                with self._lock:
                    self._users += 1
                return self.regions[chosen]
            if mine:
                self.give(chosen)
            attempt += 1

    def give(self, number: int) -> None:
        with self._lock:
            self._free.add(number)

    def leave(self, region: Region, clean: bool) -> None:
        """A communicator ends. Without `clean` others may still write to its region, and streams of the
        device may wait for its words: it stays unused, and the heap stays until the process ends.
        """
        if clean:
            self.give(region.number)
        else:
            _kept.append(self)
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if last and self not in _kept:
            self.domain.leave()
            self.domain = None


def make(
    table: Any,
    rendezvous: SetupRendezvous,
    title: str,
    name: str,
    heap_bytes: int,
    fill: Callable[[Heap], str],
) -> Heap:
    """Collective: initialises the library for the ranks of `rendezvous`, with a heap that `fill` fills."""
    uid, trouble = b"", ""
    if rendezvous.rank == 0:
        fault, uid = table.unique_id(rendezvous.size, heap_bytes)
        trouble = "" if fault is None else fault[3]
    told = json.loads(
        rendezvous.broadcast(
            "symmetric heap",
            json.dumps([trouble, uid.hex()]).encode() if rendezvous.rank == 0 else None,
        )
    )
    if told[0]:
        raise BackendError(f"{title}: {told[0]}", culprits=[rendezvous.labels[0]], hint=_CURE)
    fault, domain = table.init(
        bytes.fromhex(told[1]), rendezvous.rank, rendezvous.size, name, max(0.1, 0.8 * rendezvous.remaining())
    )
    heap = Heap(domain, Capability(table.capabilities), rendezvous.rank, rendezvous.size)
    trouble = "" if fault is None else fault[3] or "not all ranks came to it in time"
    all_good(rendezvous, "symmetric heap made", trouble, title)
    all_good(rendezvous, "symmetric heap filled", fill(heap), title)
    return heap


_CURE = "see what the library itself has written; docs/shmem.md has what it needs"


def all_good(
    rendezvous: SetupRendezvous,
    step: str,
    trouble: str,
    title: str,
    error: type[CommError] = BackendError,
    hint: str = _CURE,
) -> None:
    """Raises on all ranks where one has some trouble."""
    troubles = [text.decode() for text in rendezvous.exchange(step, trouble.encode())]
    if bad := [r for r, text in enumerate(troubles) if text]:
        raise error(
            f"{title}: {troubles[bad[0]]} (on rank {rendezvous.labels[bad[0]]})",
            culprits=[rendezvous.labels[r] for r in bad],
            hint=hint,
        )
