"""What hubs say to each other and to `unicomm trace top --connect`, and how they know each other.

One request, one answer, each a message of one frame. All connections are encrypted and authenticated with
ZeroMQ's CURVE; both sides' keys come from the job's token, so who knows the token may ask, and nobody else
gets as far as a message. Whatever a peer sends is bounded before memory is taken for it, and every wait ends.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import time
import zlib
from typing import Any

import msgspec
import zmq
from zmq.utils import z85

TOKEN_VARIABLE = "UNICOMM_JOB_TOKEN"
MOST_ASKED = 64 << 10  # bytes of a request
MOST_ANSWERED = 16 << 20  # bytes of an answer
MOST_RING = 4 << 30  # bytes of a ring
PART = 4 << 20  # bytes of a ring in one answer, before it is packed
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.ucring")
_SHORTEST_TOKEN = 16


class HubError(Exception):
    """A hub cannot be had, does not answer, or refuses; the message says what to do."""


class Request(msgspec.Struct, tag=True, frozen=True):
    """What can be asked."""


class Ping(Request, frozen=True):
    """Are you there?"""


class Announce(Request, frozen=True):
    """Host number `host` has a hub at `address` (of ZeroMQ); `round` tells starts of the ranks apart."""

    host: int
    address: str
    name: str
    round: str


class Look(Request, frozen=True):
    """The rings as they are now, with so many of their newest records; of all hosts, or of this one."""

    records: int = 64
    everywhere: bool = True


class Files(Request, frozen=True):
    """The rings of this host as they were when a rank failed, or, if none did, as they are now."""


class Read(Request, frozen=True):
    """A part of one of the files."""

    name: str
    offset: int


class Gather(Request, frozen=True):
    """The rings of all hosts in one folder, and what they tell. Answered when it is done."""


class Answer(msgspec.Struct, tag=True, frozen=True):
    """What comes back."""


class Done(Answer, frozen=True):
    pass


class Refused(Answer, frozen=True):
    why: str


class Packed(msgspec.Struct, frozen=True):
    """A copy of a ring, packed, of `size` bytes."""

    host: str
    name: str
    size: int
    data: bytes


class Rings(Answer, frozen=True):
    """`missing`: what could not be had, a sentence each."""

    rings: list[Packed]
    missing: list[str] = []


class Listing(Answer, frozen=True):
    """Names and sizes of files."""

    files: list[tuple[str, int]]


class Part(Answer, frozen=True):
    """Packed; `size` bytes when unpacked, 0 behind the end."""

    size: int
    data: bytes


class Gathered(Answer, frozen=True):
    """`folder` on `host` has the rings of `hosts` hosts; `sentence`: the main finding, "" for none."""

    host: str
    folder: str
    hosts: int
    missing: list[str]
    sentence: str


class Tell(Request, frozen=True):
    """What gathering came to: for those who ask when the host that gathered may be gone."""

    found: Gathered


AnyRequest = Ping | Announce | Look | Files | Read | Gather | Tell
AnyAnswer = Done | Refused | Rings | Listing | Part | Gathered
_requests = msgspec.msgpack.Decoder(AnyRequest)
_answers = msgspec.msgpack.Decoder(AnyAnswer)
encode = msgspec.msgpack.encode


def read_request(data: bytes) -> AnyRequest:
    """Raises `HubError` for anything else."""
    try:
        request: AnyRequest = _requests.decode(data)
        return request
    except (msgspec.MsgspecError, RecursionError) as error:
        raise HubError(f"no request: {error}") from None


def file_name(name: str) -> str:
    """A ring's name that a peer gave. Raises `HubError` where it could mean more than a file of a folder."""
    if not _NAME.fullmatch(name):
        raise HubError(f"{name[:80]!r} is no name of a ring")
    return name


def pack(data: bytes) -> bytes:
    return zlib.compress(data, 1)


def unpack(data: bytes, size: int, most: int) -> bytes:
    """Raises `HubError` when there are not `size` bytes, or that is more than `most`."""
    if not 0 <= size <= most:
        raise HubError(f"{size} bytes are more than the {most} that are allowed")
    unpacker = zlib.decompressobj()
    try:
        out = unpacker.decompress(data, size + 1)
    except zlib.error as error:
        raise HubError(f"broken data: {error}") from None
    if len(out) != size or unpacker.unconsumed_tail:
        raise HubError(f"not the {size} bytes that were announced")
    return out


# --- keys ---------------------------------------------------------------------------------------------


def check_token(token: str) -> str:
    """Raises `HubError` for a token that is too short to be a secret."""
    if len(token) < _SHORTEST_TOKEN or not token.isascii():
        raise HubError(
            f"{TOKEN_VARIABLE} is no secret; use {_SHORTEST_TOKEN} or more characters, such as those of"
            " `openssl rand -hex 16`, the same on all hosts"
        )
    return token


def keys(token: str, side: str) -> tuple[bytes, bytes]:
    """(public, secret) of all hubs ("hub") or of all who ask ("guest") of a job."""
    secret = z85.encode(
        hashlib.blake2b(token.encode(), digest_size=32, person=f"uc-{side}".encode()).digest()
    )
    return zmq.curve_public(secret), secret


def serve_securely(socket: zmq.Socket[bytes], token: str) -> None:
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = keys(token, "hub")


class OnlyGuests:
    """For ZeroMQ's authentication: the one key that is let in."""

    def __init__(self, token: str) -> None:
        self._key = keys(token, "guest")[0]

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._key


# --- asking -------------------------------------------------------------------------------------------


def zmq_address(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


class Asker:
    """A connection to one hub, for one thread. Nothing waits longer than it is told to."""

    def __init__(self, context: zmq.Context[Any], address: str, token: str) -> None:
        self._address = address
        self._socket = socket = context.socket(zmq.DEALER)
        socket.linger = 0
        socket.maxmsgsize = MOST_ANSWERED
        socket.ipv6 = "[" in address
        socket.curve_serverkey = keys(token, "hub")[0]
        socket.curve_publickey, socket.curve_secretkey = keys(token, "guest")
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            socket.close()
            raise HubError(f"{address} is no address of a hub: {error}") from None

    def __enter__(self) -> Asker:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def ask(self, request: AnyRequest, seconds: float) -> Any:
        """The answer. Raises `HubError` when there is none in time, or it is a refusal."""
        deadline = time.monotonic() + seconds
        try:
            self._socket.send(encode(request), zmq.NOBLOCK)
        except zmq.Again:
            raise HubError(f"the hub at {self._address} takes nothing") from None
        if not self._socket.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise HubError(
                f"the hub at {self._address} did not answer within {seconds:g} s: it is not there, or the"
                " job has another token"
            )
        data = self._socket.recv()
        try:
            answer = _answers.decode(data)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise HubError(f"the hub at {self._address} answered nonsense: {error}") from None
        if isinstance(answer, Refused):
            raise HubError(f"the hub at {self._address} refused: {answer.why}")
        return answer


def new_token() -> str:
    return secrets.token_hex(16)


def own_token() -> str:
    """The token of the environment, "" where there is none."""
    token = os.environ.get(TOKEN_VARIABLE, "")
    return check_token(token) if token else ""
