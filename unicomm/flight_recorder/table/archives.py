"""Archives of rings and dumps: their members, in bounded memory, whatever somebody has packed."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
import zipfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from unicomm.flight_recorder.memory import Memory
from unicomm.flight_recorder.ring.files import open_file
from unicomm.flight_recorder.ring.reader import InputRemark

_MOST_MEMBERS = 1 << 20
_DEEPEST = 3  # archives in archives; some hold themselves
HEAD = 512  # bytes of a file that tell what it is
_ONE_READ = 1 << 20
_MEMBER = 2048  # bytes in memory for a member, or a remark about it, beside what it holds
_DIRECTORY = 40  # bytes in memory for each of a zip's directory, or of a tar's extended header
_GZIP, _BZIP2, _XZ = b"\x1f\x8b", b"BZh", b"\xfd7zXZ"


@dataclass
class Input:
    """One file, or one member of an archive.

    Attributes:
        size: in bytes.
        head: the first bytes.
        newest: the wall-clock time of the last change, in seconds.
        file: None for a member of an archive.
        owners: of the file; see `open_file`.
    """

    path: str
    read: Callable[[], bytes]
    size: int
    head: bytes
    newest: float = 0.0
    file: Path | None = None
    owners: Collection[int] | None = None

    def opened(self) -> BinaryIO:
        """Opens the input as a file. Raises `OSError`."""
        if self.file is None:
            return io.BytesIO(self.read())
        return open(open_file(self.file, self.owners)[0], "rb")


def kind_of_archive(one: Input) -> str | None:
    """Returns "zip" or "tar", which stands for compressed files as well; None if it is no archive."""
    if one.head.startswith(b"PK\x03\x04"):
        return "zip"
    packed = one.head.startswith((_GZIP, _BZIP2, _XZ))
    return "tar" if packed or one.head[257:262] == b"ustar" else None


class _TooMuchError(Exception):
    """An archive holds more than may be unpacked."""


class _Bounded(io.BufferedReader):
    """The file of an archive, of which no more than `most` bytes are read at once.

    Python's readers read a zip's directory, and a tar's extended headers, at once and without a bound.
    """

    def __init__(self, raw: BinaryIO, most: int, error: _TooMuchError) -> None:
        super().__init__(raw)  # type: ignore[arg-type]  # mypy: all files of Python can be read raw
        self._most, self._error = max(most, _ONE_READ), error

    def read(self, size: int | None = -1, /) -> bytes:
        most = self._most + 1
        data = super().read(most if size is None or size < 0 else min(size, most))
        if len(data) > self._most:
            raise self._error
        return data


@dataclass
class Unpacker:
    """Unpacks archives into memory.

    What does not fit, or cannot be unpacked, becomes a remark.
    """

    room: Memory
    remarks: list[InputRemark]
    _members: int = 0

    def members(self, one: Input, depth: int = 1) -> Iterator[Input]:
        """Yields the members of an archive, and those of archives in it."""
        kind = kind_of_archive(one)
        if depth > _DEEPEST:
            self._remark(one.path, f"the archive is in {_DEEPEST} others, so it was left out")
            return
        try:
            for path, member in self._zip(one) if kind == "zip" else self._tar(one):
                try:
                    with member() as opened:
                        data = self._read(opened)
                except _TooMuchError:
                    raise
                except Exception as error:  # see below
                    self._remark(path, f"cannot be unpacked: {error or type(error).__name__}")
                    continue
                unpacked = Input(path, lambda data=data: data, len(data), data[:HEAD], one.newest)  # type: ignore[misc]
                if kind_of_archive(unpacked) is None:
                    yield unpacked
                else:
                    yield from self.members(unpacked, depth + 1)
                    self.room.give_back(len(data))
        except _TooMuchError as error:
            self._remark(one.path, str(error))
        # Python's readers of archives raise nearly everything for damaged ones: RuntimeError for a password,
        # NotImplementedError, struct.error, zlib.error, lzma.LZMAError, EOFError, UnicodeDecodeError, ...
        except Exception as error:
            self._remark(one.path, f"the archive is damaged: {error or type(error).__name__}")

    def _remark(self, path: str, message: str) -> None:
        self.remarks.append(InputRemark(path, message))

    def _read(self, opened: BinaryIO) -> bytes:
        whole, got = io.BytesIO(), 0  # which gives its bytes away without a copy
        while data := opened.read(_ONE_READ):
            whole.write(data)
            got += len(data)
            if got > self.room.left:
                raise self._too_much()
        self.room.take(got)
        return whole.getvalue()

    def _too_much(self) -> _TooMuchError:
        return _TooMuchError(
            f"its members need more than the {self.room.allowed >> 20} MiB that may be used, so the rest"
            " was left out; unpack it into a folder, or allow more by --memory"
        )

    def _count(self) -> None:
        self._members += 1
        if self._members > _MOST_MEMBERS:
            raise _TooMuchError(f"it has more than {_MOST_MEMBERS} members, so the rest was left out")
        if self.room.left < _MEMBER:
            raise self._too_much()
        self.room.take(_MEMBER)

    def _bounded(self, raw: BinaryIO) -> _Bounded:
        return _Bounded(raw, self.room.left // _DIRECTORY, self._too_much())

    def _zip(self, one: Input) -> Iterator[tuple[str, Callable[[], BinaryIO]]]:
        with self._bounded(one.opened()) as file, zipfile.ZipFile(file) as archive:
            for member in archive.infolist():
                self._count()
                if not member.is_dir():
                    # mypy: zipfile's files are readable, though not BinaryIO by name
                    yield f"{one.path}!{member.filename}", lambda m=member: archive.open(m)  # type: ignore

    def _tar(self, one: Input) -> Iterator[tuple[str, Callable[[], BinaryIO]]]:
        try:
            with (
                one.opened() as packed,
                self._bounded(_unpacked(one, packed)) as file,
                tarfile.open(fileobj=file, mode="r:") as archive,
            ):
                for entry in archive:
                    self._count()
                    archive.members = []  # type: ignore[attr-defined]  # else it keeps all that it has seen
                    if entry.isfile() and (opened := archive.extractfile(entry)) is not None:
                        yield f"{one.path}!{entry.name}", lambda opened=opened: opened  # type: ignore
            return
        except tarfile.ReadError:
            if not one.head.startswith(_GZIP):
                raise
        with one.opened() as packed:  # a single compressed file
            yield one.path.removesuffix(".gz"), lambda: _unpacked(one, packed)


def _unpacked(one: Input, packed: BinaryIO) -> BinaryIO:
    """Returns a file with the unpacked bytes of a compressed one."""
    for begin, opened in ((_GZIP, gzip.open), (_BZIP2, bz2.open), (_XZ, lzma.open)):
        if one.head.startswith(begin):
            return cast(BinaryIO, opened(packed))  # they are files in all but their type
    return packed
