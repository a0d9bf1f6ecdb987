"""Archives of rings and dumps: their members, in bounded memory, whatever somebody has packed."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
import zipfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from unicomm.flight_recorder.ring.files import open_file
from unicomm.flight_recorder.ring.reader import InputRemark

_MOST_MEMBERS = 1 << 20
_DEEPEST = 3  # archives in archives; some hold themselves
_HEAD = 512
_ONE_READ = 1 << 20


@dataclass
class Input:
    """One file, or one member of an archive.

    Attributes:
        head: the first bytes.
        newest: the wall-clock time of the last change, in seconds.
        file: None for a member of an archive.
        owners: of the file; see `open_file`.
    """

    path: str
    read: Callable[[], bytes]
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
    packed = one.head.startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ"))
    return "tar" if packed or one.head[257:262] == b"ustar" else None


def allowed_memory() -> int:
    """Half of the memory that is free on this host, in bytes."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


@dataclass
class Unpacker:
    """Unpacks archives into memory: at most `room` bytes of all members together.

    What does not fit, or cannot be unpacked, becomes a remark.
    """

    room: int
    remarks: list[InputRemark]
    _allowed: int = field(init=False)
    _members: int = 0

    def __post_init__(self) -> None:
        self._allowed = self.room

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
                unpacked = Input(path, lambda data=data: data, data[:_HEAD], one.newest)  # type: ignore[misc]
                if kind_of_archive(unpacked) is None:
                    yield unpacked
                else:
                    yield from self.members(unpacked, depth + 1)
                    self.room += len(data)
        except _TooMuchError as error:
            self._remark(one.path, str(error))
        # Python's readers of archives raise nearly everything for damaged ones: RuntimeError for a password,
        # NotImplementedError, struct.error, zlib.error, lzma.LZMAError, EOFError, UnicodeDecodeError, ...
        except Exception as error:
            self._remark(one.path, f"the archive is damaged: {error or type(error).__name__}")

    def _remark(self, path: str, message: str) -> None:
        self.remarks.append(InputRemark(path, message))

    def _read(self, opened: BinaryIO) -> bytes:
        pieces, got = [], 0
        while data := opened.read(_ONE_READ):
            pieces.append(data)
            got += len(data)
            if got > self.room:
                raise _TooMuchError(
                    f"its members need more than the {self._allowed >> 20} MiB that may be used, so the rest"
                    " was left out; unpack it into a folder, or allow more by --memory"
                )
        self.room -= got
        return b"".join(pieces)

    def _count(self) -> None:
        self._members += 1
        if self._members > _MOST_MEMBERS:
            raise _TooMuchError(f"it has more than {_MOST_MEMBERS} members, so the rest was left out")

    def _zip(self, one: Input) -> Iterator[tuple[str, Callable[[], BinaryIO]]]:
        with one.opened() as file, zipfile.ZipFile(file) as archive:
            for member in archive.infolist():
                self._count()
                if not member.is_dir():
                    # mypy: zipfile's files are readable, though not BinaryIO by name
                    yield f"{one.path}!{member.filename}", lambda m=member: archive.open(m)  # type: ignore

    def _tar(self, one: Input) -> Iterator[tuple[str, Callable[[], BinaryIO]]]:
        try:
            with one.opened() as file, tarfile.open(fileobj=file, mode="r:*") as archive:
                for entry in archive:
                    self._count()
                    archive.members = []  # type: ignore[attr-defined]  # else it keeps all that it has seen
                    if entry.isfile() and (opened := archive.extractfile(entry)) is not None:
                        yield f"{one.path}!{entry.name}", lambda opened=opened: opened  # type: ignore
            return
        except tarfile.ReadError:
            if not one.head.startswith(b"\x1f\x8b"):
                raise
        with one.opened() as file:  # a single compressed file
            yield one.path.removesuffix(".gz"), lambda: gzip.GzipFile(fileobj=file)  # type: ignore


class _TooMuchError(Exception):
    """An archive holds more than may be unpacked."""
