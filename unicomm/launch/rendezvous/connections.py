"""Connections between launchers: each side proves that it knows the job's token, and each message is signed.

    caller  -> HELLO     magic, whether it has a token, 32 random bytes
    host    -> WELCOME   magic, whether it has a token, 32 random bytes, the caller's address, a MAC of all
    caller  -> PROOF     a MAC of all

The token itself is never sent. Afterwards a message is its length, its bytes, and a MAC of direction,
position and bytes under a key of this connection. Nobody on the way can add, change, repeat or drop one
unnoticed.
Messages are not encrypted.

Without a token the key is known to everybody; the two sides then at least notice when only one has a token.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import socket
import struct
from dataclasses import dataclass

MAGIC = b"unicomm1"
HELLO = struct.Struct("<8sB32s")
_GREETING = struct.Struct("<8sB32s16s")
MAC = 32
WELCOME = _GREETING.size + MAC
LENGTH = struct.Struct("<I")
LONGEST = 64 << 20  # bytes of a message


class TokensDifferError(Exception):
    """The two sides of a connection have different tokens, or only one has a token."""


class NoLauncherError(Exception):
    """What answers is no launcher of `unicomm run`."""


class EndedError(ConnectionError):
    """The other side has ended the connection."""


def _mac(key: bytes, *parts: bytes) -> bytes:
    made = hashlib.blake2b(digest_size=MAC, key=key)
    for part in parts:
        made.update(LENGTH.pack(len(part)) + part)
    return made.digest()


def _key(token: str) -> bytes:
    return hashlib.blake2b(token.encode(), digest_size=32, person=b"uc-rendezvous").digest()


@dataclass
class Seal:
    """The key of one direction of a connection, and the number of messages so far."""

    key: bytes
    count: int = 0

    def sign(self, data: bytes) -> bytes:
        """Returns the MAC of the next message."""
        self.count += 1
        return _mac(self.key, self.count.to_bytes(8, "little"), data)

    def check(self, data: bytes, mac: bytes) -> None:
        """Raises `ConnectionError` if this is not the next message that the other side has signed."""
        if not hmac.compare_digest(self.sign(data), mac):
            raise ConnectionError("a message that the other side has not signed")


@dataclass(frozen=True)
class Seals:
    """The keys of a connection: of what the caller says, and of what the host says."""

    caller: Seal
    host: Seal

    @classmethod
    def of(cls, token: str, spoken: bytes) -> Seals:
        session = _mac(_key(token), b"session", spoken)
        return cls(Seal(_mac(session, b"caller")), Seal(_mac(session, b"host")))


@dataclass(frozen=True)
class Greeting:
    """The host's part of the beginning: what to send, and what the caller has to answer."""

    welcome: bytes
    proof: bytes
    seals: Seals


def welcome(hello: bytes, token: str, caller: str) -> Greeting:
    """Answers a caller's hello. Raises `NoLauncherError` if it is none."""
    magic, _, _ = HELLO.unpack(hello)
    if magic != MAGIC:
        raise NoLauncherError
    greeting = _GREETING.pack(MAGIC, bool(token), secrets.token_bytes(32), packed(caller))
    said = greeting + _mac(_key(token), b"host", hello, greeting)
    spoken = hello + said
    return Greeting(said, _mac(_key(token), b"caller", spoken), Seals.of(token, spoken))


def packed(address: str) -> bytes:
    """Returns an address as 16 bytes, IPv4 as IPv6."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    return ip.packed if ip.version == 6 else bytes(10) + b"\xff\xff" + ip.packed


def unpacked(address: bytes) -> str:
    ip = ipaddress.IPv6Address(address)
    return str(ip.ipv4_mapped or ip)


class SignedSocket:
    """The caller's end of a connection; used as a socket is, for one request and its answer at a time.

    Attributes:
        seen_as: this host's address, as the other side sees it.
    """

    def __init__(self, s: socket.socket, token: str) -> None:
        """Greets the host. Raises `TokensDifferError`, `NoLauncherError`, or `OSError`."""
        self._socket = s
        hello = HELLO.pack(MAGIC, bool(token), secrets.token_bytes(32))
        s.sendall(hello)
        said = _read(s, WELCOME, greeting=True)
        magic, has_token, _, address = _GREETING.unpack(said[: _GREETING.size])
        if magic != MAGIC:
            raise NoLauncherError
        if has_token != bool(token):
            raise TokensDifferError("the host has a token" if has_token else "the host has no token")
        expected = _mac(_key(token), b"host", hello, said[: _GREETING.size])
        if not hmac.compare_digest(expected, said[-MAC:]):
            raise TokensDifferError("the host has another token")
        self.seen_as = unpacked(address)
        spoken = hello + said
        self._seals = Seals.of(token, spoken)
        s.sendall(_mac(_key(token), b"caller", spoken))

    def sendall(self, data: bytes) -> None:
        self._socket.sendall(LENGTH.pack(len(data)) + data + self._seals.caller.sign(data))

    def recv(self, most: int) -> bytes:
        """Returns the bytes of the next message, all of them."""
        (length,) = LENGTH.unpack(_read(self._socket, LENGTH.size))
        if length > LONGEST:
            raise ConnectionError(f"a message of {length} bytes")
        data, mac = _read(self._socket, length), _read(self._socket, MAC)
        self._seals.host.check(data, mac)
        return data

    def settimeout(self, seconds: float | None) -> None:
        self._socket.settimeout(seconds)

    def setsockopt(self, level: int, option: int, value: int) -> None:
        self._socket.setsockopt(level, option, value)

    def shutdown(self, how: int) -> None:
        self._socket.shutdown(how)

    def close(self) -> None:
        self._socket.close()


def _read(s: socket.socket, count: int, greeting: bool = False) -> bytes:
    data = bytearray()
    while len(data) < count:
        got = s.recv(count - len(data))
        if not got:
            raise EndedError("the other side has ended the connection")
        data += got
        if greeting and not MAGIC.startswith(bytes(data[: len(MAGIC)])):
            raise NoLauncherError
    return bytes(data)
