"""The messages on a fault channel: JSON behind its length. A reader trusts nothing of it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from unicomm.comms.failures import faults
from unicomm.comms.failures.faults import Fault

from .operation import Awaited

MOST = 1 << 16  # bytes of a message, more than any rank sends
_MOST_TEXT = 400  # characters
_MOST_AWAITED = 16
_LONGEST = 1e9  # seconds
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class Ask:
    """Asks where a rank is, and how many messages with rank `of` it has begun.

    `about`: a number that the answer repeats, because answers may come late.
    """

    about: int = 0
    of: int = 0


@dataclass(frozen=True)
class Here:
    """The answer to `Ask`: where a rank is.

    Attributes:
        entered: number of collectives it has entered. inside: the operation it is in, "" for none.
        sent, taken: number of messages to and from the rank in the question that it has begun.
        sent_parts, taken_parts: number of those that are parts of collectives.
        where: its user frame.
        awaits: the messages that it waits for, or some of them: first the receives from any rank, then those
            with the rank in the question. Some may be through already.
        about: the number of the question.
        whole: number of collectives it has entered of which those in `entered` are parts.
    """

    entered: int
    inside: str
    sent: int
    taken: int
    sent_parts: int
    taken_parts: int
    where: str
    awaits: tuple[Awaited, ...] = ()
    about: int = 0
    whole: int = 0


@dataclass(frozen=True)
class Bye:
    """The rank finalizes, after that many collectives, and messages to and from the reading rank."""

    entered: int
    sent: int = 0
    taken: int = 0
    sent_parts: int = 0
    taken_parts: int = 0


@dataclass(frozen=True)
class Slow:
    """The rank does `name` and asks the others to wait for up to `seconds` from now."""

    name: str
    seconds: float


Message = Fault | Ask | Here | Bye | Slow
_KINDS: dict[str, type[Ask | Here | Bye | Slow]] = {"ask": Ask, "here": Here, "bye": Bye, "slow": Slow}


def encode(message: Message) -> bytes:
    """A message as the bytes that `Inbox` makes it of. Long texts and lists are cut."""
    if isinstance(message, Fault):
        fields = {"kind": "fault", **faults.fault_to_dict(message)}
    else:
        fields = {"kind": type(message).__name__.lower(), **asdict(message)}
    if isinstance(message, Here):
        fields |= {"where": message.where[-_MOST_TEXT:], "awaits": message.awaits[:_MOST_AWAITED]}
    elif isinstance(message, Slow):
        fields |= {"name": message.name[:_MOST_TEXT], "seconds": min(message.seconds, _LONGEST)}
    data = json.dumps(fields).encode()
    return _LENGTH.pack(len(data)) + data


class Inbox:
    """Makes the messages of one connection of its bytes."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yields the messages completed by `data`. Raises `ValueError` as soon as bytes are no message."""
        self._data += data
        while len(self._data) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data)
            if length > MOST:
                raise ValueError(f"a message of {length} bytes")
            end = _LENGTH.size + length
            if len(self._data) < end:
                return
            body = bytes(self._data[_LENGTH.size : end])
            del self._data[:end]
            yield parse(body)


def parse(body: bytes) -> Message:
    """Reads one message; raises `ValueError` for anything else."""
    try:
        fields = json.loads(body)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(fields, dict):
        raise ValueError("no object")
    kind = fields.get("kind")
    if kind == "fault":
        return faults.fault_from_dict(fields)
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError("unknown kind")
    of_kind = _KINDS[kind]
    return of_kind(**{name: _READ[name](fields, name) for name in of_kind.__dataclass_fields__})


def _awaits(fields: dict[str, Any], name: str) -> tuple[Awaited, ...]:
    value = fields.get(name)
    if not isinstance(value, list) or len(value) > _MOST_AWAITED:
        raise ValueError(f"{name} is no list of messages")
    found = []
    for one in value:
        if not isinstance(one, list) or [type(part) for part in one] != [int, bool, int, int, int]:
            raise ValueError(f"{name} holds what is no message")
        peer, *rest = one
        if not -1 <= peer < 1 << 31 or min(rest) < 0:
            raise ValueError(f"{name} holds what is no message")
        found.append(Awaited(*one))
    return tuple(found)


def _number(fields: dict[str, Any], name: str) -> int:
    value = fields.get(name)
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{name} is no number")
    return value


def _seconds(fields: dict[str, Any], name: str) -> float:
    value = fields.get(name)
    if not isinstance(value, (int, float)) or not 0 <= value <= _LONGEST:
        raise ValueError(f"{name} is no duration")
    return float(value)


def _text(fields: dict[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name} is no text")
    return value[:_MOST_TEXT]


_READ: dict[str, Callable[[dict[str, Any], str], Any]] = {
    **dict.fromkeys(
        ("entered", "sent", "taken", "sent_parts", "taken_parts", "about", "of", "whole"), _number
    ),
    **dict.fromkeys(("inside", "where", "name"), _text),
    "awaits": _awaits,
    "seconds": _seconds,
}
