"""How communicators of the library are made: anew, by unique ids, or from others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from unicomm.comms.backend import SetupRendezvous

from .errors import IN_PROGRESS, SUCCESS
from .library import Library, not_in_time

T = TypeVar("T")

ABORTS = 5.0  # seconds that an abort is waited for
NOBODY = -1  # the color of a rank that is in no part of a split
_RANKS_PER_ID = 64  # of a large world: so many meet at one root


def bounded(what: str, library: Library, timeout: float, since: int, call: Callable[[], T]) -> T:
    """What `call` returns or raises; the library's calls cannot be interrupted, so it has its own thread."""
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(call())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name=f"unicomm-{library.vendor.name}-{what}", daemon=True)
    thread.start()
    thread.join(timeout)
    if failed:
        raise failed[0]
    if not done:
        raise not_in_time(library, what, timeout, since)
    return done[0]


class Maker:
    """Makes communicators of a library on a device, each in `timeout` seconds.

    Its methods return the library's handle when the communicator is complete, and raise a `CommError`.
    """

    def __init__(
        self,
        library: Library,
        on_device: Callable[[], AbstractContextManager[Any]],
        settings: Sequence[tuple[str, Any]],
        timeout: float,
    ) -> None:
        self._library = library
        self._native = library.native
        self.on_device = on_device
        self._settings = list(settings)
        self._timeout = timeout
        with on_device():
            self._began = library.listen()

    def new(self, rendezvous: SetupRendezvous, rank: int, size: int, large: int) -> int:
        """By a unique id of rank 0; from `large` ranks on by several, so that not all meet at one of them."""
        native = self._native
        roots = [0]
        scalable = size >= max(large, 2) and self._library.has("CommInitRankScalable")
        if scalable:
            count = max(2, size // _RANKS_PER_ID)
            roots = [i * size // count for i in range(count)]
        mine = self.unique_id() if rank in roots else b""
        if scalable:
            everyone = rendezvous.exchange("unique ids", mine)
            ids = [everyone[root] for root in roots]
            return self._make(
                "CommInitRankScalable", lambda: native.init_scalable(size, rank, ids, self._settings)
            )
        uid = rendezvous.broadcast("unique id", mine or None)
        return self._make("CommInitRank", lambda: native.init(size, uid, rank, self._settings))

    def unique_id(self) -> bytes:
        with self.on_device():
            result, uid = self._native.unique_id()
            self._library.check("GetUniqueId", result, since=self._began)
        return bytes(uid)

    def split(self, parent: int, color: int, key: int) -> int:
        """0 for a rank whose color is `NOBODY`."""
        arguments = parent, color, key, self._settings, self._timeout
        return self._make("CommSplit", lambda: self._native.split(*arguments))

    def shrink(self, parent: int, without: Sequence[int]) -> int:
        """Of the parent's other ranks, in their order. Ends what runs on the parent; nothing is shared."""
        arguments = parent, list(without), self._settings, True, self._timeout
        return self._make("CommShrink", lambda: self._native.shrink(*arguments))

    def grow_id(self, parent: int) -> bytes:
        """By which others join the parent's ranks; one of these asks for it."""
        with self.on_device():
            result, uid = self._native.comm_unique_id(parent)
            self._library.check("CommGetUniqueId", result, parent, self._began)
        return bytes(uid)

    def grow(self, parent: int, size: int, uid: bytes, rank: int) -> int:
        """Of the parent's ranks and others. The rank that has asked for the id passes it, and those that
        join, with `parent` 0 and their rank; the parent's ranks pass -1."""
        arguments = parent, size, uid, rank, self._settings, self._timeout
        return self._make("CommGrow", lambda: self._native.grow(*arguments))

    def _make(self, what: str, call: Callable[[], tuple[int, int]]) -> int:
        def make() -> int:
            with self.on_device():
                result, comm = call()
                return self._complete(what, result, comm)

        return bounded(what, self._library, self._timeout, self._began, make)

    def _complete(self, what: str, result: int, comm: int) -> int:
        """The new communicator, once it is complete: with blocking=0 it is still being made."""
        library, began = self._library, self._began
        library.check(what, result, comm, began)
        end = time.monotonic() + self._timeout
        if result == IN_PROGRESS and not comm:
            raise not_in_time(library, what, self._timeout, began)
        while comm:
            asked, state = library.native.async_error(comm)
            library.check("CommGetAsyncError", asked, comm, began)
            if state == SUCCESS:
                break
            if state != IN_PROGRESS:
                error = library.error(what, state, comm, began)
                library.native.abort(comm, ABORTS)
                raise error
            if time.monotonic() > end:
                library.native.abort(comm, ABORTS)
                raise not_in_time(library, what, self._timeout, began)
            time.sleep(0.001)
        return int(comm)
