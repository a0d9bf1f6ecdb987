"""merge_coalesced: the entries that torch's NCCL group writes for one coalesced collective, as one row.

Between the start and the end of coalescing, ProcessGroupNCCL records an entry for each call, all with one
sequence number, and at the end an entry "nccl:coalesced" for the whole. Uneven all_gather and reduce_scatter
are made of `_broadcast_oop` and `_reduce_oop`, one call per rank of the group, and end with
"nccl:ALLGATHER_coalesced" and "nccl:REDUCE_SCATTER_coalesced". Only the last entry has a state and times: the
others remain "scheduled" for ever.

A coalesced collective becomes one row, with the sizes of its calls. The messages of a batch keep their rows,
because each is matched with its own peer, and get the state and the times of the batch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from unicomm.flight_recorder.formats.dump_columns import DumpColumns, Shapes
from unicomm.flight_recorder.formats.operation_names import profiling_name

_END = re.compile(r"\w*:(?:[A-Z_]+_)?coalesced$")
_PARTS = {"_broadcast_oop": "all_gather_v", "_reduce_oop": "reduce_scatter_v"}
_OF_THE_END = (
    *("state", "retired", "time_discovered_started_ns", "time_discovered_completed_ns", "duration_ms"),
)

Rows = npt.NDArray[np.int64]
T = TypeVar("T")


def merge_coalesced(columns: DumpColumns, own: Sequence[tuple[int, int]]) -> DumpColumns:
    """Returns the columns with one row for each coalesced collective.

    Args:
        own: for each of `columns.groups`: the rank's own rank in it, -1 if unknown, and the group's size.
    """
    names = columns.profiling_names
    ends = np.asarray([bool(_END.match(name)) for name in names], np.bool_)
    parts = np.asarray([name.partition(":")[2] in _PARTS for name in names], np.bool_)
    if not (ends.any() or parts.any()):
        return columns
    return _Merger(columns, own, ends[columns.profiling_name], parts[columns.profiling_name]).merged()


class _Values(Generic[T]):
    """A list of values to which columns refer, with new values at its end."""

    def __init__(self, values: Sequence[T]) -> None:
        self.all = list(values)
        self._index = {value: i for i, value in reversed(list(enumerate(values)))}

    def __call__(self, value: T) -> int:
        """Returns the index of a value, which is added if it is new."""
        if value not in self._index:
            self._index[value] = len(self.all)
            self.all.append(value)
        return self._index[value]


class _Merger:
    """Merges the rows of one dump; new values are appended to the lists that columns refer to."""

    def __init__(
        self,
        columns: DumpColumns,
        own: Sequence[tuple[int, int]],
        is_end: npt.NDArray[np.bool_],
        is_part: npt.NDArray[np.bool_],
    ) -> None:
        self.own, self.is_end, self.is_part = own, is_end, is_part
        copies: dict[str, Any] = {
            f.name: value.copy()
            for f in fields(columns)
            if isinstance(value := getattr(columns, f.name), np.ndarray)
        }
        self.columns = replace(columns, **copies)
        self.names = _Values(columns.profiling_names)
        self.sizes = _Values(columns.sizes)
        self.dtypes = _Values(columns.dtypes)
        self.keep = np.ones(len(columns), np.bool_)

    def _mark_ends_of_batches(self) -> None:
        """Takes the ends of batches of messages for messages: torch gives them the flag of a collective."""
        c = self.columns
        order = np.argsort(c.group, kind="stable")
        before, after = order[:-1], order[1:]
        same = (
            (c.group[before] == c.group[after])
            & (c.p2p_seq_id[before] == c.p2p_seq_id[after])
            & (c.collective_seq_id[before] == c.collective_seq_id[after])
        )
        c.is_p2p[after[same & self.is_end[after] & c.is_p2p[before].astype(np.bool_)]] = True

    def merged(self) -> DumpColumns:
        c = self.columns
        self._mark_ends_of_batches()
        seq = np.where(c.is_p2p, c.p2p_seq_id, c.collective_seq_id)
        keys = np.stack([c.group.astype(np.int64), c.is_p2p.astype(np.int64), seq], axis=1)
        _, of = np.unique(keys, axis=0, return_inverse=True)
        of = of.reshape(-1)
        order = np.argsort(of, kind="stable")
        bounds = np.searchsorted(of[order], np.arange(int(of.max()) + 2))
        for number in np.unique(of[self.is_end | self.is_part]).tolist():
            self._one(order[bounds[number] : bounds[number + 1]])
        kept: dict[str, Any] = {
            f.name: value[self.keep] for f in fields(c) if isinstance(value := getattr(c, f.name), np.ndarray)
        }
        kept |= {"profiling_names": self.names.all, "sizes": self.sizes.all, "dtypes": self.dtypes.all}
        extra = {name: value[self.keep] for name, value in c.extra.items()}
        return replace(c, **kept, extra=extra)

    def _one(self, rows: Rows) -> None:
        """Merges the rows of one number of a group."""
        c = self.columns
        ends, calls = rows[self.is_end[rows]], rows[~self.is_end[rows]]
        at_the_start = int(c.record_id.min()) > 0 and rows[0] == 0  # where older entries are overwritten
        if not len(calls):  # versions of torch that record only the end, or the calls are overwritten
            self.keep[rows] = not at_the_start
            return
        if not len(ends):
            # The rank is between two calls of a collective that has not been given to NCCL.
            self.keep[calls[self.is_part[calls]]] = False
            return
        end = int(ends[-1])
        texts = [c.profiling_names[int(i)] for i in c.profiling_name[calls]]
        ops = list(dict.fromkeys(profiling_name(text)[1] for text in texts))
        if c.is_p2p[end] or "send" in ops or "recv" in ops:
            for name in _OF_THE_END:
                column = getattr(c, name)
                column[calls] = column[end]
            return
        self.keep[rows] = False
        position, size = self.own[int(c.group[end])]
        uneven = bool(self.is_part[calls].all())
        if at_the_start or (uneven and (len(calls) != size or not 0 <= position < size)):
            return  # without all its calls it cannot be compared with the other ranks'
        self.keep[end] = True
        first = int(calls[0])
        for name in ("record_id", "time_created_ns", "frames", "thread"):
            column = getattr(c, name)
            column[end] = column[first]
        ins, outs = self._sizes(c.input_sizes[calls]), self._sizes(c.output_sizes[calls])
        in_types, out_types = self._types(c.input_dtypes[calls]), self._types(c.output_dtypes[calls])
        backend, _, name = c.profiling_names[int(c.profiling_name[first])].partition(":")
        if uneven:
            op = _PARTS[name.split()[0]]
            mine = ins[position : position + 1]
            ins, outs = (mine, outs) if op == "all_gather_v" else (ins, mine)
        else:
            op = "+".join(ops)
        c.profiling_name[end] = self.names(f"{backend}:{op}")
        c.input_sizes[end], c.output_sizes[end] = self.sizes(ins), self.sizes(outs)
        c.input_dtypes[end] = self.dtypes(in_types)
        c.output_dtypes[end] = self.dtypes(out_types)

    def _sizes(self, indices: npt.NDArray[np.int32]) -> Shapes:
        return tuple(shape for i in indices.tolist() for shape in self.columns.sizes[i])

    def _types(self, indices: npt.NDArray[np.int32]) -> tuple[str, ...]:
        return tuple(dtype for i in indices.tolist() for dtype in self.columns.dtypes[i])
