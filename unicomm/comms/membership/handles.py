"""Init handles: what a rank needs to call another rank's communicator, and the lines that both then send.

A handle holds addresses and a secret. A caller sends the secret and a first JSON object; after that both
sides send JSON objects, one a line.
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
LONGEST = 1 << 16  # bytes of the first object, or of a line
_PREFIX = "unicomm:"
_LONGEST_HANDLE = 4096  # characters
_BACKLOG = 1024
_HEX = re.compile(r"[0-9a-f]+")
#: Seconds without an answer after which another host counts as gone, unless the user says otherwise. Links
#: that fail over are back in less, and a rank that was killed ends its connections at once.
HOST_SILENCE = 15.0
_PROBES = 3


def network() -> str:
    """An identity of the loopback interface: the booted kernel and the network namespace."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/net')}"


def notice_silence(s: socket.socket, seconds: float = HOST_SILENCE) -> None:
    """Makes a connection end when the other host has not answered for about `seconds`, 4 or more.

    That holds also while data are on their way, where the system's default is a quarter of an hour.
    """
    s.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    pause = max(1, round(seconds / (_PROBES + 1)))
    options = {
        "TCP_KEEPIDLE": pause,
        "TCP_KEEPINTVL": pause,
        "TCP_KEEPCNT": _PROBES,
        "TCP_USER_TIMEOUT": round(1000 * seconds),
    }
    for option, value in options.items():
        if hasattr(socket, option):
            s.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def listen(host: str, port: int = 0, backlog: int = _BACKLOG) -> socket.socket:
    """A socket that listens at this address only."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address, family=family, backlog=backlog)


@dataclass(frozen=True)
class Handle:
    """The content of an init handle.

    Attributes:
        id: identity of the communicator on its rank.
        backend: name of the backend.
        key: the secret, in hexadecimal digits.
        network: identity of the rank's loopback interface.
        at: addresses to call, loopback first; empty where ranks do not meet (fake).
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
        """Reads a handle. Raises `InvalidArgumentError` if `get_init_handle` cannot have returned it."""
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
        """The address at which a process of the network `here` reaches the rank."""
        return self.at[0] if self.network == here else self.at[-1]


class Lines:
    """Reads JSON objects, one a line, from a socket that does not block."""

    def __init__(self, s: socket.socket, begun: bytes = b"") -> None:
        self.socket = s
        self.gone = False
        self._said = bytearray(begun)

    def read(self) -> list[dict[str, Any]]:
        """The objects that have come. Sets `gone` when the other end has closed or has sent anything else."""
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
        """Sends a line, unless the other end is gone. Does not wait: a few hundred bytes always fit."""
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(value).encode() + b"\n")


def call(handle: Handle, here: str, hello: Mapping[str, Any], timeout: float) -> Lines:
    """Calls a communicator; `OSError` if it is not reached. The caller closes the socket."""
    s = socket.create_connection(handle.address(here), timeout)
    try:
        said = json.dumps(hello).encode()
        s.sendall(HELLO.pack(bytes.fromhex(handle.key), len(said)) + said)
        notice_silence(s)
        s.setblocking(False)
    except OSError:
        s.close()
        raise
    return Lines(s)
