"""RingTableBuilder: adds rings to a table."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from unicomm.flight_recorder.formats import operation_names as names
from unicomm.flight_recorder.memory import Memory
from unicomm.flight_recorder.ring.reader import (
    ASYNC,
    BATCH,
    ERRORS,
    GRAPH,
    P2P,
    RECORD,
    UNKNOWN_ERROR,
    Comm,
    InputRemark,
    Ring,
)
from unicomm.flight_recorder.texts import printable

from .checksums import Checksums
from .table import ENDED, KILLED, RUNNING, STOPPED, UNKNOWN, Column, Group, Source
from .table_store import TableStore

_MOST = np.iinfo(np.int64).max
_CHECKSUM_FIELDS = ("flags", "input_checksum", "output_checksum")


def _host_ranks(ring: Ring) -> range:
    """Returns the ranks of a ring's host, as its launcher told; none if it did not."""
    told = ring.meta.get("local")
    if ring.rank < 0 or not isinstance(told, list) or len(told) != 2:
        return range(0)
    rank, size = told
    if not (
        isinstance(rank, int) and isinstance(size, int) and 0 <= rank < size <= int(ring.header["world"])
    ):
        return range(0)
    return range(ring.rank - rank, ring.rank - rank + size)


_PROCESS = {"running": RUNNING, "stopped": STOPPED, "killed": KILLED, "ended": ENDED}
# The 64-bit words of a ring's record that distinguish calls, with a mask.
_WORDS = tuple(
    (word, mask)
    for word, mask in (
        (7, 0xFFFF_FF00_FFFF_0000),  # op, red, dtypes; without communicator and state
        (10, None),
        (11, None),
        (12, 0x000A_FFFF_FFFF_FFFF),  # numbers of tensors and dimensions, send or receive
        *((w, None) for w in range(14, 22)),  # dimensions
    )
)


class RingTableBuilder(TableStore):
    """A TableStore to which rings can be added."""

    def __init__(self, memory: Memory | None = None) -> None:
        super().__init__(memory)
        # a program's hashes of calls -> calls, see _ring_calls
        self._known: dict[str, tuple[Column, Column]] = {}

    def add_ring(self, ring: Ring, process: str = "", as_of_ns: int = 0) -> None:
        """Adds the records of one process. If its ranks are threads, each rank becomes a source.

        Args:
            process: the state of the process, "" to look it up.
            as_of_ns: the wall-clock time of that state, 0 for now or the time of the copy.
        """
        process = process or _PROCESS.get(ring.process_state, UNKNOWN)
        if process in (RUNNING, STOPPED) and not as_of_ns:
            as_of_ns = ring.real_ns(ring.now_ns) if ring.copied_as else time.time_ns()
        self._tell_of_losses(ring)
        records, kept = ring.records, ring.kept
        groups = np.fromiter((self._ring_group(c) for c in ring.comms), np.int32, len(ring.comms))
        own = [self._ring_rank(ring, c, int(g)) for c, g in zip(ring.comms, groups, strict=True)]
        ranks = sorted({rank for rank, comm in zip(own, ring.comms, strict=True) if comm.listed} or set(own))
        if len(ranks) == 1 or not own:
            source = Source(
                printable(ring.path),
                "ring",
                ranks[0] if ranks else ring.rank,
                process=process,
                as_of_ns=as_of_ns,
            )
            source.host_ranks = _host_ranks(ring)
            self._add_ring_rank(ring, source, records, kept, groups, ring.comms)
            return
        owners = np.asarray(own, np.int64)[records["comm"]]
        for rank in ranks:
            comms = [c for c, r in zip(ring.comms, own, strict=True) if r == rank]
            source = Source(printable(ring.path), "ring", rank, process=process, as_of_ns=as_of_ns)
            mine = owners == rank
            self._add_ring_rank(ring, source, records[mine], kept[mine], groups, comms)

    def _ring_rank(self, ring: Ring, comm: Comm, group: int) -> int:
        """Returns the rank in the job to which the records of a communicator belong."""
        if not comm.listed:
            return ring.rank
        ranks = self.group_list[group].ranks
        inside = int(ranks[comm.rank]) if 0 <= comm.rank < len(ranks) else -1
        threads = sum(c.uid == comm.uid for c in ring.comms) > 1 if len(ring.comms) > 1 else False
        return inside if ring.rank < 0 or threads else ring.rank

    def _ring_group(self, comm: Comm) -> int:
        if not comm.listed:
            return -1

        def make() -> Group:
            return Group(comm.name, "", comm.uid, np.asarray(comm.ranks, np.int32), comm.backend)

        return self.group_index((comm.uid or comm.name, comm.ranks_text), max(comm.size, 0), make)

    def _add_ring_rank(
        self, ring: Ring, source: Source, records: Column, kept: Column, groups: Column, comms: Sequence[Comm]
    ) -> None:
        source.pid, source.host, source.wrapped, source.exact_p2p = ring.pid, ring.host, ring.wrapped, True
        source.runs_here = ring.runs_here
        source.overwritten = max(0, ring.total - len(ring.records))  # of all ranks that share the ring
        for comm in (c for c in comms if c.listed):
            index = int(groups[comm.index])
            # The ring has 64 bits without a sign, of which a damaged one may use the last.
            source.created[index] = min(comm.coll_created, _MOST)
            source.started[index] = min(comm.coll_started, _MOST)
            source.completed[index] = min(comm.coll_completed, _MOST)
            source.members[index] = None
            if comm.state == "finalized":
                source.closed.add(index)
        if not self.take(source):
            return
        n = len(records)
        comm_of = records["comm"].astype(np.intp)
        group = groups[comm_of] if len(groups) else np.full(n, -1, np.int32)
        flags, errors = records["flags"], records["error"]
        p2p = (flags & P2P) != 0
        peer = np.full(n, -1, np.int32)
        if p2p.any():
            peer[p2p] = self.in_job(group[p2p], records["peer"][p2p])
        shift = ring.real_ns(0)
        out = {
            "rank": np.full(n, source.rank, np.int32),
            "group": group,
            "call": self._ring_calls(ring, records, group),
            "seq": records["seq"].astype(np.int64),
            "peer": peer,
            "state": np.clip(records["state"], 1, 4).astype(np.uint8),
            "error": np.where(np.isin(errors, list(ERRORS)), errors, UNKNOWN_ERROR).astype(np.uint8),
            "flags": (flags & (ASYNC | BATCH | GRAPH)).astype(np.uint8),
            "frame": self._ring_frames(ring, records["frame"]),
            "thread": self._ring_threads(records["tid"]),
        }
        for key in ("created_ns", "started_ns", "completed_ns"):
            times = records[key].astype(np.int64)
            out[key] = times + shift if key == "created_ns" else np.where(times != 0, times + shift, 0)
        checksums = Checksums.of({name: records[name] for name in _CHECKSUM_FIELDS})
        # Between a record that was kept and the others, records are missing.
        self.put(source, out, ~p2p & ~kept, checksums)

    def _tell_of_losses(self, ring: Ring) -> None:
        if int(ring.header["strings_dropped"]):
            text = "names of communicators or files are missing: its table of texts is full"
            self.remarks.append(InputRemark(ring.path, text))
        if not all(comm.listed for comm in ring.comms):
            text = (
                f"it has more than {len(ring.comms) - 1} open communicators; those of the others are unknown"
            )
            self.remarks.append(InputRemark(ring.path, text))

    def _ring_calls(self, ring: Ring, records: Column, group: Column) -> Column:
        """Returns the call of each record.

        Records are compared by a hash, so that each distinct call is read once.
        """
        if not len(records):
            return np.zeros(0, np.int32)
        words = np.ascontiguousarray(records).view(np.uint64).reshape(len(records), RECORD.itemsize // 8)
        peer = records["peer"]
        rooted = (peer >= 0) & ((records["flags"] & P2P) == 0)
        h = np.where(rooted, (group.astype(np.int64) << 32) | peer, -1).astype(np.uint64)
        for word, mask in _WORDS:
            value = words[:, word] if mask is None else words[:, word] & np.uint64(mask)
            h ^= value
            h *= np.uint64(0x9E37_79B9_7F4A_7C15)
            h ^= h >> np.uint64(29)
        # Each ring has its own table of names. Rings with equal tables, as in one program, share their
        # hashes.
        program = str([ring.meta.get(k) for k in ("ops", "dtypes", "reductions")])
        known, numbers = self._known.get(program, (np.zeros(0, np.uint64), np.zeros(0, np.int32)))
        at = np.searchsorted(known, h)
        np.minimum(at, max(len(known) - 1, 0), out=at)
        if not len(known) or not (known[at] == h).all():
            fresh, first = np.unique(h, return_index=True)
            news = [int(i) for i in first[~np.isin(fresh, known)]]
            added = np.asarray([self._ring_call(ring, records[i], int(group[i])) for i in news], np.int32)
            known = np.concatenate([known, h[news]])
            order = np.argsort(known)
            known, numbers = known[order], np.concatenate([numbers, added])[order]
            self._known[program] = (known, numbers)
            at = np.searchsorted(known, h)
        out: Column = numbers[at]
        return out

    def _ring_call(self, ring: Ring, record: Any, group: int) -> int:
        op = names.operation(ring.op(record))
        p2p = bool(int(record["flags"]) & P2P)
        root = -1
        if not p2p and int(record["peer"]) >= 0:
            root = int(self.in_job(np.asarray([group]), np.asarray([int(record["peer"])]))[0])
        shapes = []
        for side in ("in", "out"):
            n = min(int(record[f"n_{side}"]), 1 << 15)
            shapes.append(self.shapes((tuple(ring.shape(record, side)),) * n))
        return self.calls(
            (
                int(names.kind(op, p2p)),
                self.ops(op),
                self.reductions(ring.reduction(record)),
                root,
                self._dtype(ring, int(record["in_dtype"])),
                self._dtype(ring, int(record["out_dtype"])),
                min(int(record["in_numel"]), 1 << 62),
                min(int(record["out_numel"]), 1 << 62),
                *shapes,
            )
        )

    def _dtype(self, ring: Ring, code: int) -> int:
        return self.dtypes(ring.dtype(code)) if code else 0

    def _ring_frames(self, ring: Ring, frames: Column) -> Column:
        numbers, inverse = np.unique(frames, return_inverse=True)
        mapped = [self.stacks(ring.call_path_from(int(number))) for number in numbers]
        out: Column = np.asarray(mapped, np.int32)[inverse.reshape(-1)]
        return out

    def _ring_threads(self, tids: Column) -> Column:
        if len(tids) and (tids == tids[0]).all():
            return np.full(len(tids), self.threads(str(int(tids[0]))), np.int32)
        values, inverse = np.unique(tids, return_inverse=True)
        out: Column = np.asarray([self.threads(str(int(v))) for v in values], np.int32)[inverse.reshape(-1)]
        return out
