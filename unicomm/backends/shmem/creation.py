"""Creating a communicator of a SHMEM library: its hints, the heap, and the connections beside it."""

from __future__ import annotations

from typing import Any

from unicomm.backends.bootstrap import addresses
from unicomm.backends.out_of_band import CHECK_HINT, Sockets, checks_signatures, connect_all
from unicomm.comms.backend import Setup
from unicomm.comms.errors import InvalidArgumentError, UnsupportedError
from unicomm.comms.operations.symmetric_table import Capability, Compare
from unicomm.comms.options import Hint, parse_size
from unicomm.comms.streams import Streams

from .chunk_transfer import least_staging
from .heap import Heap, current_stream, join_world, raise_if_any_failed

_NEEDED = Capability.HEAP | Capability.PUT_GET | Capability.SIGNAL
_STAGING = 16 << 20

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
        "File of the library. Default: the copy that the process has loaded, a package's, or the system's.",
    ),
    Hint("heap_bytes", parse_size, 0, "Bytes of each rank's symmetric heap. Default: the library's own."),
    Hint(
        "staging_bytes",
        parse_size,
        _STAGING,
        "Bytes of the heap for the messages of one communicator. Default: 16M.",
    ),
    Hint(
        "communicators",
        _count,
        8,
        "Maximum number of communicators on a rank at a time: this one and those split from it.",
    ),
    Hint("hostname", str, "", "Address at which this rank hears of failures. Default: by routing."),
)


def check(setup: Setup, backend: str, table: Any) -> None:
    """Raises an error if the library's capabilities or the hints do not suffice. Local."""
    lacking = _NEEDED & ~Capability(table.capabilities)
    if lacking:
        names = ", ".join(c.name or "" for c in Capability if c in lacking).lower()
        raise UnsupportedError(
            f"{table.name} lacks what the backend '{backend}' needs: {names}", hint="install a newer one"
        )
    if (least := least_staging(setup.size)) > setup.hints["staging_bytes"]:
        raise InvalidArgumentError(
            f"staging_bytes={setup.hints['staging_bytes']} is too little for {setup.size} ranks",
            hint=f"leave the hint out, or give at least {least}",
        )


def create_heap(setup: Setup, title: str, table: Any, streams: Streams | None) -> Heap:
    """Creates the heap of the first communicator. Collective. `title` is the library's name in errors."""
    rendezvous, hints = setup.rendezvous, setup.hints
    heap = join_world(table, setup, title, hints["heap_bytes"])
    left = max(0.1, 0.8 * rendezvous.remaining())
    trouble = heap.allocate(hints["communicators"], hints["staging_bytes"], setup.device, streams, left)
    raise_if_any_failed(rendezvous, "symmetric heap filled", trouble, title)
    word = heap.regions[0].barrier_word(heap.pe)
    # A wait that is over at once shows whether streams may wait at all.
    fault = heap.domain.wait_signal(word, int(Compare.GE), 0, heap.pe, 1.0, current_stream(streams))
    trouble = "" if fault is None else str(fault[3])
    raise_if_any_failed(rendezvous, "waits", trouble, title, UnsupportedError, SHARED_GPU)
    return heap


def connect(setup: Setup, title: str, streams: Streams | None) -> list[Sockets]:
    """Connects to each rank for the fault channel, and again if the ranks compare their calls. Collective."""
    # To compare calls, the host waits for the other ranks. On a device that is done only on request.
    compares = checks_signatures(setup) if streams is None else setup.hints[CHECK_HINT.name] is True
    addresses.guard_store(setup.store)
    routed = addresses.listen_address(setup.rendezvous, setup.store)
    host = setup.hints["hostname"] or routed or "127.0.0.1"
    return connect_all(setup, host, 1 + compares, title)
