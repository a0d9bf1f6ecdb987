"""The messages between hubs and viewers (`unicomm trace top --connect`), and their authentication.

Each request gets one answer, and each is a message of one frame. All connections are encrypted and
authenticated with ZeroMQ's CURVE. The keys of both sides are derived from the job's token: only who knows the
token can send a request at all. The size of everything that a peer sends is checked before memory is taken
for it, and every wait has a time limit.
"""

from __future__ import annotations

import hashlib
import re
import time
import zlib
from typing import Any

import msgspec
import zmq
from zmq.utils import z85

MOST_ASKED = 64 << 10  # bytes of a request
MOST_ANSWERED = 16 << 20  # bytes of an answer
MOST_RING = 4 << 30  # bytes of a ring
PART = 4 << 20  # bytes of a ring in one answer, before it is packed
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.(?:ucring|ending|stacks|exits)")


class HubError(Exception):
    """A hub cannot be reached, does not answer, or refuses; the message says what to do."""


class Request(msgspec.Struct, tag=True, frozen=True):
    """A request to a hub."""


class Ping(Request, frozen=True):
    """Asks whether the hub answers at all."""


class Announce(Request, frozen=True):
    """Says that host number `host` has a hub at `address`; `round` identifies a start of the ranks."""

    host: int
    address: str
    name: str
    round: str


class Look(Request, frozen=True):
    """Asks for the rings as they are now, with their newest `records`, of all hosts or of this one."""

    records: int = 64
    everywhere: bool = True


class Files(Request, frozen=True):
    """Asks for the names of this host's rings, as they were when a rank failed or else as they are now.

    `round`, here and below: that of the hub that gathers, for one start of the ranks. A hub whose ranks run
    in another start refuses.
    """

    round: str


class Read(Request, frozen=True):
    """Asks for a part of one of these files."""

    round: str
    name: str
    offset: int


class Gather(Request, frozen=True):
    """Asks to copy the rings of all hosts into one folder and to analyze them. Answered when that is done."""

    round: str


class Answer(msgspec.Struct, tag=True, frozen=True):
    """The answer to a request."""


class Done(Answer, frozen=True):
    pass


class Refused(Answer, frozen=True):
    why: str


class Packed(msgspec.Struct, frozen=True):
    """A compressed copy of a ring of `size` bytes."""

    host: str
    name: str
    size: int
    data: bytes


class Rings(Answer, frozen=True):
    """Copies of rings; `missing` says which rings could not be had, a sentence each."""

    rings: list[Packed]
    missing: list[str] = []


class Listing(Answer, frozen=True):
    """Names and sizes of files."""

    files: list[tuple[str, int]]


class Part(Answer, frozen=True):
    """A compressed part of a file, of `size` bytes; 0 bytes after its end."""

    size: int
    data: bytes


class Gathered(Answer, frozen=True):
    """`folder` on `host` holds the rings of `hosts` hosts; `sentence`: the main finding, "" for none."""

    host: str
    folder: str
    hosts: int
    missing: list[str]
    sentence: str


class Tell(Request, frozen=True):
    """Tells another hub the result of gathering, because the hub that gathered may end first."""

    round: str
    found: Gathered


AnyRequest = Ping | Announce | Look | Files | Read | Gather | Tell
AnyAnswer = Done | Refused | Rings | Listing | Part | Gathered
# What msgspec raises for bytes that are no message of ours; UnicodeDecodeError is no MsgspecError.
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_requests = msgspec.msgpack.Decoder(AnyRequest)
_answers = msgspec.msgpack.Decoder(AnyAnswer)
encode = msgspec.msgpack.encode


def read_request(data: bytes) -> AnyRequest:
    """Decodes a request. Raises `HubError` for anything else."""
    try:
        request: AnyRequest = _requests.decode(data)
        return request
    except _UNREADABLE as error:
        raise HubError(f"no request: {error}") from None


def read_answer(data: bytes, address: str) -> AnyAnswer:
    """Decodes the answer of the hub at `address`. Raises `HubError` for a refusal and for anything else."""
    try:
        answer: AnyAnswer = _answers.decode(data)
    except _UNREADABLE as error:
        raise HubError(f"the hub at {address} sent an unreadable answer: {error}") from None
    if isinstance(answer, Refused):
        raise HubError(f"the hub at {address} refused: {answer.why}")
    return answer


def file_name(name: str) -> str:
    """Checks the name of a ring or of an ending file that a peer sent.

    Raises `HubError` unless it is a plain file name.
    """
    if not _NAME.fullmatch(name):
        raise HubError(f"{name[:80]!r} is not the name of a ring")
    return name


def pack(data: bytes) -> bytes:
    return zlib.compress(data, 1)


def unpack(data: bytes, size: int, most: int) -> bytes:
    """Decompresses `size` bytes. Raises `HubError` for another number of bytes, or for more than `most`."""
    if not 0 <= size <= most:
        raise HubError(f"{size} bytes are more than the allowed {most}")
    unpacker = zlib.decompressobj()
    try:
        out = unpacker.decompress(data, size + 1)
    except zlib.error as error:
        raise HubError(f"damaged data: {error}") from None
    if len(out) != size or unpacker.unconsumed_tail:
        raise HubError(f"the data has not the {size} bytes that were announced")
    return out


# --- keys ---------------------------------------------------------------------------------------------


def keys(token: str, side: str) -> tuple[bytes, bytes]:
    """Returns the (public, secret) keys that all hubs ("hub") or all clients ("guest") of a job share."""
    secret = z85.encode(
        hashlib.blake2b(token.encode(), digest_size=32, person=f"uc-{side}".encode()).digest()
    )
    return zmq.curve_public(secret), secret


class GuestKeyCheck:
    """A callback for ZeroMQ's authentication, which accepts only the key of the job's clients."""

    def __init__(self, token: str) -> None:
        self._key = keys(token, "guest")[0]

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._key


# --- connections --------------------------------------------------------------------------------------


def zmq_address(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


class HubConnection:
    """A connection to one hub, for one thread. Every wait has a time limit."""

    def __init__(self, context: zmq.Context[Any], address: str, token: str) -> None:
        self._address = address
        self.socket = socket = context.socket(zmq.DEALER)
        socket.linger = 0
        socket.maxmsgsize = MOST_ANSWERED
        socket.ipv6 = "[" in address
        socket.curve_serverkey = keys(token, "hub")[0]
        socket.curve_publickey, socket.curve_secretkey = keys(token, "guest")
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            socket.close()
            raise HubError(f"{address} is not the address of a hub: {error}") from None

    def __enter__(self) -> HubConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def ask(self, request: AnyRequest, seconds: float) -> Any:
        """Sends a request and returns the answer. Raises `HubError` on a refusal or a timeout."""
        deadline = time.monotonic() + seconds
        self.send(request)
        if not self.socket.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise HubError(self.silent(seconds))
        return self.receive()

    def send(self, request: AnyRequest) -> None:
        """Sends a request, whose answer `receive` returns when `socket` is readable. Raises `HubError`."""
        try:
            self.socket.send(encode(request), zmq.NOBLOCK)
        except zmq.Again:
            raise HubError(f"the hub at {self._address} accepts no request now") from None

    def receive(self) -> Any:
        return read_answer(self.socket.recv(), self._address)

    def silent(self, seconds: float) -> str:
        """The sentence for no answer within `seconds`."""
        return (
            f"the hub at {self._address} did not answer within {seconds:g} s: it is not there, or the"
            " job has another token"
        )
