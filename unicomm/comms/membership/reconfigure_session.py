"""How the ranks of a reconfiguration find each other, without anything that an earlier epoch had.

The first rank of the list keeps a store and calls all others by their handles to invite them: in it they
meet, as at creation (rendezvous.py). The connections of these calls stay open until all are connected: who
dies meanwhile is noticed by the end of one, and the first rank tells the others. Who has not been invited yet
holds a connection to the first rank and notices its end in the same way.
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
from unicomm.comms import errors
from unicomm.comms.errors import (
    AbortedError,
    BackendError,
    CommError,
    CommTimeoutError,
    MismatchError,
    NotReadyError,
    PeerLostError,
)

from .endpoint import Endpoint, Guest
from .handles import Handle, Lines, call
from .remote_store import RemoteStore

_LOOK = 0.2  # seconds between two looks at the connections
_GRACE = 2.0  # seconds in which a connection ends, or the first rank says why, when something else has failed
_CALL = 3.0  # seconds that a call may take; a process that is there is reached at once
_LEAVING = 10.0  # seconds that the first rank waits for the others to read the outcome
_ANSWER = 1.0  # seconds in which all have to say whether they are in an attempt
_MOST_TEXT = 2000  # characters of a message that another rank sends


def group_of(handles: Sequence[Handle]) -> str:
    """What says that two ranks were given the same list."""
    return hashlib.sha256(" ".join(handle.id for handle in handles).encode()).hexdigest()[:32]


class Attempt:
    """One rank's part in one call of reconfigure. `close` it, also after an error."""

    def __init__(
        self, endpoint: Endpoint, uuid: int, handles: Sequence[Handle], rank: int, timeout: float
    ) -> None:
        self._endpoint, self._uuid, self._handles = endpoint, uuid, handles
        self._rank, self._timeout = rank, timeout
        self._deadline = time.monotonic() + timeout
        self._group = group_of(handles)
        self._links: dict[int, Lines] = {}  # the first rank's, to the others
        self._first: Guest | None = None  # another rank's, from the first one
        self._store: RemoteStore | None = None  # of the first rank, and another one's
        self._cancelled = threading.Event()
        self._farewell: dict[str, Any] = {}
        self.fail(
            MismatchError(
                f"rank {rank} is done with the attempt {uuid}, which had other ranks",
                hint="give all ranks the same list, and each attempt a uuid of its own",
            )
        )
        endpoint.enter(uuid, self._group)

    def remaining(self) -> float:
        return max(0.1, self._deadline - time.monotonic())

    def cancel(self) -> None:
        """Ends it with `AbortedError`, from another thread."""
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
            raise self.explained(BackendError(f"cannot reach rank 0: {error}", culprits=())) from None
        self._store = RemoteStore(lines.socket, self.remaining())
        return self._store

    def _late(self) -> CommError:
        """The first rank has not come: neither may others have."""
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
        missing = [rank for rank in others if rank not in there]
        return CommTimeoutError(
            f"{_ranks(missing)} did not come to the attempt {self._uuid} within {self._timeout:g} s",
            dead=dead,
            absent=[rank for rank in missing if rank not in dead],
            hint="all ranks of the list call reconfigure with the same uuid; try again with a new one",
        )

    # --- both ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises when a rank is gone, or has said that the attempt has failed. Does not wait."""
        self._check_cancelled()
        if self._first is not None:
            self._heed(self._first.lines)
            if self._first.gone:
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
        if lost:  # what the others have said is a consequence
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
                raise _read_error(said, len(self._handles))

    def explained(self, error: CommError) -> CommError:
        """The cause, where the failure of something else is its consequence: a rank that is gone."""
        if error.culprits or not isinstance(error, (BackendError, CommTimeoutError, PeerLostError)):
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
        """Waits until the others need this rank's store no longer; when that is, they end their calls."""
        with selectors.DefaultSelector() as selector:
            for link in self._links.values():
                selector.register(link.socket, selectors.EVENT_READ, link)
            end = time.monotonic() + min(self.remaining(), _LEAVING)
            while selector.get_map() and time.monotonic() < end:
                for key, _ in selector.select(end - time.monotonic()):
                    key.data.read()
                    if key.data.gone:
                        selector.unregister(key.fileobj)

    def fail(self, error: CommError) -> None:
        """Tells those that this rank is connected to, now or later in this attempt. Its store is closed."""
        self._farewell = {
            "failed": {
                "type": type(error).__name__,
                "message": error.message[:_MOST_TEXT],
                "hint": error.hint[:_MOST_TEXT],
                **{kind: list(getattr(error, kind)) for kind in ("culprits", "dead", "absent", "late")},
            }
        }
        if self._first is not None:
            self._first.tell(self._farewell)
        for link in self._links.values():
            link.tell(self._farewell)
        if self._store is not None:  # not left to the collector: the frames of an error hold it in a circle
            self._store.close()

    def close(self) -> None:
        self._endpoint.leave(self._uuid, self._farewell)
        if self._first is not None:
            self._first.leave()
        for link in self._links.values():
            link.socket.close()

    def _gone(self, ranks: Sequence[int]) -> PeerLostError:
        verb = "is" if len(ranks) == 1 else "are"
        return PeerLostError(
            f"{_ranks(ranks)} {verb} gone, or has given the attempt {self._uuid} up",
            culprits=ranks,
            dead=ranks,
            hint="reconfigure again, with a new uuid and the handles of those who are left",
        )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _read_error(said: Any, size: int) -> CommError:
    """The error that another rank has told."""
    try:
        kind = getattr(errors, said["type"])
        ranks = {name: [int(r) for r in said[name]] for name in ("culprits", "dead", "absent", "late")}
        if not issubclass(kind, CommError) or any(not 0 <= r < size for rs in ranks.values() for r in rs):
            raise ValueError
        return kind(str(said["message"])[:_MOST_TEXT], hint=str(said["hint"])[:_MOST_TEXT], **ranks)  # type: ignore[no-any-return]
    except (AttributeError, KeyError, TypeError, ValueError):
        return NotReadyError("another rank has given up, and says nothing readable", hint="see its output")
