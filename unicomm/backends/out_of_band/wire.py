"""The messages on a fault channel: JSON behind its length. A reader trusts nothing of it."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from unicomm.comms.failures import faults
from unicomm.comms.failures.faults import Fault

MOST = 1 << 16  # bytes of a message, more than any rank sends
_MOST_TEXT = 400  # characters
_MOST_PENDING = 16
_LONGEST = 1e9  # seconds
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class Ask:
    """Asks where a rank is."""


class Pending(NamedTuple):
    """A send or receive under way: its number for that peer and direction, and its bytes."""

    send: bool
    number: int
    nbytes: int


@dataclass(frozen=True)
class Here:
    """The answer to `Ask`: where a rank is.

    Attributes:
        entered: number of collectives it has entered. inside: the operation it is in, "" for none.
        sent, taken: number of messages to and from the asking rank that it has begun.
        where: its user frame.
        pending: the messages to and from the asking rank that it waits for.
    """

    entered: int
    inside: str
    sent: int
    taken: int
    where: str
    pending: tuple[Pending, ...] = ()


@dataclass(frozen=True)
class Bye:
    """The rank finalizes, after that many collectives."""

    entered: int


@dataclass(frozen=True)
class Slow:
    """The rank does `name` and asks the others to wait for up to `seconds` from now."""

    name: str
    seconds: float


Message = Fault | Ask | Here | Bye | Slow


def _framed(kind: str, fields: dict[str, Any]) -> bytes:
    data = json.dumps({"kind": kind, **fields}).encode()
    return _LENGTH.pack(len(data)) + data


def fault(it: Fault) -> bytes:
    return _framed("fault", faults.fault_to_dict(it))


def ask() -> bytes:
    return _framed("ask", {})


def here(it: Here) -> bytes:
    pending = [list(one) for one in it.pending[:_MOST_PENDING]]
    return _framed("here", asdict(it) | {"where": it.where[-_MOST_TEXT:], "pending": pending})


def bye(entered: int) -> bytes:
    return _framed("bye", {"entered": entered})


def slow(name: str, seconds: float) -> bytes:
    return _framed("slow", {"name": name[:_MOST_TEXT], "seconds": min(seconds, _LONGEST)})


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
    if kind == "ask":
        return Ask()
    if kind == "bye":
        return Bye(_number(fields, "entered"))
    if kind == "here":
        numbers = {name: _number(fields, name) for name in ("entered", "sent", "taken")}
        pending = _pending(fields)
        return Here(inside=_text(fields, "inside"), where=_text(fields, "where"), pending=pending, **numbers)
    if kind == "slow":
        return Slow(_text(fields, "name"), _seconds(fields, "seconds"))
    if kind != "fault":
        raise ValueError("unknown kind")
    return faults.fault_from_dict(fields)


def _pending(fields: dict[str, Any]) -> tuple[Pending, ...]:
    value = fields.get("pending")
    if not isinstance(value, list) or len(value) > _MOST_PENDING:
        raise ValueError("pending is no list of messages")
    found = []
    for one in value:
        if not isinstance(one, list) or [type(part) for part in one] != [bool, int, int] or min(one) < 0:
            raise ValueError("pending holds what is no message")
        found.append(Pending(*one))
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
