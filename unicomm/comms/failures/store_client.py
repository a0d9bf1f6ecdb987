"""StoreClient: requests of one communicator to a `torch.distributed` store, which end at its deadline."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from typing import Any

from unicomm.c10d.compat import Store, base_store
from unicomm.comms.errors import BackendError, CommError, CommTimeoutError, first_line

from .faults import FINALIZED
from .store_requests import NoAnswerError, StoreHost, host_of, requests_of, set_host

CHUNK = 1024  # keys in one request
_ABSENT = b"?"  # no value that we write begins like that
_STORE_FAILED = "the store failed"
_STORE_SILENT = "the store did not answer"


def is_store_failure(error: CommError) -> bool:
    """Whether the store has failed, rather than a member."""
    return error.message.startswith((_STORE_FAILED, _STORE_SILENT))


class StoreClient:
    """Requests to one store for one communicator, until a deadline.

    A failure of the store is a `BackendError`, its silence until the deadline a `CommTimeoutError`.
    Both name the rank that holds the store, if it is known. After the deadline a request gets a little time
    as long as the store answers, for members that find out who is missing.
    """

    def __init__(
        self, store: Store, comm: str, size: int, limit: float, check: Callable[[], None] | None = None
    ) -> None:
        """`limit`: seconds from now to the deadline.

        `check` raises if ranks are known to be gone, with which the store may be gone. It is called several
        times a second while the store does not answer; the request raises what it does, if that `explains`
        the silence.
        """
        self._store: Any = store  # the type stubs lack several methods, and have str where bytes are accepted
        self._base = base_store(store)
        self._comm, self._size, self._check = comm, size, check
        self._requests = requests_of(self._base)
        self._limit, self._deadline = limit, time.monotonic() + limit
        self._grace = 2.0 + size / 2000

    def explains(self, error: CommError) -> bool:
        """Whether a store that does not answer may be gone with the ranks of an error of `check`.

        A rank that has only finalized is no reason, unless it holds the store: it may have had its answers.
        """
        finalized = error.fault is not None and error.fault.detail == FINALIZED
        return not finalized or host_of(self._store).rank in error.culprits

    def _look(self, check: Callable[[], None]) -> None:
        try:
            check()
        except CommError as error:
            if self.explains(error):
                raise

    def _call(self, operation: str, *arguments: Any) -> Any:
        try:
            method = getattr(self._store, operation)
            if self._requests is None:
                return method(*arguments)
            left = self._deadline - time.monotonic()
            seconds = max(left, 0.0 if self._requests.silent else self._grace)
            check = None if self._check is None else partial(self._look, self._check)
            return self._requests.ask(self._base, seconds, lambda: method(*arguments), check)
        except NoAnswerError:
            raise self._silent() from None
        except CommError:
            raise  # of `check`
        except Exception as error:
            raise self._lost(error) from error

    def _lost(self, error: Exception) -> BackendError:
        host = host_of(self._store)
        return BackendError(
            f"{_STORE_FAILED}: {first_line(error)}",
            comm=self._comm,
            culprits=[] if host.rank is None else [host.rank],
            hint=f"see whether it has ended, and whether this host reaches it: {host.words}",
        )

    def _silent(self) -> CommTimeoutError:
        host = host_of(self._store)
        error = CommTimeoutError(
            f"{_STORE_SILENT} within {self._limit:.3g} s: waited for {host.words}",
            comm=self._comm,
            absent=[] if host.rank is None else [host.rank],
            hint="see whether that process is stopped, and whether its host is gone",
        )
        error.explained = True
        return error

    def set_host(self, rank: int) -> None:
        """Says that the process of the rank holds the store."""
        set_host(self._store, StoreHost(f"rank {rank}, which holds the store", rank))

    def peek(self, key: str) -> bytes:
        """The value of `key`, or b"" if there is none; never waits, unlike the store's own get."""
        value = bytes(self._call("compare_set", key, _ABSENT, _ABSENT))
        return b"" if value == _ABSENT else value

    def put_first(self, key: str, value: bytes) -> bytes:
        """Sets `key` if it is absent; returns the value that it has now."""
        return bytes(self._call("compare_set", key, b"", value))

    def replace(self, key: str, old: bytes, new: bytes) -> None:
        self._call("compare_set", key, old, new)

    def put(self, key: str, value: bytes) -> None:
        self._call("set", key, value)

    def add(self, key: str, amount: int = 1) -> int:
        return int(self._call("add", key, amount))

    def present(self, keys: list[str]) -> bool:
        return all(self._call("check", keys[i : i + CHUNK]) for i in range(0, len(keys), CHUNK))

    def read(self, keys: list[str]) -> list[bytes]:
        """The values of keys that are present."""
        if not self._call("has_extended_api"):
            return [self.peek(key) for key in keys]
        chunks = (self._call("multi_get", keys[i : i + CHUNK]) for i in range(0, len(keys), CHUNK))
        return [bytes(value) for chunk in chunks for value in chunk]

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._call("delete_key", key)

    def wait(self, key: str, seconds: float) -> None:
        """Returns when `key` is present or `seconds` have passed, perhaps earlier. Ctrl-C interrupts it."""
        if self._requests is None:
            # At least a millisecond: stores count in these, and 0 means forever.
            with contextlib.suppress(RuntimeError):
                self._store.wait([key], timedelta(seconds=min(max(seconds, 0.001), 0.5)))
            return
        # A TCPStore serves one request at a time: its wait would block the other threads of this process,
        # also those that set the key; it cannot be interrupted, and it logs each timeout. A second connection
        # would cost the server a reverse name lookup for every group. A FileStore polls in any case. So this
        # looks after each twentieth of the time waited so far, and less often in a large job.
        least, most = 0.001 + self._size * 2e-5, 0.5 + self._size * 5e-5
        began = now = time.monotonic()
        while not self._call("check", [key]) and now < began + seconds:
            time.sleep(min(max((now - began) / 20, least), most, began + seconds - now))
            now = time.monotonic()
