"""Reads ring files of running, hung, stopped and dead processes, without help from these processes.

csrc/recorder/ring.hpp defines the layout; a test compares it with the arrays here. The reader trusts nothing
in a file: it checks every offset and length against the file's size before use.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unicomm.flight_recorder.memory import Memory, TooMuchMemoryError
from unicomm.flight_recorder.texts import MOST_RANKS, parse_ranks, printable, tell_apart

from . import whole_records
from .call_path import CallPath, Frame, Whose, user_frame
from .files import ANYONE, MOST_BYTES, read_file, trusted_owners
from .folder import (
    CLEAN_CLOSE,
    MOST_META,
    SUFFIX,
    boot_id,
    is_elsewhere,
    pid_namespace,
    process_code,
    process_start_ticks,
)
from .message_numbers import as_matched

MAGIC = b"UCRING01"
VERSION = 3
READABLE = (
    1,
    2,
    VERSION,
)  # in version 1, frames had no callers; before 3, all records were overwritten in turn
_WITH_SKIPPED = 3
ERRORS = {0: "", 1: "timeout", 2: "peer lost", 3: "mismatch", 4: "aborted", 5: "internal"}
ERRORS |= {6: "deadlock", 7: "unsupported", 8: "silent corruption", 100: "error"}
UNKNOWN_ERROR = 100
PEER_LOST = 2
COMM_STATES = {1: "open", 2: "finalized", 3: "broken"}
ASYNC, P2P, BATCH, RECEIVE, CAPTURED, REPLAYED, REPLAY = 1, 2, 4, 8, 16, 32, 64
GRAPH = CAPTURED | REPLAYED | REPLAY
# The record has this checksum; its outputs were compared with the other ranks'. Older rings never have these.
INPUT_CHECKSUM, OUTPUT_CHECKSUM, COMPARED = 128, 256, 512
CHECKSUMS = INPUT_CHECKSUM | OUTPUT_CHECKSUM | COMPARED
ENCODED = 1024  # the elements travelled in a wire format, and the record has the bytes that were sent
FROM_ANY = 2048  # a receive from any rank, whose sender is known now
_IN_KIB = 1 << 31  # `sent` of a record: bytes, or from this on KiB

_TEXT = [("off", "<u4"), ("len", "<u4")]


def _layout(*runs: tuple[Any, str]) -> np.dtype[Any]:
    """A structure from runs of fields of one type: (type, names)."""
    return np.dtype([(name, kind) for kind, names in runs for name in names.split()])


HEADER = _layout(
    ("S8", "magic"),
    ("<u4", "version header_bytes pid"),
    ("<i4", "rank world"),
    ("<u4", "flags"),
    ("<u8", "proc_start_ticks start_mono_ns start_real_ns last_mono_ns last_real_ns"),
    ("<u8", "file_bytes meta_off meta_len comm_off"),
    ("<u4", "comm_cap comm_size comm_count frame_cap"),
    ("<u8", "frame_off"),
    ("<u4", "frame_size frame_count frames_dropped strings_dropped"),
    ("<u8", "heap_off heap_cap heap_used rec_off"),
    ("<u4", "rec_cap rec_size"),
    ("<u8", "rec_next rec_skipped"),
    ("V56", "pad"),
)
COMM = _layout(
    (_TEXT, "name backend uid ranks"),
    ("<i4", "rank size"),
    ("<u4", "state reserved"),
    ("<u8", "created_ns coll_created coll_started coll_completed p2p_created p2p_completed"),
    ("V32", "pad"),
)
FRAME = _layout((_TEXT, "file function"), ("<u4", "line caller whose"), ("V4", "reserved"))
RECORD = _layout(
    ("<u8", "id seq op_id input_checksum created_ns started_ns completed_ns"),
    ("<u2", "comm op"),
    ("u1", "state red in_dtype out_dtype"),
    ("<i4", "peer"),
    ("<u4", "frame tid timeout_ms"),
    ("<u8", "in_numel out_numel"),
    ("<u2", "n_in n_out"),
    ("u1", "in_ndim out_ndim"),
    ("<u2", "flags"),
    ("<u8", "batch"),
    ("(4,)<i8", "in_dims out_dims"),
    ("<u4", "error sent"),
    ("<u8", "output_checksum"),
)
_COMM_NUMBERS = ("rank", "size", "created_ns", "coll_created", "coll_started", "coll_completed")
# The state of the process when a copy was made (copies.py). The copy's flags hold its index here, from bit 8
# on.
COPY_STATES = ("", "running", "sleeping", "stopped", "killed", "ended")
COPY_SHIFT, COPY_MASK = 8, 0x700
MOST_PATH_FRAMES = 16
_UNLISTED = "not in the table"
_MOST_HOST = 255
_MOST_MEMBERS = 1 << 24  # of all communicators together: 1000 of 16 384 ranks
_MOST_RECORDS = 1 << 24
_LATEST = (1 << 63) - 1  # ns, in a column of times
# Bytes that are needed at most: to read a communicator, a frame, a record and a byte of text, and to show a
# member of a communicator.
_NEEDED_COMM, _NEEDED_FRAME, _NEEDED_RECORD, _NEEDED_TEXT = 1200, 400, 400, 8
_NEEDED_MEMBER = 64


class State(enum.IntEnum):
    """State of a recorded operation."""

    CREATED = 1  # called, but not started
    STARTED = 2
    COMPLETED = 3
    FAILED = 4


STATES = {int(state): state.name.lower() for state in State}


class RingError(ValueError):
    """The bytes are not a ring, or the ring is damaged; the message says how."""


@lru_cache(8)
def _ranks(text: str, size: int) -> list[int]:
    """Returns the list that the members of a communicator share: each of their rings has the text."""
    try:
        ranks = parse_ranks(text, max(size, 1))
    except ValueError:
        ranks = []
    return ranks if len(ranks) == size else list(range(min(size, MOST_RANKS)))


@dataclass(frozen=True)
class Comm:
    """A communicator in a ring. `rank` and `size` count within it; `ranks_text` is text of `format_ranks`."""

    index: int
    name: str
    backend: str
    uid: str
    ranks_text: str
    rank: int
    size: int
    state: str
    created_ns: int
    coll_created: int
    coll_started: int
    coll_completed: int

    @property
    def listed(self) -> bool:
        """Whether it is a communicator, and not the place for those that the table has no room for."""
        return self.rank >= 0 or self.size > 0

    @cached_property
    def ranks(self) -> list[int]:
        """The members' ranks in the job, by their rank in the communicator; 0, 1, ... if they are damaged."""
        return _ranks(self.ranks_text, self.size)

    def in_job(self, rank: int) -> int:
        """Returns the rank in the job of the member `rank`; `rank` itself if there is no such member."""
        return self.ranks[rank] if 0 <= rank < len(self.ranks) else rank


@dataclass(frozen=True)
class InputRemark:
    """A problem with the input, such as an unreadable file. `path` is "" if it concerns no single file."""

    path: str
    message: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", printable(self.path))
        object.__setattr__(self, "message", printable(self.message))


class Ring:
    """The records of one process at the time of reading.

    Attributes:
        header: the fields of `HEADER`.
        meta: what the process wrote about itself: host, argv, names of operations and types, ...
        comms: the communicators, by the number in a record's field `comm`.
        frames: the frames of all call paths. A record's field `frame` is 1 + the index of the innermost
            frame of its path (`call_path`), 0 if the path is unknown.
        records: array of `RECORD`, sorted by id. Records that were being overwritten are left out.
        path: the file, "" if the ring was given as bytes.
        data: the bytes of the ring.
    """

    def __init__(self, data: bytes | memoryview, path: str = "", in_place: bool = False) -> None:
        """`in_place`: the data were just read from the file `path`, the process's own or a copy."""
        self.path, self._in_place = path, in_place
        if len(data) < HEADER.itemsize:
            raise RingError(f"{len(data)} bytes are not a ring")
        self.header = head = np.frombuffer(data, HEADER, 1)[0]
        if bytes(head["magic"]) != MAGIC:
            raise RingError("not a ring: the first bytes are not UCRING01")
        if int(head["version"]) not in READABLE:
            raise RingError(
                f"version {head['version']} of the ring format is unknown;"
                f" this reader knows versions up to {VERSION}"
            )
        self.data = data
        self.meta = self._read_meta()
        self._heap = self._span("heap_off", "heap_cap", 1)
        self._texts: dict[tuple[int, int], str] = {}
        self._room = 2 * len(self._heap) + 1  # for all texts: those of a good ring do not overlap
        if in_place and not self.closed and not self.copied_as:
            self.header = self._newest_header()
        self.comms = self._read_comms()
        self.frames = self._read_frames()
        self.records = self._read_records()

    def _span(self, off: str, count: str, size: int) -> memoryview:
        begin, length = int(self.header[off]), int(self.header[count]) * size
        if begin + length > len(self.data):
            raise RingError(f"{off} {begin} and {count} {length} do not fit into {len(self.data)} bytes")
        return memoryview(self.data)[begin : begin + length]

    def _table(self, kind: str, dtype: np.dtype[Any], used: int) -> npt.NDArray[Any]:
        if int(self.header[f"{kind}_size"]) != dtype.itemsize:
            raise RingError(
                f"entries of {kind} have {self.header[f'{kind}_size']} bytes, not {dtype.itemsize}"
            )
        span = self._span(f"{kind}_off", f"{kind}_cap", dtype.itemsize)
        table: npt.NDArray[Any] = np.frombuffer(span, dtype)
        return table[: min(used, len(table))]

    def _read_meta(self) -> dict[str, Any]:
        if int(self.header["meta_len"]) > MOST_META:
            raise RingError("the description is too long")
        try:
            meta = json.loads(bytes(self._span("meta_off", "meta_len", 1)) or b"{}")
        except (ValueError, RecursionError):
            return {}
        return meta if isinstance(meta, dict) else {}

    def _text(self, text: Any) -> str:
        span = begin, length = int(text["off"]), int(text["len"])
        if (known := self._texts.get(span)) is not None:
            return known
        self._room -= max(0, min(length, len(self._heap) - begin))
        if self._room < 0:
            raise RingError("texts overlap, so the ring is damaged")
        made = printable(bytes(self._heap[begin : begin + length]).decode("utf-8", "replace"))
        self._texts[span] = made
        return made

    def _read_comms(self) -> list[Comm]:
        out = []
        for i, c in enumerate(self._table("comm", COMM, int(self.header["comm_count"]))):
            fields: dict[str, Any] = {name: self._text(c[name]) for name in ("name", "backend", "uid")}
            fields |= {name: int(c[name]) for name in _COMM_NUMBERS}
            state = COMM_STATES.get(int(c["state"]), "unknown")
            comm = Comm(index=i, ranks_text=self._text(c["ranks"]), state=state, **fields)
            out.append(comm if comm.listed else replace(comm, name=_UNLISTED))
        if any(c.size > MOST_RANKS for c in out) or sum(max(c.size, 0) for c in out) > _MOST_MEMBERS:
            raise RingError("its communicators have more members than a job can have")
        return out

    def _read_frames(self) -> list[Frame]:
        table = self._table("frame", FRAME, int(self.header["frame_count"]))
        self._callers: list[int] = table["caller"].tolist()
        self._paths: dict[int, CallPath] = {}
        whose = [Whose(w) if w < Whose.HIDDEN else Whose.USER for w in table["whose"].tolist()]
        return [
            Frame(self._text(f["function"]), self._text(f["file"]), int(f["line"]), w)
            for f, w in zip(table, whose, strict=True)
        ]

    def _read_records(self) -> npt.NDArray[Any]:
        cap = int(self.header["rec_cap"])
        table = self._table("rec", RECORD, cap)
        if not cap:
            return table.copy()
        good = whole_records.whole(
            self.header,
            table,
            np.asarray([comm.created_ns for comm in self.comms], np.uint64),
            (State.CREATED, State.STARTED),
            self._ids_now if self._in_place and not self.copied_as else None,
        )
        # Records are large, and there are many rings: copy only if necessary.
        n = int(np.count_nonzero(good))
        kept: npt.NDArray[Any] = table[:n] if good[:n].all() else table[good]
        ids = kept["id"]
        if len(ids) and not (ids[1:] > ids[:-1]).all():  # wrapped, so the oldest record is in the middle
            kept = kept[np.argsort(ids, kind="stable")]
        return as_matched(kept, P2P | RECEIVE, FROM_ANY)

    @cached_property
    def kept(self) -> npt.NDArray[np.bool_]:
        """Which of `records` are older than those that would fill the ring, as they were long under way."""
        kept: npt.NDArray[np.bool_] = whole_records.passed(self.header, self.records["id"])
        return kept

    def is_kept(self, record: Any) -> bool:
        """As `kept`, for one record."""
        return bool(whole_records.passed(self.header, record["id"]))

    # --- meaning -----------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """The process's rank in the job; -1 if it was not a rank of a job."""
        return int(self.header["rank"])

    @property
    def pid(self) -> int:
        return int(self.header["pid"])

    @property
    def host(self) -> str:
        return printable(str(self.meta.get("host", "?"))[:_MOST_HOST])

    @property
    def total(self) -> int:
        """The number of records the process has begun, overwritten ones included."""
        skipped = int(self.header["rec_skipped"]) if int(self.header["version"]) >= _WITH_SKIPPED else 0
        return max(int(self.header["rec_next"]) - skipped, 0)

    @property
    def wrapped(self) -> bool:
        """Whether records were overwritten."""
        return int(self.header["rec_next"]) > int(self.header["rec_cap"])

    @property
    def closed(self) -> bool:
        """Whether the process closed its ring, that is, ended without being killed."""
        return bool(int(self.header["flags"]) & CLEAN_CLOSE)

    def _name(self, table: str, code: int) -> str:
        names = self.meta.get(table)
        name = names.get(str(code)) if isinstance(names, dict) else None
        return printable(name) if isinstance(name, str) else f"{table}#{code}"

    def op(self, record: Any) -> str:
        return self._name("ops", int(record["op"]))

    def dtype(self, code: int) -> str:
        return self._name("dtypes", code)

    def reduction(self, record: Any) -> str:
        return self._name("reductions", int(record["red"])) if record["red"] else ""

    def frame(self, record: Any) -> Frame | None:
        """Returns the user's own line that a record was called from; None if it is unknown."""
        return user_frame(self.call_path(record))

    def call_path(self, record: Any) -> CallPath:
        """Returns the call path of a record, the innermost frame first; empty if it is unknown."""
        return self.call_path_from(int(record["frame"]))

    def call_path_from(self, number: int) -> CallPath:
        """Returns the call path that begins at a frame; `number` is 1 + its index, as records hold it."""
        if number not in self._paths:
            found: list[Frame] = []
            at = number
            while 0 < at <= len(self.frames) and len(found) < MOST_PATH_FRAMES:
                found.append(self.frames[at - 1])
                at = self._callers[at - 1]
            self._paths[number] = tuple(found)
        return self._paths[number]

    def shape(self, record: Any, side: str) -> list[int]:
        """The dimensions of the first input ("in") or output ("out") tensor; a record keeps at most four."""
        return [int(d) for d in record[f"{side}_dims"][: int(record[f"{side}_ndim"])]]

    def sent(self, record: Any) -> int | None:
        """The bytes that the rank sent of elements in a wire format; None if they had none.

        Exact below 2 GiB, else rounded up to KiB.
        """
        if not int(record["flags"]) & ENCODED:
            return None
        sent = int(record["sent"])
        return sent if sent < _IN_KIB else (sent - _IN_KIB) * 1024

    def real_ns(self, mono_ns: int) -> int:
        """Converts a time of this ring to wall-clock time, in nanoseconds since 1970."""
        real = int(mono_ns) + int(self.header["start_real_ns"]) - int(self.header["start_mono_ns"])
        return min(max(real, 0), _LATEST)  # a damaged header may have any number

    @property
    def copied_as(self) -> str:
        """The state of the process when this copy of its ring was made; "" if the ring is not a copy."""
        code = (int(self.header["flags"]) & COPY_MASK) >> COPY_SHIFT
        return COPY_STATES[code] if code < len(COPY_STATES) else ""

    @property
    def now_ns(self) -> int:
        """The monotonic time of the ring's host, in nanoseconds: now, or when the copy was made."""
        return int(self.header["last_mono_ns"]) if self.copied_as else time.monotonic_ns()

    @cached_property
    def process_state(self) -> str:
        """The state of the process: running, stopped, killed, ended or elsewhere.

        "elsewhere" means that the process belongs to another host, to this host before its last boot, or to
        another PID namespace. For a copy it is the state at the time of the copy.
        """
        if copied := self.copied_as:
            return "running" if copied == "sleeping" else copied
        if is_elsewhere(self.meta):
            return "elsewhere"
        same = process_start_ticks(self.pid) == int(self.header["proc_start_ticks"])
        code = process_code(self.pid) if same else ""
        if not code:
            return "ended" if self.closed or self._closed_since() else "killed"
        return "stopped" if code in "Tt" else "running"

    def _closed_since(self) -> bool:
        """Whether the process, which is gone, closed its ring after the ring was read."""
        if not self._in_place:
            return False
        try:
            head = self._header_now()
        except FileNotFoundError:
            return True  # who ends well removes it, unless it is to be kept
        except OSError:
            return False
        return head is not None and bool(int(head["flags"]) & CLEAN_CLOSE)

    def _newest_header(self) -> np.void:
        """The header, with the numbers of records as they are now that the ring has been read."""
        out: np.void = self.header.copy()
        with contextlib.suppress(OSError):
            if (now := self._header_now()) is not None and now["rec_next"] > out["rec_next"]:
                out["rec_next"], out["rec_skipped"] = now["rec_next"], now["rec_skipped"]
        return out

    def _ids_now(self) -> npt.NDArray[np.uint64]:
        """The present ids in the ring's file. Raises `OSError`."""
        begin, size = int(self.header["rec_off"]), int(self.header["rec_cap"]) * RECORD.itemsize
        data = read_file(self.path, ANYONE, at=begin, size=size)
        if len(data) < size:
            raise OSError(f"{self.path} has become shorter")
        return np.frombuffer(data, RECORD)["id"].copy()

    def _header_now(self) -> np.void | None:
        """The present header of the ring's file; None if it is another ring's. Raises `OSError`."""
        data = read_file(self.path, ANYONE, size=HEADER.itemsize)
        if len(data) < HEADER.itemsize:
            return None
        head: np.void = np.frombuffer(data, HEADER, 1)[0]
        same = all(head[field] == self.header[field] for field in ("pid", "proc_start_ticks"))
        return head if same else None

    @property
    def runs_here(self) -> bool:
        """Whether the process runs on this host now, also if this is a copy of its ring."""
        same = self.meta.get("boot_id") == boot_id() and self.meta.get("pid_namespace") == pid_namespace()
        return same and process_start_ticks(self.pid) == int(self.header["proc_start_ticks"])

    @property
    def process_activity(self) -> str:
        """The state of the process in `unicomm trace top`: running, sleeping, stopped, dead or ended.

        "dead" stands for killed and for elsewhere. For a copy it is the state at the time of the copy.
        """
        state = self.process_state
        if state in ("killed", "elsewhere"):
            return "dead"
        if self.copied_as:
            return self.copied_as
        if state == "running":
            code = process_code(self.pid)
            return "running" if code == "R" else "sleeping" if code else "dead"
        return state


def owners(ring: Ring) -> Iterator[tuple[int, list[Comm]]]:
    """Yields the ranks that write into a ring, with their communicators. Ranks that are threads share one."""
    uids = [comm.uid for comm in ring.comms]
    if ring.rank >= 0 and len(set(uids)) == len(uids):
        yield ring.rank, ring.comms
        return
    found: dict[int, list[Comm]] = {}
    for comm in ring.comms:
        members = comm.ranks
        found.setdefault(members[comm.rank] if 0 <= comm.rank < len(members) else -1, []).append(comm)
    yield from found.items()


def comm_names(rings: Iterable[Ring]) -> dict[str, str]:
    """Returns the name that reports give to each communicator of these rings, by uid; no two are equal."""
    found: dict[str, Comm] = {}
    for ring in rings:
        for comm in ring.comms:
            first = found.setdefault(comm.uid, comm)
            if comm.created_ns < first.created_ns:
                found[comm.uid] = comm
    oldest = sorted(found.values(), key=lambda c: c.created_ns)
    names = tell_apart([(c.name, c.ranks, c.backend) for c in oldest])
    return {comm.uid: name for comm, name in zip(oldest, names, strict=True)}


def ring_head(data: bytes) -> tuple[int, int] | None:
    """Returns (rank, number of records) from the first bytes of a ring, or None if they are not a ring's."""
    if len(data) < HEADER.itemsize or not data.startswith(MAGIC):
        return None
    head = np.frombuffer(data, HEADER, 1)[0]
    return int(head["rank"]), min(int(head["rec_cap"]), int(head["rec_next"]), _MOST_RECORDS)


def needed_by_ring(head: bytes, size: int) -> int:
    """Returns the bytes that reading a ring of `size` bytes needs at most, from its first bytes."""
    if len(head) < HEADER.itemsize:
        return 0
    fields = np.frombuffer(head, HEADER, 1)[0]

    def count(cap: str, used: str, each: int) -> int:
        return min(int(fields[cap]), int(fields[used]), size // each)

    texts = min(int(fields["heap_cap"]), size)
    made = _NEEDED_COMM * count("comm_cap", "comm_count", COMM.itemsize)
    made += _NEEDED_FRAME * count("frame_cap", "frame_count", FRAME.itemsize)
    made += _NEEDED_RECORD * count("rec_cap", "rec_next", RECORD.itemsize)
    return 2 * size + _NEEDED_TEXT * texts + made


def read_ring(
    source: Path | str | bytes, owners: Collection[int] | None = None, most: int = MOST_BYTES
) -> Ring:
    """Reads a ring from a file or from bytes.

    `owners`: the users to whom a file that was found may belong (`files.trusted_owners`); None for a file
    that the user has named. `most`: the bytes that the file may have. Raises `RingError` when the reading
    fails.
    """
    if isinstance(source, bytes):
        return Ring(source)
    try:
        data = read_file(source, owners, most)
    except OSError as error:
        raise RingError(str(error)) from None
    return Ring(data, str(source), in_place=True)


def read_folder(folder: Path | str, memory: Memory | None = None) -> tuple[list[Ring], list[InputRemark]]:
    """Reads all rings in a folder. Returns them by rank and pid, and a remark for each unreadable one.

    `memory`: what they may need together, by default half of the free memory. What does not fit is left out.
    """
    room = Memory() if memory is None else memory
    seen: set[str] = set()
    rings: list[Ring] = []
    remarks: list[InputRemark] = []
    paths = sorted(Path(folder).glob(f"*{SUFFIX}"))
    if not paths:
        return rings, remarks
    owners = trusted_owners(Path(folder))
    for path in paths:
        try:
            rings.append(_read_within(room, seen, path, owners))
        except (RingError, TooMuchMemoryError) as error:
            remarks.append(InputRemark(os.fspath(path), str(error)))
    rings.sort(key=lambda r: (r.rank, r.pid))
    return rings, remarks


def _read_within(room: Memory, seen: set[str], path: Path, owners: Collection[int]) -> Ring:
    """As `read_ring`; raises `TooMuchMemoryError` for a ring for which nothing is left.

    `seen`: the uids of communicators that other rings have; a report lists the members of each once.
    """
    try:
        size = path.lstat().st_size
        head = read_file(path, owners, size=HEADER.itemsize)
    except OSError as error:
        raise RingError(str(error)) from None
    needed = needed_by_ring(head, size)
    room.check(needed)
    ring = read_ring(path, owners, size)
    fresh = {comm.uid: max(comm.size, 0) for comm in ring.comms if comm.uid not in seen}
    room.take(needed + _NEEDED_MEMBER * sum(fresh.values()))  # not before: a damaged ring keeps nothing
    seen.update(fresh)
    return ring
