"""TableBuilder: adds rings and dumps to a table."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from unicomm.flight_recorder.formats import operation_names as names
from unicomm.flight_recorder.formats.dump_columns import NS_PER_MS, DumpColumns, integer
from unicomm.flight_recorder.formats.torch_dump import P2P_SEQ_BASE
from unicomm.flight_recorder.ring.call_path import frame_in
from unicomm.flight_recorder.ring.reader import ASYNC, GRAPH, State
from unicomm.flight_recorder.texts import MOST_RANKS, format_ranks, parse_ranks, printable, rank_ranges

from .checksums import Checksums
from .coalesced import merge_coalesced
from .ring_rows import RingTableBuilder
from .table import UNKNOWN, Column, Group, Shapes, Source

_MOST_DIMENSIONS = 64  # of a tensor, as in torch
_STATES = {
    "scheduled": State.CREATED,
    "created": State.CREATED,
    "started": State.STARTED,
    "completed": State.COMPLETED,
    "failed": State.FAILED,
}


class TableBuilder(RingTableBuilder):
    """Builds a table from rings (`add_ring`) and torch's dumps (`add_dump`); `finish` returns it."""

    def add_dump(
        self,
        columns: DumpColumns,
        path: str,
        rank: int,
        form: str,
        host: str = "",
        pid: int = 0,
        process: str = "",
    ) -> None:
        """Adds the dump of one rank.

        `form` is `Source.format`; `process` is the state of the process, "" if unknown.
        """
        source = Source(printable(path), form, rank, pid, printable(host), process or UNKNOWN)
        config = columns.meta.get("pg_config")
        config = config if isinstance(config, dict) else {}
        ours = "unicomm_async" in columns.extra or any(
            isinstance(entry, dict) and "unicomm_uid" in entry for entry in config.values()
        )
        listed = {str(name): self._dump_group(str(name), entry, ours) for name, entry in config.items()}
        alone = next(iter(listed.values())) if len(listed) == 1 else None
        mapped = []
        for name, desc in columns.groups:
            index = listed.get(name)
            if index is None and name in ("0", ""):  # torch's gloo: both are the default group
                index = listed.get("", alone)
            if index is None:
                listed[name] = index = self._dump_group(name, {"desc": desc}, ours, "?")
            mapped.append(index)
            group = self.group_list[index]
            group.name = group.name or printable(name)
            group.desc = group.desc or ("" if ours else printable(desc))
        columns = _printable(columns)
        columns = merge_coalesced(columns, [self._own_rank(index, rank) for index in mapped])
        for index in listed.values():
            source.members[index] = None
        n = len(columns)
        parsed = [names.profiling_name(text) for text in columns.profiling_names]
        group_of = np.asarray(mapped or [-1], np.int32)[columns.group] if n else np.zeros(0, np.int32)
        for both in np.unique(group_of.astype(np.int64) * len(parsed) + columns.profiling_name):
            index, of = divmod(int(both), len(parsed))
            if index >= 0 and not self.group_list[index].backend:
                self.group_list[index].backend = parsed[of][0]
        call, peer, p2p = self._dump_calls(columns, parsed, group_of)
        state, completed = self._dump_states(columns, group_of, p2p, source)
        if not self.take(source):
            return
        seq = np.where(p2p, columns.p2p_seq_id, columns.collective_seq_id)
        source.exact_p2p = "unicomm_async" in columns.extra
        seq = np.where(p2p & (seq > P2P_SEQ_BASE), seq - P2P_SEQ_BASE, seq)
        source.overwritten = max(0, int(columns.record_id.min())) if n else 0
        source.wrapped = source.overwritten > 0
        stacks = [
            self.stacks(tuple(frame_in(file, name, line) for name, file, line in stack))
            for stack in columns.stacks
        ]
        threads = [self.threads(t) for t in columns.threads]
        flags = np.zeros(n, np.uint8)
        if (asynchronous := columns.extra.get("unicomm_async")) is not None:
            flags |= asynchronous.astype(np.uint8) * ASYNC
        if (of_graphs := columns.extra.get("unicomm_graph")) is not None:
            flags |= (of_graphs & GRAPH).astype(np.uint8)
        out = {
            "rank": np.full(n, rank, np.int32),
            "group": group_of,
            "call": call,
            "seq": seq,
            "peer": peer,
            "state": state,
            "error": np.zeros(n, np.uint8),
            "flags": flags,
            "created_ns": columns.time_created_ns,
            "started_ns": columns.time_discovered_started_ns,
            "completed_ns": completed,
            "frame": np.asarray(stacks or [0], np.int32)[columns.frames],
            "thread": np.asarray(threads or [0], np.int32)[columns.thread],
        }
        checksums = Checksums.of(columns.extra, "unicomm_") if "unicomm_flags" in columns.extra else None
        self.put(source, out, ~p2p, checksums)

    def _own_rank(self, group: int, rank: int) -> tuple[int, int]:
        """Returns a rank's own rank in a group, -1 if it is no known member, and the group's size."""
        ranks = self.group_list[group].ranks
        at = np.flatnonzero(ranks == rank)
        return (int(at[0]) if len(at) else -1), len(ranks)

    def _dump_group(self, name: str, entry: Any, ours: bool, unlisted: str = "") -> int:
        """Returns the index of a group; `unlisted` stands for ranks that the entry does not list.

        Our dumps (`ours`) have the backend in the place of torch's description, and a uid.
        """
        entry = entry if isinstance(entry, dict) else {}
        text = str(entry.get("ranks", unlisted))
        members = _most_members(text)
        self.check_members(members)
        uid = str(entry.get("unicomm_uid", ""))
        desc = "" if ours else str(entry.get("desc", ""))
        if uid:  # the group as a ring has it, so that rings and dumps of one job fit together
            name, text = str(entry.get("name") or name), _as_in_rings(text)

        def make() -> Group:
            return Group(
                printable(name), printable(desc), printable(uid), np.asarray(_rank_list(text), np.int32), ""
            )

        return self.group_index((uid or name, text), members, make)

    def _dump_calls(
        self, c: DumpColumns, parsed: list[tuple[str, str, int, int]], group: Column
    ) -> tuple[Column, Column, Column]:
        """Returns the call of each row, its peer in the job, and whether it is P2P."""
        n = len(c)
        if not n:
            return np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.bool_)
        parts = (c.profiling_name, c.input_sizes, c.output_sizes, c.input_dtypes, c.output_dtypes, c.is_p2p)
        lengths = (len(c.profiling_names), len(c.sizes), len(c.sizes), len(c.dtypes), len(c.dtypes), 2)
        key: Column = np.zeros(n, np.int64)
        for column, length in zip(parts, lengths, strict=True):
            key = key * max(length, 1) + column
        _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
        calls, pairs, kinds = [], [], []
        for row in first:
            backend, op, _, peer = parsed[int(c.profiling_name[row])]
            p2p = bool(c.is_p2p[row]) or op in ("send", "recv")
            kind = names.kind(op, p2p)
            ins, outs = c.sizes[int(c.input_sizes[row])], c.sizes[int(c.output_sizes[row])]
            in_types, out_types = c.dtypes[int(c.input_dtypes[row])], c.dtypes[int(c.output_dtypes[row])]
            if backend == "nccl" and op == "scatter":  # torch's group passes them in the other order
                (ins, in_types), (outs, out_types) = (outs, out_types), (ins, in_types)
            calls.append(
                self.calls(
                    (
                        int(kind),
                        self.ops(op),
                        0,
                        -1,
                        self.dtypes(names.dtype(in_types[0]) if in_types else ""),
                        self.dtypes(names.dtype(out_types[0]) if out_types else ""),
                        _elements(ins),
                        _elements(outs),
                        self.shapes(ins),
                        self.shapes(outs),
                    )
                )
            )
            pairs.append(peer)
            kinds.append(p2p)
        where = inverse.reshape(-1)
        p2p_rows = np.asarray(kinds, np.bool_)[where]
        inside = np.asarray(pairs, np.int64)[where]
        peers = np.full(n, -1, np.int32)
        if p2p_rows.any():
            peers[p2p_rows] = self.in_job(group[p2p_rows], inside[p2p_rows])
        return np.asarray(calls, np.int32)[where], peers, p2p_rows

    @staticmethod
    def _dump_states(c: DumpColumns, group: Column, p2p: Column, source: Source) -> tuple[Column, Column]:
        """Returns the states and the completion times of the rows.

        torch's gloo, and torchcomms on a CPU, leave all entries "scheduled" and mark those that are over as
        retired, failed ones too (retirement.py). The status of a group may be a moment behind that.
        """
        table = np.asarray([int(_STATES.get(s, State.CREATED)) for s in c.states] or [1], np.uint8)
        state: Column = table[c.state] if len(c) else np.zeros(0, np.uint8)
        completed: Column = c.time_discovered_completed_ns.copy()
        known = np.isnan(c.duration_ms) | (completed != 0) | (c.time_discovered_started_ns == 0)
        rest = np.flatnonzero(~known & (state == State.COMPLETED))
        lasted: Column = np.rint(c.duration_ms[rest] * NS_PER_MS).astype(np.int64)
        completed[rest] = np.add(c.time_discovered_started_ns[rest], lasted)
        over = (completed != 0) & (state != State.FAILED)
        retired = c.retired & (state == State.CREATED)
        status = c.meta.get("pg_status")
        status = status if isinstance(status, dict) else {}
        owner: dict[str, int] = {}
        if len(c):
            ids, first = np.unique(c.pg_id, return_index=True)
            owner = {str(int(i)): int(group[f]) for i, f in zip(ids, first, strict=True)}
        if "unicomm_async" in c.extra:  # our dumps number groups in the order of pg_config
            config = c.meta.get("pg_config")
            for i, index in enumerate(source.members if isinstance(config, dict) else ()):
                owner.setdefault(str(i), index)
        # torch notes the number of the last Work there, which may be that of a message.
        ours = "unicomm_async" in c.extra
        with_messages = set() if ours else set(np.unique(group[p2p]).tolist())
        for key, entry in status.items():
            owned = owner.get(str(key))
            if owned is None or not isinstance(entry, dict) or owned in with_messages:
                continue
            for name in ("enqueued", "started", "completed"):
                value = integer(entry.get(f"last_{name}_collective", -1))
                if value >= 0:
                    kept = {"enqueued": source.created, "started": source.started}.get(name, source.completed)
                    kept[owned] = value
        state[over | retired] = State.COMPLETED
        source.retired_only = bool(retired.any())
        return state, completed


def _printable(columns: DumpColumns) -> DumpColumns:
    """Returns columns whose texts can be shown. Names of groups stay, because `meta` has them, too."""
    return replace(
        columns,
        profiling_names=[printable(name) for name in columns.profiling_names],
        dtypes=[tuple(map(printable, names_)) for names_ in columns.dtypes],
        states=[printable(state) for state in columns.states],
        stacks=[
            tuple((printable(name), printable(file), line) for name, file, line in stack)
            for stack in columns.stacks
        ],
        threads=[printable(thread) for thread in columns.threads],
    )


def _elements(shapes: Shapes) -> int:
    if max(map(len, shapes), default=0) > _MOST_DIMENSIONS:  # a product of a million numbers takes minutes
        return -1
    return max(-1, min(sum(map(math.prod, shapes)), 1 << 62))


# A job has as many dumps with the same list as it has ranks. The texts are kept, so they must not be many.
@lru_cache(maxsize=128)
def _most_members(text: str) -> int:
    """Returns how many ranks `_rank_list` reads in a text at most."""
    if text.lstrip().startswith("["):
        return text.count(",") + text.count("[")
    try:
        return sum(map(len, rank_ranges(text, MOST_RANKS)))
    except ValueError:
        return 0


@lru_cache(maxsize=128)
def _as_in_rings(text: str) -> str:
    return format_ranks(_rank_list(text))


def _rank_list(text: str) -> list[int]:
    """Reads ranks as written by torch ("[0, 1]") or by us ("0-1"). Returns [] for other text."""
    if not text:
        return []
    try:
        if text.lstrip().startswith("["):
            value = json.loads(text)
            good = isinstance(value, list) and all(isinstance(r, int) and 0 <= r < MOST_RANKS for r in value)
            return value if good else []
        return parse_ranks(text, MOST_RANKS)
    except (ValueError, RecursionError):
        return []
