"""Chrome traces of any size, read and written a piece at a time, compressed or not."""

from __future__ import annotations

import contextlib
import gzip
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import UNSET, Raw, UnsetType

from unicomm.flight_recorder.memory import Memory, needed_by_json
from unicomm.flight_recorder.ring.files import open_file

Event = dict[str, Any]
Progress = Callable[[int, int], None]
Decoded = TypeVar("Decoded")

_BLOCK = 4 << 20
LATEST = 1 << 61  # ns since 1970: the year 2043; differences of times, and their sums, stay within 64 bits
_LONGEST_HEAD = 512 << 20  # bytes before the events, the table of operations among them
_LONGEST = 64 << 20  # bytes of one event; a file with a longer one counts as broken
_LARGEST = 1 << 42  # bytes of a file
_MOST_LISTS = 64  # keys "traceEvents" that are tried: each try reads all that stands before it
_USUAL = 3 * _BLOCK  # bytes in which events end: only longer ones are counted before they are decoded
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(rb"\}\s*,\s*(?=\{)")
_GZIP = b"\x1f\x8b"
_SPACE = b" \t\r\n"


class Exact(float):
    """A number with its text, because a double cannot hold a present-day time in nanoseconds."""

    __slots__ = ("text",)
    text: str

    def __new__(cls, text: str) -> Exact:
        self = super().__new__(cls, text)
        self.text = text
        return self

    @property
    def thousandfold(self) -> int:
        """The number times 1000: microseconds as nanoseconds."""
        return int(Decimal(self.text) * 1000)


def nanoseconds(microseconds: Any) -> int:
    """Converts a time of an event. Raises `ValueError` for one that no clock shows."""
    if not -LATEST < microseconds * 1000 < LATEST:
        raise ValueError("a time is out of range")
    return microseconds.thousandfold if isinstance(microseconds, Exact) else round(microseconds * 1000)


def all_nanoseconds(microseconds: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Converts times of events; those that no clock shows become the latest or the earliest one."""
    most = LATEST / 1000
    return np.rint(np.clip(microseconds, -most, most) * 1000).astype(np.int64)


def base_of(facts: dict[str, Any], path: Path | str) -> int:
    """Returns the time to which those of the events are added, in ns since 1970. Raises `TraceError`."""
    base = facts.get("baseTimeNanoseconds", 0)
    if not isinstance(base, int | float) or not 0 <= base < LATEST:
        raise TraceError(f"{path}: baseTimeNanoseconds is no time")
    return int(base)


class TraceEvent(msgspec.Struct, omit_defaults=True, gc=False):
    """An event with the fields of the format, which decodes faster than a dictionary. Arguments stay JSON."""

    ph: str = ""
    name: str = ""
    cat: str = ""
    pid: int | str | UnsetType = UNSET
    tid: int | str | UnsetType = UNSET
    ts: float | UnsetType = UNSET
    dur: float | UnsetType = UNSET
    args: Raw | UnsetType = UNSET
    id: int | str | UnsetType = UNSET
    bp: str | UnsetType = UNSET
    s: str | UnsetType = UNSET
    tts: Raw | UnsetType = UNSET
    tdur: Raw | UnsetType = UNSET
    id2: Raw | UnsetType = UNSET
    scope: Raw | UnsetType = UNSET
    cname: Raw | UnsetType = UNSET


Decoder = msgspec.json.Decoder
EXACT: Decoder[list[Event]] = Decoder(list[Event], float_hook=Exact)  # numbers with a fraction are `Exact`
TYPED: Decoder[list[TraceEvent]] = Decoder(list[TraceEvent])
NOTHING: Decoder[list[Raw]] = Decoder(list[Raw])  # skips the events, to read what comes after them
_plain: Decoder[list[Event]] = Decoder(list[Event])
_parts = Decoder(dict[str, Raw])
_encoder = msgspec.json.Encoder()


# What decoding bytes, and using the events that they are decoded to, raises for a damaged trace. To check
# every field of every event first would take longer than all the rest.
_DAMAGE = (
    *(TypeError, KeyError, AttributeError, ArithmeticError, ValueError, RecursionError),
    msgspec.MsgspecError,
)


class TraceError(ValueError):
    """A file is no trace or a damaged one, or traces do not belong together; the message says why."""


def _why(error: BaseException) -> str:
    return "it is nested too deeply" if isinstance(error, RecursionError) else repr(error)[:300]


class Reader:
    """Reads one trace. `head` and `tail` hold the keys around the events; `pieces` yields the events."""

    def __init__(self, path: Path | str, facts: bool = True, memory: Memory | None = None) -> None:
        """Reads up to the events. Raises `TraceError`, also when an uncompressed file is cut off at its end.

        Without `facts`, `head` and `tail` stay empty: they may hold a table with a million rows. They are
        counted in `memory` until `forget` is called.
        """
        self._facts = facts
        self._memory = Memory(None, TraceError) if memory is None else memory
        self._taken = 0
        self.path = Path(path)
        self.tail: dict[str, Any] = {}
        self._buffer = bytearray()
        self._bare = False  # a list of events with nothing around it
        try:
            self._raw: IO[bytes] = os.fdopen(open_file(self.path, most=_LARGEST)[0], "rb")
        except OSError as error:
            raise TraceError(f"cannot read {path}: {error}") from None
        self._file = self._raw
        try:
            packed = self._raw.read(2) == _GZIP
            self.size = self._raw.seek(0, 2)
            self._raw.seek(max(0, self.size - 4096))
            end = self._raw.read().rstrip(_SPACE)[-1:]
            self._raw.seek(0)
            if packed:
                self._file = gzip.GzipFile(fileobj=self._raw)  # type: ignore[assignment]
            self.head = self._read_head()
            if not packed and not self._bare and end != b"}":
                raise self.broken("it ends in the middle")
        except OSError as error:
            self.close()
            raise TraceError(f"cannot read {path}: {error}") from None
        except TraceError:
            self.close()
            raise
        except _DAMAGE as error:
            self.close()
            raise self.broken(_why(error)) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._file.close()
        self._raw.close()

    def forget(self) -> None:
        """Forgets `head` and `tail`, whose memory is free again."""
        self.head, self.tail = {}, {}
        self._memory.give_back(self._taken)
        self._taken = 0

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        self.close()
        if isinstance(error, _DAMAGE) and not isinstance(error, TraceError):
            raise self.broken(f"an event of it is damaged ({_why(error)})") from error

    @property
    def position(self) -> int:
        """The number of bytes of the file that have been read."""
        return self._raw.tell()

    def broken(self, why: str) -> TraceError:
        return TraceError(
            f"{self.path} is no Chrome trace: {why}; write it anew with prof.export_chrome_trace"
        )

    def _more(self) -> bool:
        try:
            block = self._file.read(_BLOCK)
        except (OSError, EOFError, zlib.error) as error:
            raise self.broken(str(error)) from None
        self._buffer += block
        return bool(block)

    def _read_head(self) -> dict[str, Any]:
        at = tries = 0
        longest = min(_LONGEST_HEAD, max(self._memory.left // 3, _BLOCK))  # decoding takes two copies
        while self._more():
            if at == 0:
                start = self._buffer[:_BLOCK].lstrip(_SPACE)[:1]
                if start == b"[":
                    self._bare = True
                    del self._buffer[: self._buffer.index(b"[") + 1]
                    return {}
                if start and start != b"{":
                    break
            for end in [found.end() for found in _EVENTS.finditer(self._buffer, at)]:
                tries += 1
                if tries > _MOST_LISTS:
                    raise self.broken("it has no list 'traceEvents' that is not in another one")
                # Accepts the key at the top level only: the text before it then closes with one brace.
                try:
                    parts = _parts.decode(self._buffer[:end] + b"]}")
                except (msgspec.DecodeError, UnicodeDecodeError):
                    continue
                del self._buffer[:end]
                del parts["traceEvents"]
                return self._decoded(parts)
            at = max(0, len(self._buffer) - 64)
            if len(self._buffer) > longest:
                raise self.broken(f"the first {longest >> 20} MB hold no list 'traceEvents'")
        raise self.broken("it has no list 'traceEvents'")

    def _decoded(self, parts: dict[str, Raw]) -> dict[str, Any]:
        if not self._facts:
            return {}
        size = sum(needed_by_json(bytes(part)) for part in parts.values())
        self._memory.take(size, self.path)
        self._taken += size
        return {key: msgspec.json.decode(value) for key, value in parts.items()}

    def pieces(self) -> Iterator[list[Event]]:
        """Yields all events as dictionaries, several at a time, in the order of the file."""
        return self.pieces_as(_plain)

    def pieces_as(self, decoder: Decoder[list[Decoded]]) -> Iterator[list[Decoded]]:
        """Yields all events in the type that `decoder` decodes to."""
        while self._more():
            piece = self._whole(decoder)
            if piece:
                yield piece
            elif len(self._buffer) > _LONGEST:
                raise self.broken(f"an event is damaged, or has more than {_LONGEST >> 20} MB")
        yield self._last(decoder)

    def _whole(self, decoder: Decoder[list[Decoded]]) -> list[Decoded]:
        """Decodes the events that are complete in the buffer, and removes them from it."""
        self._check_events(self._buffer)
        low = max(0, len(self._buffer) - (_BLOCK // 4))
        for cut in reversed([m.start() + 1 for m in _BETWEEN.finditer(self._buffer, low)][-64:]):
            # A list that is not cut exactly between two elements does not decode.
            try:
                found = decoder.decode(b"[" + self._buffer[:cut] + b"]")
            except msgspec.ValidationError:
                raise  # valid JSON, but not an event
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
            del self._buffer[: self._buffer.index(b",", cut) + 1]
            return found
        return []

    def _check_events(self, text: bytes | bytearray | Raw) -> None:
        """Raises `TraceError` if decoding unusually long events needs too much memory."""
        if len(text) > _USUAL:
            self._memory.check(needed_by_json(bytes(text)), self.path)

    def _last(self, decoder: Decoder[list[Decoded]]) -> list[Decoded]:
        try:
            if self._bare:
                text = bytes(self._buffer.rstrip(_SPACE))
                if not text.endswith(b"]"):  # the format allows the closing bracket to be missing
                    text = text.removesuffix(b",") + b"]"
                self._check_events(text)
                return decoder.decode(b"[" + text)
            parts = _parts.decode(b'{"traceEvents":[' + self._buffer)
            self._check_events(events := parts.pop("traceEvents"))
            found = decoder.decode(events)
            self.tail = self._decoded(parts)
        except (TraceError, msgspec.ValidationError):
            raise
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self.broken(f"it ends in the middle, or is damaged there ({error})") from None
        return found


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yields the path of a temporary file, which replaces `target` when the block succeeds.

    Raises `TraceError` when it cannot be written.
    """
    end = ".gz" if target.suffix == ".gz" else ""
    part = target.with_name(f"{target.name}.{os.getpid()}.part{end}")
    try:
        yield part
        part.replace(target)
    except OSError as error:
        raise TraceError(f"cannot write {target}: {error}") from None
    finally:
        part.unlink(missing_ok=True)


class Writer:
    """Writes a trace piece by piece, compressed when the file name ends in `.gz`."""

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        self._raw = path.open("wb")
        self._file: IO[bytes] = self._raw
        if path.suffix == ".gz":
            self._file = gzip.GzipFile("", "wb", compresslevel=1, fileobj=self._raw, mtime=0)  # type: ignore[assignment]
        self._first = True
        self._file.write(_encoder.encode(facts)[:-1] + (b"," if facts else b"") + b'"traceEvents":[\n')

    def write(self, events: Sequence[Event | TraceEvent]) -> None:
        if events:
            self.write_text(_encoder.encode(events)[1:-1])

    def write_text(self, text: bytes) -> None:
        """Writes events that are already JSON, separated by commas."""
        if not self._first:
            self._file.write(b",\n")
        self._first = False
        if not text.isascii():
            # What a trace says of its events is copied as it stands; JSON has to be UTF-8, and it may not be.
            text = text.decode("utf-8", "replace").encode()
        self._file.write(text)

    def close(self, facts: dict[str, Any] | None = None) -> None:
        """Writes `facts` after the events and closes the file."""
        more = b"," + _encoder.encode(facts)[1:-1] if facts else b""
        try:
            self._file.write(b"\n]" + more + b"}\n")
        finally:
            self._file.close()
            self._raw.close()
