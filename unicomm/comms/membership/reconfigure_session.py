"""ReconfigureSession: how the ranks of one reconfiguration find each other. Uses nothing of an earlier epoch.

The first rank of the list keeps a store and calls all other ranks by their handles to invite them. They meet
in that store, as at creation (rendezvous.py). The connections of these calls stay open until all ranks are
connected: the end of one shows the death of a rank, of which the first rank tells the others. A rank that has
not been invited yet holds a connection to the first rank, and notices its death in the same way.
"""

from __future__ import annotations

import contextlib
import hashlib
import selectors
import threading
import time
from collections.abc import Sequence
from typing import Any

from unicomm.c10d.compat import HashStore, Store
from unicomm.comms.errors import (
    AbortedError,
    BackendError,
    CommError,
    CommTimeoutError,
    MismatchError,
    PeerLostError,
)
from unicomm.comms.failures.faults import error_from_dict, error_to_dict, rank_list
from unicomm.comms.failures.store_client import is_store_failure
from unicomm.comms.failures.store_requests import StoreHost, set_host

from .endpoint import Endpoint, Guest
from .handles import Handle, Lines, call
from .remote_store import RemoteStore

_LOOK = 0.2  # seconds between two looks at the connections
_GRACE = 2.0  # seconds, when something else has failed, for a connection to end or the first rank to say why
_CALL = 3.0  # seconds for a call; a process that lives is reached at once
_LEAVING = 10.0  # seconds that the first rank waits for the others to read the outcome
_ANSWER = 1.0  # seconds for the answers of all ranks whether they take part in an attempt
_MOST_TEXT = 2000  # characters of a message that another rank sends


def group_of(handles: Sequence[Handle]) -> str:
    """A text that is the same on two ranks if they were given the same list."""
    return hashlib.sha256(" ".join(handle.id for handle in handles).encode()).hexdigest()[:32]


class ReconfigureSession:
    """One rank's part in one attempt to reconfigure. `close` it, also after an error."""

    def __init__(
        self, endpoint: Endpoint, uuid: int, handles: Sequence[Handle], rank: int, timeout: float
    ) -> None:
        self._endpoint, self._uuid, self._handles = endpoint, uuid, handles
        self._rank, self._timeout = rank, timeout
        self._deadline = time.monotonic() + timeout
        self._group = group_of(handles)
        self._links: dict[int, Lines] = {}  # connections of the first rank to the others
        self._first: Guest | None = None  # the connection of another rank from the first one
        self._store: RemoteStore | None = None  # of another rank: the first rank's store
        self._cancelled = threading.Event()
        self._farewell: dict[str, Any] = {}
        self.fail(
            MismatchError(
                f"rank {rank} has finished the attempt {uuid}, which had other ranks",
                hint="give all ranks the same list, and each attempt a uuid of its own",
            )
        )
        endpoint.enter(uuid, self._group)

    def remaining(self) -> float:
        return max(0.1, self._deadline - time.monotonic())

    def cancel(self) -> None:
        """Ends the attempt with `AbortedError`. Called from another thread."""
        self._cancelled.set()

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def open(self) -> Store:
        """The store in which these ranks meet, and nobody else."""
        return self._invite() if self._rank == 0 else self._await_invitation()

    # --- the first rank ------------------------------------------------------------------------------------

    def _invite(self) -> Store:
        store = HashStore()
        self._endpoint.serve(self._uuid, store)
        invitation = {"invite": self._uuid, "group": self._group}
        for rank in range(1, len(self._handles)):
            self._check_cancelled()
            with contextlib.suppress(OSError):
                limit = min(self.remaining(), _CALL)
                self._links[rank] = call(self._handles[rank], self._endpoint.network, invitation, limit)
        if lost := [rank for rank in range(1, len(self._handles)) if rank not in self._links]:
            raise self._gone(lost)
        return store

    # --- the others ----------------------------------------------------------------------------------------

    def _await_invitation(self) -> Store:
        try:
            probe = call(self._handles[0], self._endpoint.network, {"probe": self._uuid}, self.remaining())
        except OSError as error:
            raise self._gone([0]) from error
        try:
            while (guest := self._endpoint.invitation(self._uuid, min(self.remaining(), _LOOK))) is None:
                self._check_cancelled()
                self._heed(probe.read())
                if probe.gone:
                    raise self._gone([0])
                if time.monotonic() > self._deadline:
                    raise self._late()
        finally:
            probe.socket.close()
        self._first = guest
        invitation = guest.hello or {}
        if invitation.get("group") != self._group:
            raise MismatchError(
                f"ranks 0 and {self._rank} were given different init_handles for the attempt {self._uuid}",
                culprits=[self._rank],
                hint="give all ranks the same list, or set",
            )
        self.check()
        try:
            lines = call(
                self._handles[0], self._endpoint.network, {"store": self._uuid}, min(self.remaining(), _CALL)
            )
        except OSError as error:
            cause = self.explained(BackendError(f"cannot reach rank 0: {error}"))
            cause.culprits = cause.culprits or (0,)
            raise cause from None
        self._store = RemoteStore(lines.socket, self.remaining())
        set_host(self._store, StoreHost("rank 0, which holds the store of the attempt", 0))
        return self._store

    def _late(self) -> CommError:
        """The error when the first rank has not come. Other ranks may be missing, too."""
        others = [rank for rank in range(len(self._handles)) if rank != self._rank]
        asked: dict[int, Lines] = {}
        question = {"ask": self._uuid, "group": self._group}
        end = time.monotonic() + _ANSWER
        for rank in others:
            with contextlib.suppress(OSError):
                left = max(0.01, end - time.monotonic())
                asked[rank] = call(self._handles[rank], self._endpoint.network, question, left)
        there, dead = set(), [rank for rank in others if rank not in asked]
        waiting = dict(asked)
        while waiting and time.monotonic() < end:
            for rank, lines in list(waiting.items()):
                answers = lines.read()
                if answers or lines.gone:
                    del waiting[rank]
                there |= {rank for answer in answers if answer.get("in")}
            time.sleep(0.002)
        for lines in asked.values():
            lines.socket.close()
        # If all have come, the first rank takes part, but has not invited this one.
        missing = [rank for rank in others if rank not in there] or [0]
        return CommTimeoutError(
            f"{rank_list(missing)} did not come to the attempt {self._uuid} within {self._timeout:g} s",
            dead=dead,
            absent=[rank for rank in missing if rank not in dead],
            hint="all ranks of the list call reconfigure with the same uuid; try again with a new one",
        )

    # --- both ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises if a rank is gone, or has sent that the attempt has failed. Does not wait."""
        self._check_cancelled()
        if self._first is not None:
            gone = self._first.gone  # before its last words are read, not between
            self._heed(self._first.lines)
            if gone:
                raise self._gone([0])
        failed: CommError | None = None
        lost = []
        for rank, link in self._links.items():
            try:
                self._heed(link.read())
            except CommError as error:
                failed = failed or error
            else:
                if link.gone:
                    lost.append(rank)
        if lost:  # errors that others have sent are consequences
            raise self._gone(lost)
        if failed is not None:
            try:
                raise failed
            finally:
                del failed  # this frame is in its traceback

    def _check_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise AbortedError(
                "aborted by this rank", culprits=[self._rank], hint="reconfigure again, with a new uuid"
            )

    def _heed(self, lines: Sequence[dict[str, Any]]) -> None:
        for line in list(lines):
            if (said := line.get("failed")) is not None:
                raise error_from_dict(said, len(self._handles), _MOST_TEXT)

    def explained(self, error: CommError) -> CommError:
        """The cause of an error if it is the loss of a rank; else the error itself."""
        # The end of a rank is the cause of what becomes of the store that it holds.
        ended = isinstance(error, BackendError) and is_store_failure(error)
        known = bool(error.culprits) and not ended
        if known or not isinstance(error, (BackendError, CommTimeoutError, PeerLostError)):
            return error
        end = time.monotonic() + _GRACE
        while time.monotonic() < end and (self._links or self._first is not None):
            try:
                self.check()
            except CommError as cause:
                return cause
            time.sleep(0.005)
        return error

    def settle(self) -> None:
        """Waits until the other ranks end their calls, when they need this rank's store no longer.

        Also beyond the deadline for a moment: all are connected, and only the outcome is still to be read.
        """
        with selectors.DefaultSelector() as selector:
            for link in self._links.values():
                selector.register(link.socket, selectors.EVENT_READ, link)
            end = time.monotonic() + min(max(self.remaining(), _GRACE), _LEAVING)
            while selector.get_map() and time.monotonic() < end:
                for key, _ in selector.select(end - time.monotonic()):
                    key.data.read()
                    if key.data.gone:
                        selector.unregister(key.fileobj)

    def fail(self, error: CommError) -> None:
        """Sends the error to the ranks that are connected, now or later in this attempt. Closes the store."""
        self._farewell = {"failed": error_to_dict(error, _MOST_TEXT)}
        if self._first is not None:
            self._first.tell(self._farewell)
        for link in self._links.values():
            link.tell(self._farewell)
        if self._store is not None:  # now, because the frames of an error hold it in a reference cycle
            self._store.close()

    def close(self) -> None:
        self._endpoint.leave(self._uuid, self._farewell)
        if self._first is not None:
            self._first.leave()
        for link in self._links.values():
            link.socket.close()

    def _gone(self, ranks: Sequence[int]) -> PeerLostError:
        return PeerLostError(
            f"{rank_list(ranks, 'is')} gone, or gave up the attempt {self._uuid}",
            culprits=ranks,
            dead=ranks,
            hint="reconfigure again, with a new uuid and the handles of those who are left",
        )
