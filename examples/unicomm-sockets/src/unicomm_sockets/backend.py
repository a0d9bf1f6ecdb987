"""A backend over TCP sockets: two connections between any two ranks, one for data and one for words.

A message on a data connection is a header (bytes, tag) and its bytes. A word tells why a rank's communicator
has ended: a line of JSON. unicomm composes all collectives from `exchange`.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence

from unicomm import AbortedError, BackendError, CommError, CommTimeoutError, MismatchError, PeerLostError
from unicomm.comms.backend import Backend, Capabilities, Setup
from unicomm.comms.operations.call import Message
from unicomm.comms.options import Hint

from .meeting import DATA, WORDS, Sockets, meet

_HEADER = struct.Struct("!QI")
_ERRORS = {kind.__name__: kind for kind in (AbortedError, BackendError, CommTimeoutError, PeerLostError)}
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class SocketsBackend(Backend):
    """One rank's end of a communicator over sockets."""

    name = "sockets"
    protocol_version = 1
    capabilities = Capabilities(
        device_types=frozenset({"cpu"}),
        bytes_only=True,  # all tensors come as flat uint8
        hints=(Hint("address", str, "127.0.0.1", "Address of this host at which its ranks listen."),),
    )

    def __init__(self, rank: int, data: Sockets, words: Sockets) -> None:
        self._rank = rank
        self._words = words
        self._links = {peer: _Link(peer, one) for peer, one in data.items()}
        self._broken: CommError | None = None
        self._lock = threading.Lock()
        self._wake, self._woken = socket.socketpair()

    @classmethod
    def connect(cls, setup: Setup) -> SocketsBackend:
        connections = meet(setup) if setup.size > 1 else ({}, {})
        return cls(setup.rank, connections[DATA], connections[WORDS])

    # --- messages -------------------------------------------------------------------------------------------

    def exchange(self, messages: Sequence[Message], timeout: float) -> None:
        """Sends and receives at once, as each connection is ready: no message waits for another peer's."""
        deadline = time.monotonic() + timeout
        self._to_itself([m for m in messages if m.peer == self._rank])
        links = [self._links[peer] for peer in sorted({m.peer for m in messages} - {self._rank})]
        for link in links:
            link.begin([m for m in messages if m.peer == link.peer])
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, _READ)
            for peer, one in self._words.items():
                with contextlib.suppress(ValueError):  # closed: this rank has ended, which is seen below
                    selector.register(one, _READ, peer)
            while waiting := [link for link in links if link.events]:
                if self._broken is not None:
                    raise self._broken.again(self._broken.message)
                for link in links:
                    link.watch(selector)
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready and time.monotonic() >= deadline:
                    peers = [link.peer for link in waiting]
                    text = f"ranks {peers} did not come within {timeout:g} s"
                    raise self._end(CommTimeoutError(text, culprits=peers, hint="see what they are doing"))
                for key, events in ready:
                    self._serve(key, events, selector)
        for link in links:
            link.raise_mismatch(self._rank)

    def _serve(self, key: selectors.SelectorKey, events: int, selector: selectors.BaseSelector) -> None:
        if isinstance(key.data, _Link):
            try:
                key.data.move(events)
            except OSError as error:
                text = f"rank {key.data.peer} has left or died: {error}"
                raise self._end(
                    PeerLostError(text, culprits=[key.data.peer], hint="look at its log")
                ) from error
        elif key.data is None:
            self._woken.recv(64)
        else:
            self._hear(key.data, selector)

    def _to_itself(self, messages: list[Message]) -> None:
        """Copies messages from this rank to itself."""
        sends = [m for m in messages if m.send]
        for receive in (m for m in messages if not m.send):
            send = next(m for m in sends if m.tag == receive.tag)
            sends.remove(send)
            if send.tensor.nbytes != receive.tensor.nbytes:
                raise _mismatch(self._rank, self._rank, send.tensor.nbytes, receive.tensor.nbytes)
            receive.tensor.copy_(send.tensor)

    # --- the end --------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Called from any thread: `exchange` raises here, and the other ranks hear of it."""
        self.give_up(AbortedError(f"rank {self._rank} has aborted", culprits=[self._rank]))

    def give_up(self, error: CommError) -> None:
        """Like `abort`, for another reason."""
        self._end(error)
        self._wake.send(b"!")

    def _end(self, error: CommError) -> CommError:
        """Ends this communicator, and tells the other ranks why: they may wait for this one, or come to."""
        with self._lock:
            if self._broken is None:
                self._broken = error
                kind = next((name for name, one in _ERRORS.items() if isinstance(error, one)), "BackendError")
                self._tell(kind, error.message, error.culprits)
            return self._broken

    def _tell(self, kind: str, text: str = "", culprits: Sequence[int] = ()) -> None:
        word = json.dumps({"kind": kind, "text": text, "culprits": list(culprits)}).encode() + b"\n"
        for one in self._words.values():
            with contextlib.suppress(OSError):  # the rank is gone, or has ended
                one.send(word)

    def _hear(self, peer: int, selector: selectors.BaseSelector) -> None:
        """Reads another rank's word. A rank that is done, or gone, ends only those that wait for its data."""
        one = self._words[peer]
        try:
            said = one.recv(1 << 16)
        except OSError:
            said = b""
        if not said:
            selector.unregister(one)
            return
        word = json.loads(said.splitlines()[0])
        if word["kind"] in _ERRORS:
            error = _ERRORS[word["kind"]](word["text"], culprits=word["culprits"], hint="look at that rank")
            raise self._end(error)

    def close(self) -> None:
        with self._lock:
            if self._broken is None:
                self._tell("finalized")
        for one in (*self._words.values(), *(link.socket for link in self._links.values())):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_WR)
            one.close()
        self._wake.close()
        self._woken.close()


class _Link:
    """The data connection to a peer: what is to be sent and received there in the current exchange."""

    def __init__(self, peer: int, one: socket.socket) -> None:
        self.peer, self.socket = peer, one
        self._sends: deque[memoryview] = deque()
        self._receives: list[Message] = []
        self._early: list[tuple[int, bytearray]] = []  # messages of tags that nobody has asked for yet
        self._head = bytearray()
        self._into: memoryview | None = None  # the rest of the message that is being read
        self._whole: tuple[int, bytearray] | None = None  # tag and bytes of one that goes into `_early`
        self._wrong: tuple[int, int] | None = None  # bytes sent and expected
        self._watched = 0

    def begin(self, messages: list[Message]) -> None:
        self._wrong, self._watched = None, 0
        for message in messages:
            if message.send:
                data = memoryview(message.tensor.detach().numpy()).cast("B")
                self._sends += [memoryview(_HEADER.pack(len(data), message.tag)), data]
            else:
                self._receives.append(message)
        for tag, data in [*self._early]:
            if message := self._asked(tag):
                self._early.remove((tag, data))
                self._take(message, data)

    @property
    def events(self) -> int:
        """What this link still waits for."""
        return (_READ if self._receives or self._into is not None else 0) | (_WRITE if self._sends else 0)

    def watch(self, selector: selectors.BaseSelector) -> None:
        if self.events == self._watched:
            return
        if self._watched:
            selector.unregister(self.socket)
        if self.events:
            selector.register(self.socket, self.events, self)
        self._watched = self.events

    def move(self, events: int) -> None:
        """Sends and receives as much as can be at once. Raises `OSError` when the peer is gone."""
        with contextlib.suppress(BlockingIOError):
            if events & _WRITE:
                self._send()
        with contextlib.suppress(BlockingIOError):
            if events & _READ:
                self._receive()

    def _send(self) -> None:
        while self._sends:
            part = self._sends[0]
            sent = self.socket.send(part) if len(part) else 0
            if sent < len(part):
                self._sends[0] = part[sent:]
                return
            self._sends.popleft()

    def _receive(self) -> None:
        while self._receives or self._into is not None:
            if self._into is None:
                piece = self.socket.recv(_HEADER.size - len(self._head))
                if not piece:
                    raise ConnectionError("the connection has ended")
                self._head += piece
                if len(self._head) == _HEADER.size:
                    self._open(*_HEADER.unpack(self._head))
                    self._head.clear()
            else:
                count = self.socket.recv_into(self._into)
                if not count:
                    raise ConnectionError("the connection has ended")
                self._into = self._into[count:]
            if self._into is not None and not len(self._into):
                self._into = None
                if self._whole is not None:
                    self._early.append(self._whole)
                    self._whole = None

    def _open(self, size: int, tag: int) -> None:
        """Finds out where a message goes whose header has come."""
        message = self._asked(tag)
        if message is not None and message.tensor.nbytes == size:
            self._into = memoryview(message.tensor.numpy()).cast("B")
            return
        data = bytearray(size)
        self._into = memoryview(data)
        if message is None:
            self._whole = (tag, data)
        else:  # read, so that the next message can be, and dropped
            self._wrong = (size, message.tensor.nbytes)

    def _asked(self, tag: int) -> Message | None:
        """Takes the first receive of a tag off the list."""
        for message in self._receives:
            if message.tag == tag:
                self._receives.remove(message)
                return message
        return None

    def _take(self, message: Message, data: bytearray) -> None:
        if message.tensor.nbytes == len(data):
            memoryview(message.tensor.numpy()).cast("B")[:] = data
        else:
            self._wrong = (len(data), message.tensor.nbytes)

    def raise_mismatch(self, rank: int) -> None:
        if self._wrong is not None:
            raise _mismatch(self.peer, rank, *self._wrong)


def _mismatch(sender: int, receiver: int, sent: int, expected: int) -> MismatchError:
    return MismatchError(
        f"rank {sender} sent {sent} bytes, and rank {receiver} expects {expected}",
        culprits=sorted({sender, receiver}),
        hint="send and receive tensors of one size and type",
    )
