"""A store in a simulated process, with the methods and the semantics of `torch.distributed.TCPStore`.

Requests take time. They wait while the host is stopped, and fail when it is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from .primitives import Lock, current
from .scheduler import Process, Task


class Server:
    """The data, and the process that holds them."""

    def __init__(self, host: Process) -> None:
        self.host = host
        self.data: dict[str, bytes] = {}
        rng = current().rng
        self.slowest = rng.choice((0.0003, 0.0003, 0.003, 0.05))


class Requests:
    """The methods of a store, over `_ask`, which applies a job to the data."""

    def _ask(self, what: str, job: Callable[[dict[str, bytes]], Any]) -> Any:
        raise NotImplementedError

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        raise NotImplementedError

    def set(self, key: str, value: Any) -> None:
        self._ask("set", lambda data: data.__setitem__(key, _bytes(value)))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        def job(data: dict[str, bytes]) -> bytes:
            if data.get(key, b"") == _bytes(expected):
                data[key] = _bytes(desired)
            elif key not in data:
                return _bytes(expected)
            return data[key]

        return self._ask("compare_set", job)  # type: ignore[no-any-return]

    def add(self, key: str, amount: int) -> int:
        def job(data: dict[str, bytes]) -> int:
            value = int(data.get(key, b"0")) + amount
            data[key] = b"%d" % value
            return value

        return self._ask("add", job)  # type: ignore[no-any-return]

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask("check", lambda data: all(key in data for key in keys))  # type: ignore[no-any-return]

    def delete_key(self, key: str) -> bool:
        return self._ask("delete_key", lambda data: data.pop(key, None) is not None)  # type: ignore[no-any-return]

    def append(self, key: str, value: Any) -> None:
        self._ask("append", lambda data: data.__setitem__(key, data.get(key, b"") + _bytes(value)))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self.wait(keys)
        return self._ask("multi_get", lambda data: [data[key] for key in keys])  # type: ignore[no-any-return]

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return True


class Local(Requests):
    """`torch.distributed.HashStore`: a store of the threads of one process, which wakes those that wait."""

    def __init__(self) -> None:
        self._data: dict[str, bytes] = {}
        self._waiters: list[Task] = []

    def _ask(self, what: str, job: Callable[[dict[str, bytes]], Any]) -> Any:
        current().pause(what)
        answer = job(self._data)
        waiters, self._waiters = self._waiters, []
        for task in waiters:
            current().wake(task)
        return answer

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        end = current().now + (timeout or timedelta(seconds=300)).total_seconds()
        while not all(key in self._data for key in keys):
            self._waiters.append(current().current)  # type: ignore[arg-type]
            if not current().block("wait", end):
                raise RuntimeError("wait timeout")


class Client(Requests):
    """One process's connection to the server; one request at a time, as with a TCPStore."""

    def __init__(self, server: Server, owner: Process) -> None:
        self._server, self._owner = server, owner
        self._lock = Lock()
        self._timeout = timedelta(seconds=300)
        self.broken = False

    def _ask(self, what: str, job: Callable[[dict[str, bytes]], Any]) -> Any:
        scheduler, server = current(), self._server
        with self._lock:
            scheduler.sleep(scheduler.rng.random() * server.slowest, what)
            self._await_host()
            answer = job(server.data)
            scheduler.sleep(scheduler.rng.random() * server.slowest, f"{what}: answer")
            self._await_host()
            return answer

    def _await_host(self) -> None:
        scheduler, host = current(), self._server.host
        while host is not self._owner and host.stopped_until > scheduler.now and not host.dead:
            task = scheduler.current
            assert task is not None
            host.on_resume.append(partial(scheduler.wake, task))
            scheduler.block("store")
        if host.dead or self.broken:
            self.broken = True
            raise RuntimeError("Connection reset by peer")

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        limit = timeout or self._timeout
        end = current().now + limit.total_seconds()
        while not self.check(keys):
            if current().now > end:
                raise RuntimeError(f"wait timeout after {limit.total_seconds():g} s for {keys}")
            current().sleep(0.001)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        return self._timeout


class Prefixed:
    """`torch.distributed.PrefixStore` over a `Client` or another one of these."""

    def __init__(self, prefix: str, store: Any) -> None:
        self._prefix, self.underlying_store = prefix, store

    def _name(self, key: Any) -> Any:
        return f"{self._prefix}/{key}" if isinstance(key, str) else [f"{self._prefix}/{k}" for k in key]

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.underlying_store, name)
        if name in ("has_extended_api", "set_timeout", "timeout"):
            return method
        return lambda key, *rest: method(self._name(key), *rest)


def base_store(store: Any) -> Any:
    """The store below all prefixes."""
    while isinstance(store, Prefixed):
        store = store.underlying_store
    return store


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
