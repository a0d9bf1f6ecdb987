"""The entries of one dump in torch's format as columns. The readers of dumps return them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from unicomm.flight_recorder.ring.reader import COMPARED, INPUT_CHECKSUM, OUTPUT_CHECKSUM

_CHECKSUM_FLAGS = {"input": INPUT_CHECKSUM, "output": OUTPUT_CHECKSUM}
Shapes = tuple[tuple[int, ...], ...]
Frames = tuple[tuple[str, str, int], ...]  # (function, file, line), the innermost call first

NS_PER_MS = 1_000_000
_I64 = np.iinfo(np.int64)
_NUMBER = re.compile(r"-?[0-9]{1,19}")
_CHECKSUM = re.compile(r"[0-9a-fA-F]{16}")


class DumpError(ValueError):
    """The bytes are not a dump of a flight recorder, or the dump is damaged; the message says how."""


@dataclass
class DumpColumns:
    """The entries of one dump as columns of equal length. A column of indices refers to the list of its name.

    Attributes:
        meta: the dump without `entries`.
        group: index into `groups`, which holds pairs (name, description).
        profiling_name: index into `profiling_names`.
        time_created_ns, time_discovered_started_ns, time_discovered_completed_ns: 0 for None.
        duration_ms: nan for None.
        input_sizes, output_sizes: index into `sizes`; input_dtypes, output_dtypes: into `dtypes`.
        state: index into `states`.
        frames: index into `stacks`.
        thread: index into `threads`.
        extra: columns that only our dumps have: unicomm_async; unicomm_graph (the flags CAPTURED, REPLAYED
            and REPLAY of ring/reader.py); and if an entry has a checksum, unicomm_input_checksum and
            unicomm_output_checksum (uint64), and unicomm_flags (INPUT_CHECKSUM, OUTPUT_CHECKSUM, COMPARED).
    """

    meta: dict[str, Any]
    record_id: npt.NDArray[np.int64]
    pg_id: npt.NDArray[np.int64]
    group: npt.NDArray[np.int32]
    collective_seq_id: npt.NDArray[np.int64]
    p2p_seq_id: npt.NDArray[np.int64]
    op_id: npt.NDArray[np.int64]
    profiling_name: npt.NDArray[np.int32]
    time_created_ns: npt.NDArray[np.int64]
    time_discovered_started_ns: npt.NDArray[np.int64]
    time_discovered_completed_ns: npt.NDArray[np.int64]
    duration_ms: npt.NDArray[np.float64]
    input_sizes: npt.NDArray[np.int32]
    output_sizes: npt.NDArray[np.int32]
    input_dtypes: npt.NDArray[np.int32]
    output_dtypes: npt.NDArray[np.int32]
    state: npt.NDArray[np.int32]
    retired: npt.NDArray[np.bool_]
    timeout_ms: npt.NDArray[np.int64]
    is_p2p: npt.NDArray[np.bool_]
    frames: npt.NDArray[np.int32]
    thread: npt.NDArray[np.int32]
    groups: list[tuple[str, str]] = field(default_factory=list)
    profiling_names: list[str] = field(default_factory=list)
    sizes: list[Shapes] = field(default_factory=list)
    dtypes: list[tuple[str, ...]] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    stacks: list[Frames] = field(default_factory=list)
    threads: list[str] = field(default_factory=list)
    extra: dict[str, npt.NDArray[Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.record_id)


def integer(value: Any) -> int:
    """Returns a number of a dump within 64 bits, 0 for anything else."""
    if isinstance(value, str):
        value = int(value) if _NUMBER.fullmatch(value) else 0
    if not isinstance(value, int | float) or (isinstance(value, float) and math.isnan(value)):
        return 0
    return int(min(max(value, _I64.min), _I64.max))


def _checksum(value: Any) -> int | None:
    return int(value, 16) if isinstance(value, str) and _CHECKSUM.fullmatch(value) else None


def _float(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and abs(value) < 1e300 else float("nan")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)[:200]


def _texts(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):  # torch's JSON holds one text instead of a list
        return (value,) if value else ()
    return tuple(_text(v) for v in value) if isinstance(value, list | tuple) else ()


def _group(value: Any) -> tuple[str, str]:
    if isinstance(value, str):
        return value, ""
    texts = _texts(value)
    return (texts[0] if texts else "", texts[1] if len(texts) > 1 else "")


def _sizes(value: Any) -> Shapes:
    if not isinstance(value, list | tuple):
        return ()
    if value and all(isinstance(v, int) for v in value):
        value = [value]
    return tuple(tuple(integer(d) for d in shape) for shape in value if isinstance(shape, list | tuple))


def _stack(value: Any) -> Frames:
    if not isinstance(value, list | tuple):
        return ()
    return tuple(
        (_text(f.get("name")), _text(f.get("filename")), integer(f.get("line")))
        for f in value
        if isinstance(f, dict)
    )


# The columns of indices: the key of an entry, the list that the indices refer to, and how a value is read.
_INDICES: dict[str, tuple[str, str, Callable[[Any], Hashable]]] = {
    "group": ("process_group", "groups", _group),
    "profiling_name": ("profiling_name", "profiling_names", _text),
    "input_sizes": ("input_sizes", "sizes", _sizes),
    "output_sizes": ("output_sizes", "sizes", _sizes),
    "input_dtypes": ("input_dtypes", "dtypes", _texts),
    "output_dtypes": ("output_dtypes", "dtypes", _texts),
    "state": ("state", "states", _text),
    "frames": ("frames", "stacks", _stack),
    "thread": ("thread_id", "threads", _text),
}
_INTEGERS = (
    *("record_id", "pg_id", "collective_seq_id", "p2p_seq_id", "op_id", "timeout_ms", "time_created_ns"),
    *("time_discovered_started_ns", "time_discovered_completed_ns"),
)


def from_dump(dump: Any) -> DumpColumns:
    """Reads a dump from plain data, as unpickled or read from JSON.

    Raises `DumpError` when it is not a dump.
    """
    # torchcomms leaves out `entries` when there are none.
    if not isinstance(dump, dict) or not ("entries" in dump or "pg_config" in dump):
        raise DumpError("not a dump of a flight recorder: it has neither 'entries' nor 'pg_config'")
    entries: list[dict[str, Any]] = dump.get("entries", [])
    if not isinstance(entries, list):
        raise DumpError(f"'entries' is {type(entries).__name__}, not a list")
    for i, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise DumpError(f"entry {i} is {type(entry).__name__}, not a dictionary")

    def column(key: str, read: Callable[[Any], Any], dtype: type[np.generic]) -> npt.NDArray[Any]:
        return np.fromiter((read(e.get(key)) for e in entries), dtype, len(entries))

    def flags(key: str) -> npt.NDArray[np.bool_]:
        return column(key, bool, np.bool_)

    def integers(key: str) -> npt.NDArray[np.int64]:
        return column(key, integer, np.int64)

    extra: dict[str, npt.NDArray[Any]] = {
        key: read(key)
        for key, read in (("unicomm_async", flags), ("unicomm_graph", integers))
        if any(key in e for e in entries)
    }
    sums = {flag: f"unicomm_{side}_checksum" for side, flag in _CHECKSUM_FLAGS.items()}
    if any(key in e for e in entries for key in sums.values()):
        extra |= {key: column(key, lambda text: _checksum(text) or 0, np.uint64) for key in sums.values()}
        extra["unicomm_flags"] = flags("unicomm_compared") * np.int64(COMPARED)
        for flag, key in sums.items():
            known_ones = column(key, lambda text: _checksum(text) is not None, np.bool_)
            extra["unicomm_flags"] |= known_ones * np.int64(flag)
    known: dict[str, dict[Hashable, int]] = {refers_to: {} for _, refers_to, _ in _INDICES.values()}

    def indices(key: str, refers_to: str, read: Callable[[Any], Hashable]) -> npt.NDArray[np.int32]:
        numbers = known[refers_to]
        return column(key, lambda value: numbers.setdefault(read(value), len(numbers)), np.int32)

    columns: dict[str, Any] = {name: indices(*of) for name, of in _INDICES.items()}
    columns |= {name: list(values) for name, values in known.items()}
    columns |= {name: integers(name) for name in _INTEGERS}
    return DumpColumns(
        meta={k: v for k, v in dump.items() if k != "entries" and isinstance(k, str)},
        duration_ms=column("duration_ms", _float, np.float64),
        retired=flags("retired"),
        is_p2p=flags("is_p2p"),
        extra=extra,
        **columns,
    )
