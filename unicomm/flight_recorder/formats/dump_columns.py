"""The entries of one dump in torch's format as columns. The readers of dumps return them."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T", bound=Hashable)
Shapes = tuple[tuple[int, ...], ...]
Frames = tuple[tuple[str, str, int], ...]  # (function, file, line), the innermost call first

NS_PER_MS = 1_000_000
_I64 = np.iinfo(np.int64)


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
        extra: columns that only our dumps have: unicomm_async, and unicomm_graph (the flags CAPTURED,
            REPLAYED and REPLAY of ring/reader.py).
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

    def integers(key: str) -> npt.NDArray[np.int64]:
        return np.fromiter((_integer(e.get(key)) for e in entries), np.int64, len(entries))

    def flags(key: str) -> npt.NDArray[np.bool_]:
        return np.fromiter((bool(e.get(key)) for e in entries), np.bool_, len(entries))

    def interned(key: str, read: Callable[[Any], T]) -> tuple[npt.NDArray[np.int32], list[T]]:
        return _intern((e.get(key) for e in entries), read, len(entries))

    group, groups = interned("process_group", _group)
    name, names = interned("profiling_name", _text)
    shapes: dict[Shapes, int] = {}
    in_sizes, _ = _intern((e.get("input_sizes") for e in entries), _sizes, len(entries), shapes)
    out_sizes, sizes = _intern((e.get("output_sizes") for e in entries), _sizes, len(entries), shapes)
    types: dict[tuple[str, ...], int] = {}
    in_types, _ = _intern((e.get("input_dtypes") for e in entries), _texts, len(entries), types)
    out_types, dtypes = _intern((e.get("output_dtypes") for e in entries), _texts, len(entries), types)
    state, states = interned("state", _text)
    frames, stacks = interned("frames", _stack)
    thread, threads = interned("thread_id", _text)
    return DumpColumns(
        meta={k: v for k, v in dump.items() if k != "entries" and isinstance(k, str)},
        record_id=integers("record_id"),
        pg_id=integers("pg_id"),
        group=group,
        collective_seq_id=integers("collective_seq_id"),
        p2p_seq_id=integers("p2p_seq_id"),
        op_id=integers("op_id"),
        profiling_name=name,
        time_created_ns=integers("time_created_ns"),
        time_discovered_started_ns=integers("time_discovered_started_ns"),
        time_discovered_completed_ns=integers("time_discovered_completed_ns"),
        duration_ms=np.fromiter((_float(e.get("duration_ms")) for e in entries), np.float64, len(entries)),
        input_sizes=in_sizes,
        output_sizes=out_sizes,
        input_dtypes=in_types,
        output_dtypes=out_types,
        state=state,
        retired=flags("retired"),
        timeout_ms=integers("timeout_ms"),
        is_p2p=flags("is_p2p"),
        frames=frames,
        thread=thread,
        groups=groups,
        profiling_names=names,
        sizes=sizes,
        dtypes=dtypes,
        states=states,
        stacks=stacks,
        threads=threads,
        extra={
            key: read(key)
            for key, read in (("unicomm_async", flags), ("unicomm_graph", integers))
            if any(key in e for e in entries)
        },
    )


def _intern(
    values: Iterable[Any], read: Callable[[Any], T], count: int, known: dict[T, int] | None = None
) -> tuple[npt.NDArray[np.int32], list[T]]:
    table: dict[T, int] = {} if known is None else known
    indices = np.fromiter((table.setdefault(read(v), len(table)) for v in values), np.int32, count)
    return indices, list(table)


def _integer(value: Any) -> int:
    if isinstance(value, str):
        value = int(value) if value.lstrip("-").isdigit() and len(value) < 20 else 0
    if not isinstance(value, int | float) or math.isnan(value):
        return 0
    return int(min(max(value, _I64.min), _I64.max))


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
    return tuple(tuple(_integer(d) for d in shape) for shape in value if isinstance(shape, list | tuple))


def _stack(value: Any) -> Frames:
    if not isinstance(value, list | tuple):
        return ()
    return tuple(
        (_text(f.get("name")), _text(f.get("filename")), _integer(f.get("line")))
        for f in value
        if isinstance(f, dict)
    )
