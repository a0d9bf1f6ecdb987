"""load: rings and dumps from folders, files and archives into one table, recognized by content."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from unicomm.flight_recorder.formats import operation_names as names
from unicomm.flight_recorder.formats.dump_columns import DumpColumns, DumpError, from_dump
from unicomm.flight_recorder.memory import Memory, TooMuchMemoryError, needed_by_json
from unicomm.flight_recorder.ring.endings import SUFFIXES as SIDE_FILES
from unicomm.flight_recorder.ring.endings import EndingError
from unicomm.flight_recorder.ring.files import (
    ANYONE,
    MOST_BYTES,
    MOST_SIDE_BYTES,
    anyone_may_remove,
    open_file,
    read_file,
    read_into,
    trusted_owners,
)
from unicomm.flight_recorder.ring.folder import rings_folder
from unicomm.flight_recorder.ring.newest_job import newest_job
from unicomm.flight_recorder.ring.reader import MAGIC, InputRemark, Ring, RingError, needed_by_ring, ring_head
from unicomm.flight_recorder.texts import MOST_RANKS

from .archives import HEAD, Input, Unpacker, kind_of_archive
from .builder import TableBuilder
from .table import Table

Progress = Callable[[int, int], None]

_THREADS = 2  # the native parser of pickles runs in parallel with the interpreter
_AHEAD = 4 * _THREADS  # inputs that are read before they are added
# Of the memory that is left, the inputs that are read ahead may need a quarter together. One that needs more
# than its share of that is read alone and may need half. What an input adds to the table may need a quarter.
_SHARE, _ALONE = 4 * (_AHEAD + 2), 2
_NEEDED_DUMP = 8192  # bytes of a dump in a list of several, beside its entries
_ENDING = 8  # bytes in memory for each of an ending file
_RANK_IN_NAME = re.compile(r"rank[_\-. =]?(\d{1,7})", re.IGNORECASE)
_NUMBER = re.compile(r"\d{1,7}")
# Suffixes of files that often lie beside dumps; such a file is skipped without a remark if it is not a dump.
_IGNORED = {
    ".log",
    ".txt",
    ".md",
    ".py",
    ".html",
    ".png",
    ".err",
    ".out",
    ".csv",
    ".yaml",
    ".yml",
    ".toml",
    ".part",
}


@dataclass
class _Dump:
    """The dump of one rank. `facts` has what `unicomm trace show --json` adds: rank, host, pid, state."""

    path: str
    form: str
    facts: dict[str, Any]
    columns: DumpColumns


_Parsed = bytes | memoryview | list[_Dump] | InputRemark


class _Buffers:
    """Buffers for rings, used again: new pages cost more than the reading itself."""

    def __init__(self) -> None:
        self._free: SimpleQueue[bytearray] = SimpleQueue()

    def read(self, path: Path, owners: Collection[int] | None, most: int) -> memoryview:
        descriptor, info = open_file(path, owners, most)
        try:
            return self._read(descriptor, info.st_size)
        finally:
            os.close(descriptor)

    def _read(self, descriptor: int, size: int) -> memoryview:
        try:
            buffer = self._free.get_nowait()
        except Empty:
            buffer = bytearray(size)
        if len(buffer) < size:
            buffer = bytearray(size)
        return memoryview(buffer)[: read_into(descriptor, memoryview(buffer)[:size])]

    def give_back(self, data: object) -> None:
        if isinstance(data, memoryview) and isinstance(data.obj, bytearray):
            self._free.put(data.obj)


def load_job(
    paths: Iterable[Path | str], progress: Progress | None = None, memory: int | None = None
) -> Table:
    """`load` for the paths that a user gave to a command; without any, the newest job in this user's folder.

    Raises `FolderError` if that folder is unusable.
    """
    if given := list(paths):
        return load(given, progress, memory=memory)
    folder = rings_folder()
    found, others = newest_job(folder)
    table = load(found, progress, named=False, memory=memory)
    if others:
        table.remarks.append(InputRemark("", f"left out: {others} rings of other jobs in {folder}"))
    return table


def load(
    paths: Iterable[Path | str],
    progress: Progress | None = None,
    named: bool = True,
    memory: int | Memory | None = None,
) -> Table:
    """Reads all rings and dumps under `paths` into one table.

    Args:
        paths: files, archives (tar, tar.gz, zip, gz), and folders, which are searched recursively. Links
            in folders are not followed.
        progress: called with the number of files read and the number of all files.
        named: whether the user has named the paths. Else files must be no links, and must belong to this user
            or to the owner of their folder.
        memory: the bytes that reading and analyzing may need, unpacked archives included; half of the free
            memory if None; a `Memory` for what several tables may need together.

    Raises nothing for damaged input: `Table.remarks` lists what could not be read. The table has no sources
    if nothing could be read.
    """
    room = memory if isinstance(memory, Memory) else Memory(memory)
    builder = TableBuilder(room)
    unpacker = Unpacker(room, builder.remarks)
    inputs = list(_inputs(paths, unpacker, named))
    dumps = [i.path for i in inputs if not i.head.startswith(MAGIC) and not i.path.endswith(SIDE_FILES)]
    ranks = _ranks_by_name(dumps)
    heads = {i.path: head for i in inputs if (head := ring_head(i.head)) is not None}
    ranks |= {path: rank for path, (rank, _) in heads.items()}
    # In the order of the table, so that no row has to move. The newest of several files of one rank counts.
    inputs.sort(key=lambda i: (ranks.get(i.path, -1), -i.newest, i.path))
    builder.reserve(sum(records for _, records in heads.values()))
    buffers = _Buffers()
    with ThreadPoolExecutor(_THREADS) as pool:
        for at, (one, data) in enumerate(_ahead(pool, inputs, buffers, room)):
            if progress is not None and at % 16 == 0:
                progress(at, len(inputs))
            decoded = room.left * 3 // 4  # what is read and not yet added
            room.take(decoded)
            parsed = _opened(one, data)
            if isinstance(parsed, InputRemark):
                builder.remarks.append(parsed)
            else:
                _add(builder, one, parsed, ranks.get(one.path, -1))
            del parsed
            room.give_back(decoded)
            buffers.give_back(data)
            del data
    if progress is not None:
        progress(len(inputs), len(inputs))
    return builder.finish()


def _ahead(
    pool: ThreadPoolExecutor, inputs: list[Input], buffers: _Buffers, room: Memory
) -> Iterator[tuple[Input, _Parsed]]:
    """Yields each input with its content, in order.

    Reads a few inputs ahead, so that few are in memory at once.
    """
    running: deque[tuple[Input, Future[_Parsed]]] = deque()
    for one in inputs:
        running.append((one, pool.submit(_parse, one, buffers, room, room.left // _SHARE)))
        if len(running) > _AHEAD:
            yield _in_turn(*running.popleft(), room)
    while running:
        yield _in_turn(*running.popleft(), room)


def _in_turn(one: Input, future: Future[_Parsed], room: Memory) -> tuple[Input, _Parsed]:
    """Returns an input with its content. One that needs more than its share is read here, in its turn."""
    with contextlib.suppress(TooMuchMemoryError):
        return one, future.result()
    try:
        return one, _parse(one, None, room, room.left // _ALONE)
    except TooMuchMemoryError as error:
        return one, InputRemark(one.path, str(error))


def _add(builder: TableBuilder, one: Input, parsed: Ring | list[_Dump] | bytes, named: int) -> None:
    """Adds what was read. What cannot be added, because its numbers contradict each other, is a remark."""
    before = len(builder.sources)
    try:
        if isinstance(parsed, bytes):
            builder.memory.take(_ENDING * len(parsed))
            builder.endings.add(one.path, parsed, int(one.newest * 1e9))
        elif isinstance(parsed, Ring):
            builder.add_ring(parsed)
        else:
            for dump in parsed:
                _add_dump(builder, dump, named if len(parsed) == 1 else -1)
        return
    except (EndingError, TooMuchMemoryError) as error:
        message = str(error)
    except (ArithmeticError, LookupError, TypeError, ValueError, MemoryError, RecursionError) as error:
        message = f"the file is damaged: {str(error)[:200] or type(error).__name__}"
    builder.drop_sources(before)
    builder.remarks.append(InputRemark(one.path, message))


def _opened(one: Input, parsed: _Parsed) -> Ring | list[_Dump] | InputRemark | bytes:
    """Parses a ring. The pool only reads the bytes of rings, because their parsing needs the interpreter.

    The bytes of an ending file are returned as they are.
    """
    if not isinstance(parsed, bytes | memoryview) or one.path.endswith(SIDE_FILES):
        return bytes(parsed) if isinstance(parsed, memoryview) else parsed
    try:
        return Ring(parsed, one.path, in_place=one.file is not None)
    except RingError as error:
        return InputRemark(one.path, str(error))


# --- files and archives -------------------------------------------------------------------------------


def _inputs(paths: Iterable[Path | str], unpacker: Unpacker, named: bool) -> Iterator[Input]:
    remarks = unpacker.remarks
    for given in paths:
        path = Path(given)
        if path.is_dir():
            files = sorted(Path(folder, name) for folder, _, names_ in os.walk(path) for name in names_)
            files = [f for f in files if not f.name.startswith(".")]
            if not files:
                remarks.append(InputRemark(str(path), "the folder is empty"))
            elif named and _is_open(path):  # files of anybody are read there
                remarks.append(InputRemark(str(path), "every user may remove and replace files here"))
            for file in files:
                yield from _file(file, unpacker, ANYONE if named else trusted_owners(file.parent))
        elif path.exists():
            yield from _file(path, unpacker, None if named else trusted_owners(path.parent))
        else:
            remarks.append(InputRemark(str(path), "no such file or folder"))


def _is_open(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return anyone_may_remove(folder)
    return False


def _file(path: Path, unpacker: Unpacker, owners: Collection[int] | None) -> Iterator[Input]:
    """Yields the inputs in a file; `owners`: see `open_file`."""
    ignored = owners is not None and path.suffix.lower() in _IGNORED
    try:
        most = MOST_SIDE_BYTES if path.suffix in SIDE_FILES else MOST_BYTES
        descriptor, info = open_file(path, owners, most)
        with open(descriptor, "rb") as file:
            head = file.read(HEAD)
    except OSError as error:
        if not ignored:
            unpacker.remarks.append(InputRemark(str(path), f"cannot be read: {error.strerror or error}"))
        return
    if ignored and not _looks_like_a_dump(head):
        return
    one = Input(
        str(path), lambda: read_file(path, owners, most), info.st_size, head, info.st_mtime, path, owners
    )
    if kind_of_archive(one) is None:
        yield one
        return
    for member in unpacker.members(one):
        if not (_is_ignored(member.path) and not _looks_like_a_dump(member.head)):
            yield member


def _is_ignored(path: str) -> bool:
    name = path.rsplit("/", 1)[-1].rsplit("!", 1)[-1]
    return name.startswith(".") or Path(name).suffix.lower() in _IGNORED


def _looks_like_a_dump(head: bytes) -> bool:
    return head.startswith((MAGIC, b"\x80")) or (head.lstrip()[:1] == b"{" and b'"' in head)


# --- parsing ------------------------------------------------------------------------------------------


def _parse(one: Input, buffers: _Buffers | None, room: Memory, most: int) -> _Parsed:
    """Reads an input, which may need `most` bytes until it is added. Raises `TooMuchMemoryError`.

    `buffers` are for rings; None for one that needs a large buffer, which is not kept.
    """
    try:
        if one.path.endswith(SIDE_FILES):
            return _text(one, room, most)
        if not one.head:
            raise DumpError("the file is empty")
        if one.head.startswith(MAGIC):
            if needed_by_ring(one.head, one.size) > most:
                raise room.too_much()
            if one.file is None or buffers is None:
                return one.read()
            return buffers.read(one.file, one.owners, most)
        if one.head[:1] == b"\x80":
            return [_Dump(one.path, "torch pickle", {}, _unpickled(one, room, most))]
        if one.head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"["):
            return _json(one, room, most)
        raise DumpError("neither a ring nor a pickle nor JSON, so not a dump")
    except DumpError as error:
        return InputRemark(one.path, str(error))
    except MemoryError:
        return InputRemark(one.path, "there is not enough memory to read it")
    except OSError as error:
        return InputRemark(one.path, f"cannot be read: {error or type(error).__name__}")


def _unpickled(one: Input, room: Memory, most: int) -> DumpColumns:
    from unicomm.flight_recorder.formats import pickles  # loads the native core

    if one.size <= most:
        with contextlib.suppress(MemoryError):
            return pickles.read(one.read(), most - one.size)
    raise room.too_much()


def _text(one: Input, room: Memory, most: int) -> bytes:
    """Reads a JSON text, if decoding it needs no more than `most` bytes."""
    if one.size > most or needed_by_json(text := one.read()) > most:
        raise room.too_much()
    return text


def _json(one: Input, room: Memory, most: int) -> list[_Dump]:
    text = _text(one, room, most)
    try:
        data = json.loads(text)
    except ValueError as error:
        raise DumpError(f"the JSON is malformed: {error}") from None
    except RecursionError:
        raise DumpError("the JSON is nested too deeply") from None
    several: list[tuple[dict[str, Any], Any]]
    if isinstance(data, dict) and isinstance(data.get("processes"), list):  # `unicomm trace show --json`
        several = [(p, p.get("trace")) for p in data["processes"] if isinstance(p, dict)]
    elif isinstance(data, list):
        several = [({}, dump) for dump in data]
    else:
        return [_Dump(one.path, "JSON", {}, from_dump(data))]
    if len(several) * _NEEDED_DUMP > most:
        raise room.too_much()
    return [_Dump(f"{one.path}#{i}", "JSON", p, from_dump(dump)) for i, (p, dump) in enumerate(several)]


# --- the rank of a dump -------------------------------------------------------------------------------


def _add_dump(builder: TableBuilder, dump: _Dump, named: int) -> None:
    """Adds a dump. Torch's dumps do not name their rank: `facts` do, or the file's name, or the messages."""
    host, pid, state = (dump.facts.get(key) for key in ("host", "pid", "state"))
    rank = _stated_rank(dump.facts, dump.columns)
    if rank < 0:
        rank = named if named >= 0 else _from_messages(dump.columns)
    builder.add_dump(
        dump.columns,
        dump.path,
        rank,
        dump.form,
        host if isinstance(host, str) else "",
        pid if isinstance(pid, int) and 0 < pid < 1 << 32 else 0,
        state if state in ("running", "stopped", "killed", "ended") else "",
    )


def _ranks_by_name(paths: list[str]) -> dict[str, int]:
    """Returns ranks by path, from file names: "rank" and a number, else the number in which names differ."""
    files = {path: path.rsplit("/", 1)[-1].rsplit("!", 1)[-1] for path in paths}
    ranks = {path: int(found[-1]) for path, name in files.items() if (found := _RANK_IN_NAME.findall(name))}
    rest = [path for path in paths if path not in ranks]
    return ranks | {rest[i]: rank for i, rank in _from_names([files[path] for path in rest]).items()}


def _stated_rank(facts: dict[str, Any], columns: DumpColumns) -> int:
    """Returns the rank that the dump or its facts state, -1 if they state none."""
    for place in (facts, columns.meta):
        for key in ("rank", "global_rank"):
            value = place.get(key)
            if type(value) is int and 0 <= value < MOST_RANKS:  # not a bool
                return value
    return -1


def _from_names(files: list[str]) -> dict[int, int]:
    """Returns ranks by index, from the last number in the names that differs between all of them."""
    numbers = [[int(n) for n in _NUMBER.findall(name)][::-1] for name in files]
    if len(files) == 1:
        return {0: numbers[0][0]} if numbers[0] else {}
    shortest = min((len(n) for n in numbers), default=0)
    for at in range(shortest):
        found = [n[at] for n in numbers]
        if len(set(found)) == len(found):
            return dict(enumerate(found))
    return {i: n[0] for i, n in enumerate(numbers) if n} if shortest else {}


def _from_messages(columns: DumpColumns) -> int:
    """Returns the rank from a send or receive, which names its own rank in the group; -1 if there is none."""
    config = columns.meta.get("pg_config")
    for i, text in enumerate(columns.profiling_names):
        own = names.profiling_name(text)[2]
        rows = np.flatnonzero(columns.profiling_name == i)
        if own < 0 or not len(rows) or not isinstance(config, dict):
            continue
        entry = config.get(columns.groups[int(columns.group[rows[0]])][0])
        try:
            members = json.loads(entry["ranks"]) if isinstance(entry, dict) else []
            return int(members[own])
        except (KeyError, IndexError, TypeError, ValueError, OverflowError, RecursionError):
            continue
    return -1
