"""Ranks as threads of one process."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from unicomm.backends.registry import new_comm
from unicomm.c10d.compat import HashStore, Store
from unicomm.comms.communicator import Communicator
from unicomm.comms.errors import AbortedError, CommError, PeerLostError
from unicomm.flight_recorder.recording.thread_frames import frames_of_threads

T = TypeVar("T")

_ENDING = 10.0  # seconds in which ranks are asked who is missing, and finalize


def run_ranks(
    fn: Callable[[Communicator], T],
    n: int,
    *,
    backend: str = "shm",
    device: torch.device | str = "cpu",
    timeout: float = 30.0,
    name: str = "ranks",
    hints: Mapping[str, str | bool] | None = None,
    store: Store | None = None,
) -> list[T]:
    """Calls `fn(comm)` on `n` ranks, each a thread of this process, and returns their results by rank.

    Each rank's communicator is finalized when `fn` returns. When a rank raises, its communicator is
    aborted, so that the others end too; the first error that is not a consequence of another one is raised
    again, with its rank in a note. Creating 4 ranks takes some milliseconds.

    Args:
        fn: the program of a rank; its result is in the list.
        n: the number of ranks.
        backend: as for `new_comm`, as are `device`, `name` and `hints`.
        device: of the tensors.
        name: of the communicator.
        hints: of the backend.
        store: where the ranks meet; by default one of this call's own.
        timeout: of the communicator's creation and operations in seconds, and of the whole: ranks that are
            not done ten seconds after twice that are shown with their stacks in a `TimeoutError`.
    """
    store = HashStore() if store is None else store
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def rank_main(rank: int) -> None:
        comm = None
        try:
            comm = new_comm(
                backend, device, name=name, store=store, rank=rank, size=n, timeout=timeout, hints=hints
            )
            results[rank] = fn(comm)
            comm.finalize()
        except BaseException as error:
            errors[rank] = error
            if comm is not None:
                comm.abort()
                try:
                    comm.finalize(timeout)
                except CommError as consequence:
                    error.__context__ = error.__context__ or consequence

    threads = [threading.Thread(target=rank_main, args=(r,), name=f"rank-{r}", daemon=True) for r in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * timeout + _ENDING)
    stuck = [t for t in threads if t.is_alive()]
    if stuck:
        frames = frames_of_threads()
        stacks = [
            f"{t.name}:\n{''.join(traceback.format_stack(frames[t.ident]))}"
            for t in stuck
            if t.ident is not None and t.ident in frames
        ]
        raise TimeoutError(f"{len(stuck)} of {n} ranks are not done:\n" + "\n".join(stacks))
    if errors:
        # A rank that fails takes the others down with errors that only say so: show the cause.
        first = min(errors, key=lambda r: (isinstance(errors[r], (AbortedError, PeerLostError)), r))
        if hasattr(errors[first], "add_note"):
            errors[first].add_note(f"raised by rank {first} of {n}")
        raise errors[first]
    return [results[r] for r in range(n)]


def drain(comm: Communicator, timeout: float = 30.0) -> None:
    """Waits until every operation issued on `comm` is over and recorded.

    On a device an operation completes before the recorder has its end. Raises `TimeoutError` when the
    operations are not over within `timeout` seconds.
    """
    if not comm._engine.executor.drain(timeout):
        raise TimeoutError(f"operations of {comm!r} are not over after {timeout:g} s")
