"""A store in this process that counts the requests of each rank, for thousands of ranks as threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import Store


@dataclass
class Counts:
    """What one rank asked. A poll is a look for one key that may not be there yet; the rest are requests.

    Attributes:
        requests, polls: how many; a rank makes them one after the other.
        written, read: keys that it set, and values that it was given.
        sent, received: bytes of values.
    """

    requests: int = 0
    polls: int = 0
    written: int = 0
    read: int = 0
    sent: int = 0
    received: int = 0


class CountingStore:
    """The data, and the counts by rank; `view` gives a rank its store."""

    def __init__(self, size: int) -> None:
        self.data: dict[str, bytes] = {}
        self.changed = threading.Condition()
        self.counts = [Counts() for _ in range(size)]
        self.most_keys = 0

    def num_keys(self) -> int:
        return len(self.data)

    def view(self, rank: int) -> Store:
        return _View(self, self.counts[rank])


class _View(Store):
    def __init__(self, store: CountingStore, counts: Counts) -> None:
        super().__init__()
        self._store, self._counts = store, counts

    def has_extended_api(self) -> bool:
        return True

    def set(self, key: str, value: bytes | str) -> None:
        value = value if isinstance(value, bytes) else value.encode()
        counts = self._counts
        counts.requests += 1
        counts.written += 1
        counts.sent += len(value)
        self._put(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        self._counts.requests += 1
        return self._give(self._store.data[key])

    def add(self, key: str, amount: int) -> int:
        counts = self._counts
        counts.requests += 1
        with self._store.changed:
            number = int(self._store.data.get(key, b"0")) + amount
            self._put(key, b"%d" % number)
        return number

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        old, new = (v if isinstance(v, bytes) else v.encode() for v in (expected, desired))
        self._counts.requests += 1
        with self._store.changed:
            there = self._store.data.get(key)
            if there == old or (there is None and not old):
                if new != old:
                    self._counts.written += 1
                    self._counts.sent += len(new)
                self._put(key, new)
                there = new
        return self._give(old if there is None else there)

    def check(self, keys: Sequence[str]) -> bool:
        if len(keys) == 1:
            self._counts.polls += 1
        else:
            self._counts.requests += 1
        return all(key in self._store.data for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta = timedelta(seconds=60)) -> None:
        with self._store.changed:
            if not self._store.changed.wait_for(
                lambda: all(key in self._store.data for key in keys), timeout.total_seconds()
            ):
                raise RuntimeError(f"timeout on {keys}")

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self._counts.requests += 1
        return [self._give(self._store.data[key]) for key in keys]

    def delete_key(self, key: str) -> bool:
        self._counts.requests += 1
        with self._store.changed:
            return self._store.data.pop(key, None) is not None

    def num_keys(self) -> int:
        return self._store.num_keys()

    def _put(self, key: str, value: bytes) -> None:
        with self._store.changed:
            self._store.data[key] = value
            self._store.most_keys = max(self._store.most_keys, len(self._store.data))
            self._store.changed.notify_all()

    def _give(self, value: bytes) -> bytes:
        self._counts.read += 1
        self._counts.received += len(value)
        return value
