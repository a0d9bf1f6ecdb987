"""A store in the memory of one rank that the other ranks use through that rank's endpoint (endpoint.py).

A TCPStore is not used here: its server asks the name service for the name of each caller, in the thread that
serves all, so that each reconfiguration takes seconds where the name service does not answer. And any process
that finds its port may use it, while an endpoint knows its callers. An endpoint only serves requests that
never wait: a rank that waits for a key looks for it again and again.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from unicomm.c10d.compat import HashStore, Store

from .rendezvous_parts import pack, unpack

_FRAME = struct.Struct("<IBH")  # bytes that follow, operation, fields in them
_LONGEST = 64 << 20
# For an answer. Communicators give a request up at their own deadline (StoreClient); if the first rank goes
# on within this time, its store can still be used.
_SECONDS = 30.0
_LEAST = 0.0005  # seconds between the first two looks at a key
_ABSENT = b"?"
_OPERATIONS = ("set", "compare_set", "add", "check", "read", "delete_key", "append")


def frame(operation: int, fields: Sequence[bytes]) -> bytes:
    body = pack(list(fields))
    return _FRAME.pack(len(body), operation, len(fields)) + body


def take_frame(said: bytearray) -> tuple[int, list[bytes]] | None:
    """Removes the first frame from the received bytes and returns it; None if it is not complete.

    Raises `ValueError` if the bytes are no frame.
    """
    if len(said) < _FRAME.size:
        return None
    length, operation, count = _FRAME.unpack_from(said)
    if length > _LONGEST:
        raise ValueError(f"a frame of {length} bytes")
    end = _FRAME.size + length
    if len(said) < end:
        return None
    fields = unpack(bytes(said[_FRAME.size : end]), count)
    del said[:end]
    return operation, fields


def answer(store: HashStore, operation: int, fields: list[bytes]) -> bytes:
    """The answer to a request, as a frame. Never waits. Raises `ValueError` if it is no request."""
    base: Any = store
    name = _OPERATIONS[operation] if operation < len(_OPERATIONS) else ""
    keys = [field.decode() for field in fields[: None if name in ("check", "read") else 1]]
    result: list[bytes] = []
    if name == "set" and len(fields) == 2:
        base.set(keys[0], fields[1])
    elif name == "compare_set" and len(fields) == 3:
        result = [bytes(base.compare_set(keys[0], fields[1], fields[2]))]
    elif name == "add" and len(fields) == 2:
        result = [b"%d" % base.add(keys[0], int(fields[1]))]
    elif name == "check" and keys:
        result = [b"%d" % all(base.check([key]) for key in keys)]
    elif name == "read" and keys:
        result = [bytes(base.compare_set(key, _ABSENT, _ABSENT)) for key in keys]
    elif name == "delete_key" and len(fields) == 1:
        result = [b"%d" % base.delete_key(keys[0])]
    elif name == "append" and len(fields) == 2:
        base.append(keys[0], fields[1])
    else:
        raise ValueError(f"operation {operation} with {len(fields)} fields")
    return frame(operation, result)


class RemoteStore(Store):
    """The store that another rank's endpoint serves. Methods raise `RuntimeError` when that rank is gone."""

    words = "the first rank's store"
    longest_pause = 0.02  # seconds between two looks at a key that is not there

    def __init__(self, s: socket.socket, timeout: float) -> None:
        super().__init__()
        self.set_timeout(
            timedelta(seconds=timeout)
        )  # torch's: it reaches this store through a PrefixStore, too
        self._socket = s
        self._lock = threading.Lock()
        # Why a request has no answer. What comes on the connection then may still be that answer.
        self._unanswered = ""
        s.settimeout(_SECONDS)
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # a thread may wait for an answer
        self._socket.close()

    def _ask(self, name: str, *fields: bytes) -> list[bytes]:
        with self._lock:
            if self._unanswered:
                raise RuntimeError(f"{self.words}: {self._unanswered}")
            self._unanswered = "an earlier request was interrupted"
            try:
                answer = self._exchange(frame(_OPERATIONS.index(name), fields))
            except (OSError, ValueError) as error:
                self._unanswered = str(error)
                self._socket.close()
                raise RuntimeError(f"{self.words}: {error}") from error
            self._unanswered = ""
            return answer

    def _exchange(self, request: bytes) -> list[bytes]:
        said = bytearray()
        self._socket.sendall(request)
        while (found := take_frame(said)) is None:
            data = self._socket.recv(1 << 20)
            if not data:
                raise ConnectionError("its rank has ended it, or is gone")
            said += data
        return found[1]

    # Names and arguments are torch's; C++ calls these, too.

    def set(self, key: str, value: Any) -> None:
        self._ask("set", key.encode(), _bytes(value))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return self._ask("compare_set", key.encode(), _bytes(expected), _bytes(desired))[0]

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key.encode(), b"%d" % amount)[0])

    def check(self, keys: list[str]) -> bool:
        return self._ask("check", *(key.encode() for key in keys)) == [b"1"]

    def delete_key(self, key: str) -> bool:
        return self._ask("delete_key", key.encode()) == [b"1"]

    deleteKey = delete_key  # noqa: N815

    def append(self, key: str, value: Any) -> None:
        self._ask("append", key.encode(), _bytes(value))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        limit: timedelta = timeout or self.timeout  # type: ignore[attr-defined]  # missing in torch's stub
        began = now = time.monotonic()
        end = began + limit.total_seconds()
        while not self.check(keys):
            now = time.monotonic()
            if now > end:
                raise RuntimeError(f"wait timeout after {limit.total_seconds():g} s for {keys}")
            time.sleep(min(max((now - began) / 20, _LEAST), self.longest_pause))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.wait(keys)
        return self._ask("read", *(key.encode() for key in keys))

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return True


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
