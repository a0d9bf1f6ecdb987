"""Init handles: what one rank needs to call another's communicator, and what they say to each other then.

A handle holds addresses and a secret. Whoever has it may call; after the secret and a first object, in JSON,
both sides say more of these, one a line.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unicomm.comms.errors import InvalidArgumentError

LOOPBACK = "127.0.0.1"
KEY = 16  # bytes of the secret
HELLO = struct.Struct(f"<{KEY}sI")  # secret, length of the JSON that follows
LONGEST = 1 << 16  # bytes of a hello, or of a line
_PREFIX = "unicomm:"
_LONGEST_HANDLE = 4096  # characters
_BACKLOG = 1024
_HEX = re.compile(r"[0-9a-f]+")
# A host that is gone, or a cable that is cut, is noticed when this many probes, one a second, are unanswered.
_PROBES = 3


def network() -> str:
    """What processes share whose loopback is the same: the booted kernel and the network namespace."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/net')}"


def notice_silence(s: socket.socket, seconds: int) -> None:
    """Ends a connection when the other host has not answered for four times `seconds`.

    Also while data are on their way, for which the system alone would take a quarter of an hour.
    """
    s.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": seconds,
        "TCP_KEEPINTVL": seconds,
        "TCP_KEEPCNT": _PROBES,
        "TCP_USER_TIMEOUT": 1000 * seconds * (_PROBES + 1),
    }
    for option, value in options.items():
        if hasattr(socket, option):
            s.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def listen(host: str, port: int = 0) -> socket.socket:
    """A listening socket at exactly that address."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


@dataclass(frozen=True)
class Handle:
    """An init handle, read.

    Attributes:
        id: of the communicator on its rank. backend: its name.
        key: the secret, in hexadecimal digits. network: see `network`.
        at: addresses to call, loopback first; none where ranks do not meet (fake).
    """

    id: str
    backend: str
    key: str
    network: str
    at: tuple[tuple[str, int], ...]

    @property
    def text(self) -> str:
        fields = {"id": self.id, "of": self.backend, "key": self.key, "net": self.network, "at": self.at}
        return _PREFIX + base64.urlsafe_b64encode(json.dumps(fields).encode()).decode()

    @classmethod
    def read(cls, text: Any) -> Handle:
        """Raises `InvalidArgumentError` for what `get_init_handle` has not returned."""
        try:
            if not isinstance(text, str) or len(text) > _LONGEST_HANDLE or not text.startswith(_PREFIX):
                raise ValueError
            data = json.loads(base64.urlsafe_b64decode(text[len(_PREFIX) :].encode()))
            words = [data["id"], data["of"], data["key"], data["net"]]
            at = tuple((host, port) for host, port in data["at"])
            good = all(isinstance(word, str) for word in words) and len(at) <= 8
            good = good and all(isinstance(h, str) and type(p) is int and 0 < p < 1 << 16 for h, p in at)
            if not good or len(data["key"]) != 2 * KEY or not all(map(_HEX.fullmatch, (words[0], words[2]))):
                raise ValueError
        except (ValueError, TypeError, KeyError, RecursionError):
            shown = repr(text)
            raise InvalidArgumentError(
                f"{shown if len(shown) < 80 else shown[:77] + '...'} is no init handle",
                op="reconfigure",
                hint="pass what get_init_handle() returned on each rank, unchanged",
            ) from None
        return cls(data["id"], data["of"], data["key"], data["net"], at)

    def address(self, here: str) -> tuple[str, int]:
        """Where a process of the network `here` reaches it."""
        return self.at[0] if self.network == here else self.at[-1]


class Lines:
    """Reads JSON objects, one a line, from a socket that does not block."""

    def __init__(self, s: socket.socket, begun: bytes = b"") -> None:
        self.socket = s
        self.gone = False
        self._said = bytearray(begun)

    def read(self) -> list[dict[str, Any]]:
        """What has come; sets `gone` when the other end is closed, or says what nobody of ours says."""
        while not self.gone:
            try:
                data = self.socket.recv(LONGEST)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                data = b""
            self._said += data
            self.gone = not data or len(self._said) > LONGEST
        found = []
        while (end := self._said.find(b"\n")) >= 0:
            line = bytes(self._said[:end])
            del self._said[: end + 1]
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                value = None
            if not isinstance(value, dict):
                self.gone = True
                break
            found.append(value)
        return found

    def tell(self, value: Mapping[str, Any]) -> None:
        """Sends a line if the other end is there and takes it; a few hundred bytes always fit."""
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(value).encode() + b"\n")


def call(handle: Handle, here: str, hello: Mapping[str, Any], timeout: float) -> Lines:
    """Calls a communicator; `OSError` when it is not there. The caller closes the socket."""
    s = socket.create_connection(handle.address(here), timeout)
    try:
        said = json.dumps(hello).encode()
        s.sendall(HELLO.pack(bytes.fromhex(handle.key), len(said)) + said)
        notice_silence(s, 1)
        s.setblocking(False)
    except OSError:
        s.close()
        raise
    return Lines(s)
