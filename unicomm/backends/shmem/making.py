"""How a communicator of a SHMEM library is made: its hints, the heap, and connections beside it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from unicomm.backends.bootstrap import addresses
from unicomm.backends.out_of_band import CHECK_HINT, Sockets, checks_signatures, connect_all
from unicomm.comms.backend import Setup
from unicomm.comms.errors import InvalidArgumentError, UnsupportedError
from unicomm.comms.memory.symmetric import Capability, Compare
from unicomm.comms.options import Hint, parse_size
from unicomm.comms.streams import Streams

from . import heap as heaps
from .heap import Heap
from .pipe import least_room

_NEEDED = Capability.HEAP | Capability.PUT_GET | Capability.SIGNAL
_STAGED = 16 << 20
_EMPTIES = 5.0  # seconds in which the stream of a communicator that begins or ends must be empty

SHARED_GPU = (
    "start the CUDA MPS server on each host, nvidia-cuda-mps-control -d, or give each rank a GPU of its own; "
    "ranks of one host that have to share GPUs can use 'shm' or 'gloo' with CPU tensors"
)


def _count(text: str) -> int:
    if (value := int(text)) < 1:
        raise ValueError("expected a number of communicators")
    return value


HINTS = (
    CHECK_HINT,
    Hint(
        "library",
        str,
        "",
        "File of the library. Default: the copy in the process, a package's, or the system's.",
    ),
    Hint("heap_bytes", parse_size, 0, "Bytes of each rank's symmetric heap. Default: the library's own."),
    Hint(
        "staging_bytes",
        parse_size,
        _STAGED,
        "Bytes of the heap for each communicator's messages on their way. Default: 16M.",
    ),
    Hint(
        "communicators",
        _count,
        8,
        "How many communicators there may be at a time on a rank: this one, and those split from it.",
    ),
    Hint("hostname", str, "", "Address at which this rank is told of failures. Default: by routing."),
)


def check(setup: Setup, backend: str, table: Any) -> None:
    """Whether that library and those hints will do. Local."""
    lacking = _NEEDED & ~Capability(table.capabilities)
    if lacking:
        names = ", ".join(c.name or "" for c in Capability if c in lacking).lower()
        raise UnsupportedError(
            f"{table.name} lacks what the backend '{backend}' needs: {names}", hint="install a newer one"
        )
    if (least := least_room(setup.size)) > setup.hints["staging_bytes"]:
        raise InvalidArgumentError(
            f"staging_bytes={setup.hints['staging_bytes']} is too little for {setup.size} ranks",
            hint=f"leave the hint out, or give at least {least}",
        )


def make_heap(setup: Setup, title: str, table: Any, streams: Streams | None) -> Heap:
    """Collective: the first communicator's. `title`: of the library."""
    stream = 0 if streams is None else streams.handle(streams.current())
    room, count = setup.hints["staging_bytes"], setup.hints["communicators"]

    def fill(heap: Heap) -> str:
        left = max(0.1, 0.8 * setup.rendezvous.remaining())
        return heap.fill(count, room, setup.device, stream, emptying(streams), left)

    heap = heaps.make(table, setup.rendezvous, title, setup.name, setup.hints["heap_bytes"], fill)
    word = heap.regions[0].bell(heap.pe)
    fault = heap.domain.wait_signal(word, int(Compare.GE), 0, heap.pe, 1.0, stream)  # whether it may
    trouble = "" if fault is None else str(fault[3])
    heaps.all_good(setup.rendezvous, "waits", trouble, title, UnsupportedError, SHARED_GPU)
    return heap


def connect(setup: Setup, title: str, streams: Streams | None) -> list[Sockets]:
    """Collective: connections to each rank for the watch, and more where the ranks compare what they call."""
    # Who compares what all call waits for them on the host, which is asked for where a device would not.
    compares = checks_signatures(setup) if streams is None else setup.hints[CHECK_HINT.name] is True
    addresses.guard_store(setup.store)
    routed = addresses.listen_address(setup.rendezvous, setup.store)
    host = setup.hints["hostname"] or routed or "127.0.0.1"
    return connect_all(setup.rendezvous, host, 1 + compares, setup.name, title)


def emptying(streams: Streams | None) -> Callable[[], bool]:
    """Waits until the current stream has done all that it has; whether it has."""

    def wait() -> bool:
        if streams is None:
            return True
        event = streams.record(streams.current())
        end = time.monotonic() + _EMPTIES
        while not streams.is_over(event):
            if time.monotonic() > end:
                return False
            time.sleep(0.001)
        return True

    return wait
