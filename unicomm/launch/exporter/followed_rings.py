"""FollowedRings: counts the operations in rings while ranks write to them.

A ring holds the newest records of a process. They are counted when a scraper asks, and before half a ring of
them is overwritten. Reading costs the ranks nothing; it has a bounded share of a core.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unicomm.flight_recorder.analysis.analyze import analyze
from unicomm.flight_recorder.metrics.samples import offsets_of, samples
from unicomm.flight_recorder.metrics.totals import Sample, Totals
from unicomm.flight_recorder.ring.endings import EndingError, side_files
from unicomm.flight_recorder.ring.files import MOST_SIDE_BYTES, read_file, trusted_owners
from unicomm.flight_recorder.ring.folder import SUFFIX
from unicomm.flight_recorder.ring.reader import HEADER, MAGIC, Ring, State, owners, read_folder
from unicomm.flight_recorder.table.builder import TableBuilder
from unicomm.flight_recorder.table.table import Column, Table
from unicomm.flight_recorder.texts import printable

_LOOK = 0.25  # seconds between two looks at the rings' headers
_SHARE = 0.1  # the most of a core that counting takes between scrapes
_FRESH = 1.0  # seconds for which an answer is good: several scrapers cost as much as one

Ids = npt.NDArray[np.int64]


@dataclass
class _Place:
    """How far a ring is counted: up to record `seen`, without the records `pending`, which had not ended.

    `begun`: how many records there were, without the places that are left out for those under way.
    """

    seen: int = 0
    begun: int = 0
    pending: Ids = field(default_factory=lambda: np.zeros(0, np.int64))

    def advance(self, ring: Ring) -> tuple[Column, int]:
        """Returns which records are to be counted now, and how many were lost."""
        newest, capacity = int(ring.header["rec_next"]), int(ring.header["rec_cap"])
        oldest = max(0, newest - capacity)  # the newest record that is surely overwritten
        ids = ring.records["id"].astype(np.int64)
        ended = ring.records["state"] >= State.COMPLETED
        kept = ids[ring.kept]  # their places were left out when the ring came to them again
        passed = kept[kept > self.seen]
        wanted = np.concatenate([self.pending, passed, np.arange(max(self.seen, oldest) + 1, newest + 1)])
        count = ended & np.isin(ids, wanted)
        left = wanted[~np.isin(wanted, ids[count])]  # also records that were being written just now
        left_out = np.isin(left % capacity, kept % capacity) & ~np.isin(left, kept)
        before, self.pending = self.pending, left[~left_out & ((left > oldest) | np.isin(left, kept))]
        fresh = len(before) + ring.total - self.begun
        lost = fresh - int(np.count_nonzero(count)) - len(self.pending)
        # Places that are left out just now count only afterwards.
        self.seen, self.begun = newest, ring.total - min(lost, 0)
        return count, max(lost, 0)


class FollowedRings:
    """Metrics of this host's ranks, counted from their rings. Several threads may use one object."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._folder: Path | None = None
        self._places: dict[str, _Place] = {}
        self._unreadable: set[str] = set()
        self._totals = Totals()
        self._taken: list[Sample] = []
        self._taken_at = -_FRESH

    def follow(self, folder: Path) -> None:
        """Goes on with the rings of another start of the ranks."""
        with self._lock:
            try:
                self._count()  # what the former ranks did last
            except Exception as error:  # the new ones are still to be followed
                _tell("not counted", error)
            self._folder, self._places = folder, {}
            self._taken_at = -_FRESH

    def samples(self) -> list[Sample]:
        """Returns the samples of now."""
        with self._lock:
            if time.monotonic() - self._taken_at >= _FRESH:
                table = self._count()
                try:
                    report = analyze(table) if table.sources else None
                except Exception as error:  # damaged rings: the counters are still good
                    _tell("no verdict", error)
                    report = None
                self._taken = samples(table, report, self._totals).samples
                self._taken_at = time.monotonic()
            return self._taken

    def keep_up(self) -> None:
        """Counts whenever records are about to be overwritten, for ever."""
        while True:
            time.sleep(_LOOK)
            began = time.perf_counter()
            try:
                if not self._filling():
                    continue
                with self._lock:
                    self._count()
            except Exception as error:  # the next look may do better
                _tell("not counted", error)
            time.sleep((time.perf_counter() - began) * (1 / _SHARE - 1))

    def _filling(self) -> bool:
        """Returns whether half of a ring was written since it was read."""
        folder = self._folder
        for path in folder.glob(f"*{SUFFIX}") if folder is not None else ():
            if str(path) in self._unreadable:  # its header may say anything
                continue
            with contextlib.suppress(OSError):
                data = read_file(path, trusted_owners(path.parent), size=HEADER.itemsize)
                if len(data) < HEADER.itemsize or not data.startswith(MAGIC):
                    continue
                head = np.frombuffer(data, HEADER, 1)[0]
                place = self._places.get(str(path))
                if int(head["rec_next"]) - (place.seen if place else 0) > int(head["rec_cap"]) // 2:
                    return True
        return False

    def _count(self) -> Table:
        """Reads all rings, and counts the records that have ended since the last time."""
        builder = TableBuilder()
        by_path: dict[str, tuple[Ring, Column]] = {}
        if self._folder is not None:
            rings, remarks = read_folder(self._folder)
            self._unreadable = {remark.path for remark in remarks}
            for ring in sorted(rings, key=lambda r: (r.rank, -int(r.header["start_real_ns"]))):
                builder.add_ring(ring)
                count, lost = self._places.setdefault(ring.path, _Place()).advance(ring)
                by_path[printable(ring.path)] = ring, count  # as the table names it
                self._totals.lose(next((rank for rank, _ in owners(ring)), ring.rank), lost)
            trusted = trusted_owners(self._folder)
            for path in side_files(self._folder):
                with contextlib.suppress(OSError, EndingError):
                    data = read_file(path, trusted, MOST_SIDE_BYTES)
                    builder.endings.add(str(path), data, path.lstat().st_mtime_ns)
        table = builder.finish()
        fresh = np.zeros(len(table), np.bool_)
        for source in table.sources:
            rows = _of_rank(*by_path[source.path], source.rank)
            if len(rows) == source.end - source.begin:
                fresh[source.begin : source.end] = rows
        self._totals.add(table, fresh, offsets_of(table))
        return table


def _tell(what: str, error: Exception) -> None:
    print(f"{what}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


def _of_rank(ring: Ring, count: Column, rank: int) -> Any:
    """Returns `count` for the records of one rank. Ranks that are threads share a ring."""
    shared = dict(owners(ring))
    if len(shared) < 2:
        return count
    return count[np.isin(ring.records["comm"], [comm.index for comm in shared.get(rank, ())])]
