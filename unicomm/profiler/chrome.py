"""Chrome traces of any size, read and written a piece at a time, compressed or not."""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import IO, Any

import msgspec

Event = dict[str, Any]
Progress = Callable[[int, int], None]

_BLOCK = 4 << 20
_LONGEST = 256 << 20  # bytes of one event or of the head, before a file counts as broken
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(rb"\}\s*,\s*(?=\{)")
_GZIP = b"\x1f\x8b"


class Exact(float):
    """A number with its text: a double has no room for a time of today in nanoseconds."""

    __slots__ = ("text",)
    text: str

    def __new__(cls, text: str) -> Exact:
        self = super().__new__(cls, text)
        self.text = text
        return self

    @property
    def thousandfold(self) -> int:
        """Microseconds as nanoseconds."""
        return int(Decimal(self.text) * 1000)


def nanoseconds(microseconds: Any) -> int:
    """A time of an event."""
    return microseconds.thousandfold if isinstance(microseconds, Exact) else round(microseconds * 1000)


_events = msgspec.json.Decoder(list[Event])
_exact_events = msgspec.json.Decoder(list[Event], float_hook=Exact)
_any = msgspec.json.Decoder(dict[str, Any])
_encoder = msgspec.json.Encoder()


class TraceError(ValueError):
    """A file is no trace, or a broken one, or traces do not fit together; the message says in what way."""


class Reader:
    """One trace. `head` and `tail` are what stands before and after the events; `pieces` gives those."""

    def __init__(self, path: Path | str, exact: bool = False) -> None:
        """`exact`: numbers with a fraction come as `Exact`."""
        self.path = Path(path)
        self._decoder = _exact_events if exact else _events
        try:
            self._raw: IO[bytes] = self.path.open("rb")
            self.size = self.path.stat().st_size
            packed = self._raw.read(2) == _GZIP
            self._raw.seek(0)
        except OSError as error:
            raise TraceError(f"cannot read {path}: {error}") from None
        self._file: IO[bytes] = gzip.GzipFile(fileobj=self._raw) if packed else self._raw  # type: ignore[assignment]
        self.tail: dict[str, Any] = {}
        self._buffer = b""
        self._bare = False  # a list of events with nothing around it
        try:
            self.head = self._read_head()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._file.close()
        self._raw.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        self.close()
        damage = isinstance(error, (TypeError, KeyError, AttributeError, OverflowError, ValueError))
        if damage and not isinstance(error, TraceError):
            # Events are used as they come: looking at every field first would take longer than the rest.
            raise self.broken(f"an event of it is damaged ({error!r})") from error

    @property
    def position(self) -> int:
        """Bytes of the file that have been read."""
        return self._raw.tell()

    def broken(self, why: str) -> TraceError:
        return TraceError(
            f"{self.path} is no Chrome trace: {why}; write it anew with prof.export_chrome_trace"
        )

    def _more(self) -> bool:
        try:
            block = self._file.read(_BLOCK)
        except (OSError, EOFError) as error:
            raise self.broken(str(error)) from None
        self._buffer += block
        return bool(block)

    def _read_head(self) -> dict[str, Any]:
        at = 0
        while self._more():
            start = self._buffer.lstrip()[:1]
            if start == b"[":
                self._bare = True
                self._buffer = self._buffer[self._buffer.index(b"[") + 1 :]
                return {}
            if start not in (b"{", b""):
                break
            for found in _EVENTS.finditer(self._buffer, at):
                # The key at the top, not one within something else: what is before it closes with one brace.
                try:
                    head = _any.decode(self._buffer[: found.end()] + b"]}")
                except msgspec.DecodeError:
                    continue
                self._buffer = self._buffer[found.end() :]
                del head["traceEvents"]
                return head
            at = max(0, len(self._buffer) - 64)
            if len(self._buffer) > _LONGEST:
                break
        raise self.broken("it has no list 'traceEvents'")

    def pieces(self) -> Iterator[list[Event]]:
        """All events, some at a time, in the order of the file."""
        more = True
        while more:
            more = self._more()
            if not more:
                break
            piece = self._whole()
            if piece:
                yield piece
            elif len(self._buffer) > _LONGEST:
                raise self.broken(f"an event of more than {_LONGEST >> 20} MB")
        yield self._last()

    def _whole(self) -> list[Event]:
        """The events that are in the buffer as a whole."""
        low = max(0, len(self._buffer) - (_BLOCK // 4))
        for cut in reversed([m.start() + 1 for m in _BETWEEN.finditer(self._buffer, low)][-64:]):
            # A list that is cut anywhere but between its elements does not decode.
            try:
                found = self._decoder.decode(b"[" + self._buffer[:cut] + b"]")
            except msgspec.DecodeError:
                continue
            rest = self._buffer[cut:].lstrip()
            self._buffer = rest[1:]
            return found
        return []

    def _last(self) -> list[Event]:
        end = len(self._buffer)
        while (end := self._buffer.rfind(b"]", 0, end)) >= 0:
            try:
                found = self._decoder.decode(b"[" + self._buffer[:end] + b"]")
                self.tail = {} if self._bare else _any.decode(b'{"traceEvents":[' + self._buffer[end:])
            except msgspec.DecodeError:
                continue
            self.tail.pop("traceEvents", None)
            return found
        if self._bare:  # the format allows to leave the bracket out
            try:
                return self._decoder.decode(b"[" + self._buffer.rstrip().rstrip(b",") + b"]")
            except msgspec.DecodeError:
                pass
        raise self.broken("it ends in the middle")


class Writer:
    """A trace that is written piece by piece; `.gz` at the end of the name compresses it."""

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        raw = path.open("wb")
        self._file: IO[bytes] = (
            gzip.GzipFile("", "wb", compresslevel=1, fileobj=raw, mtime=0) if path.suffix == ".gz" else raw  # type: ignore[assignment]
        )
        self._raw = raw
        self._first = True
        self._file.write(_encoder.encode(facts)[:-1] + (b"," if facts else b"") + b'"traceEvents":[\n')

    def write(self, events: Sequence[Event]) -> None:
        if events:
            self.write_text(_encoder.encode(events)[1:-1])

    def write_text(self, text: bytes) -> None:
        """Events as JSON, with commas between them."""
        if not self._first:
            self._file.write(b",\n")
        self._first = False
        self._file.write(text)

    def close(self) -> None:
        self._file.write(b"\n]}\n")
        self._file.close()
        self._raw.close()
