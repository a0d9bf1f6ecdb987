"""Creating the library's communicators: new ones by unique IDs, or from others by split, shrink and grow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from unicomm.comms.backend import Setup
from unicomm.comms.errors import CommError
from unicomm.comms.failures.daemon_pool import call_within
from unicomm.comms.streams import on_device

from .handle import Handle
from .library import Library, not_in_time
from .result_codes import IN_PROGRESS, SUCCESS

ABORT_SECONDS = 5.0  # time that an abort is waited for
NO_COLOR = -1  # color of a rank that is in no part of a split
_RANKS_PER_ID = 64  # ranks of a large world that connect to one root


class Creator:
    """Creates communicators on one device, each within `timeout` seconds.

    Its methods return the address of a complete `ncclComm_t` and raise a `CommError`. `settings` are the
    (field, value) pairs of `ncclConfig_t`.
    """

    def __init__(
        self, library: Library, device: torch.device, settings: Sequence[tuple[str, Any]], timeout: float
    ) -> None:
        self._library = library
        self._native = library.native
        self._device = device
        self._settings = list(settings)
        self._timeout = timeout
        with on_device(device):
            self._log_position = library.start_log()

    def new(self, setup: Setup, large: int) -> int:
        """Creates a communicator of all ranks of `setup` by a unique ID of rank 0.

        From `large` ranks on, several ranks give IDs, so that not all ranks connect to the same one.
        """
        native, rank, size = self._native, setup.rank, setup.size
        roots = [0]
        scalable = size >= max(large, 2) and self._library.has("CommInitRankScalable")
        if scalable:
            count = max(2, size // _RANKS_PER_ID)
            roots = [i * size // count for i in range(count)]
        own = self.unique_id() if rank in roots else b""
        if scalable:
            everyone = setup.rendezvous.exchange("unique ids", own)
            ids = [everyone[root] for root in roots]
            return self._create(
                "CommInitRankScalable",
                lambda: native.init_scalable(size, rank, ids, self._settings, self._timeout),
            )
        uid = setup.rendezvous.broadcast("unique id", own or None)
        return self._create(
            "CommInitRank", lambda: native.init(size, uid, rank, self._settings, self._timeout)
        )

    def unique_id(self) -> bytes:
        with on_device(self._device):
            result, uid = self._native.unique_id()
            self._library.check("GetUniqueId", result, since=self._log_position)
        return bytes(uid)

    def split(self, parent: Handle, color: int, key: int) -> int:
        """Splits `parent`. Returns 0 for the color `NO_COLOR`."""

        def split() -> tuple[int, int]:
            with parent.in_call as comm:
                arguments = comm, color, key, self._settings, self._timeout, parent.state
                made: tuple[int, int] = self._native.split(*arguments)
                return made

        return self._create("CommSplit", split)

    def shrink(self, parent: int, without: Sequence[int]) -> int:
        """Creates a communicator of the parent's other ranks, in their order.

        Ends operations that run on the parent; the two communicators share nothing.
        """
        arguments = parent, list(without), self._settings, True, self._timeout, self._state_of(parent)
        return self._create("CommShrink", lambda: self._native.shrink(*arguments))

    def grow_id(self, parent: int) -> bytes:
        """Returns the ID by which other ranks join the parent's ranks. One rank of the parent calls it."""
        with on_device(self._device):
            result, uid = self._native.comm_unique_id(parent)
            self._library.check("CommGetUniqueId", result, parent, self._log_position)
        return bytes(uid)

    def grow(self, parent: int, size: int, uid: bytes, rank: int) -> int:
        """Creates a communicator of the parent's ranks and of joining ones.

        The rank that called `grow_id` passes `uid`, and so do joining ranks, with `parent` 0 and their new
        rank. Ranks of the parent pass the rank -1.
        """
        arguments = parent, size, uid, rank, self._settings, self._timeout, self._state_of(parent)
        return self._create("CommGrow", lambda: self._native.grow(*arguments))

    def _state_of(self, parent: int) -> Callable[[], int]:
        """Returns the question for the state of a parent that no other thread uses."""
        return partial(self._library.state_of, parent)

    def _create(self, function: str, call: Callable[[], tuple[int, int]]) -> int:
        def create() -> int:
            with on_device(self._device):
                result, comm = call()
                return self._completed(function, result, comm)

        library = self._library
        try:  # in another thread, because the library's calls cannot be interrupted
            return call_within(self._timeout, f"unicomm-{library.vendor.name}-{function}", create)
        except TimeoutError:
            raise not_in_time(library, function, self._timeout, self._log_position) from None

    def _completed(self, function: str, result: int, comm: int) -> int:
        """Returns the new communicator when it is complete. With blocking=0 its creation still goes on."""
        library, since = self._library, self._log_position
        library.check(function, result, comm, since)
        if result == IN_PROGRESS and not comm:
            raise not_in_time(library, function, self._timeout, since)
        if not comm:
            return 0
        state = library.await_state(comm, self._timeout)
        if state == SUCCESS:
            return int(comm)
        if state == IN_PROGRESS:
            error: CommError = not_in_time(library, function, self._timeout, since)
        else:
            error = library.error(function, state, comm, since)
        library.abort(comm, self._device, ABORT_SECONDS)
        raise error
