"""Generates dumps of jobs of any size: torch's pickles, and our own rings.

    python -m benchmarks.trace_dumps FOLDER --ranks 2048 --entries 2000 --format pickle

All ranks do the same all-reduces of one group, a few microseconds apart. With `--guilty RANK` that rank stops
before the last `--behind` of them, and the others wait for it.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

BEGAN = 1_760_000_000_000_000_000  # nanoseconds since 1970
STEP = 1_000_000
TOOK = 200_000
OPS = {"1": "send", "2": "recv", "3": "broadcast", "4": "all_reduce", "14": "barrier"}


@dataclass(frozen=True)
class Job:
    folder: Path
    ranks: int
    entries: int
    guilty: int = -1
    behind: int = 1

    def times(self, rank: int) -> tuple[np.ndarray, np.ndarray, int]:
        """When each operation began and was over (0: it is not), and how many the rank began."""
        n = self.entries - (self.behind if rank == self.guilty else 0)
        jitter = np.random.default_rng(rank).integers(0, 20_000, n)
        began = BEGAN + STEP * np.arange(1, n + 1) + jitter
        over = BEGAN + STEP * np.arange(1, n + 1) + TOOK
        if 0 <= self.guilty < self.ranks:
            over[self.entries - self.behind :] = 0
        return began, over, n


def write_pickle(job: Job, rank: int) -> None:
    """What torch's own recorder writes at an all-reduce of the world, without frames."""
    began, over, n = job.times(rank)
    entries = []
    for i in range(n):
        b, e = int(began[i]), int(over[i])
        entry = {
            "frames": [],
            "record_id": i,
            "pg_id": 0,
            "process_group": ("0", "default_pg"),
            "collective_seq_id": i + 1,
            "p2p_seq_id": 0,
            "op_id": i + 1,
            "profiling_name": "nccl:all_reduce",
            "time_created_ns": b,
            "input_sizes": [[1024, 1024]],
            "input_dtypes": ["Float"],
            "output_sizes": [[1024, 1024]],
            "output_dtypes": ["Float"],
            "state": "completed" if e else "started",
            "time_discovered_started_ns": b + 5_000,
            "time_discovered_completed_ns": e or None,
            "retired": bool(e),
            "timeout_ms": 600_000,
            "is_p2p": False,
            "thread_id": "1",
            "thread_name": "python",
        }
        if e:
            entry["duration_ms"] = (e - b) / 1e6
        entries.append(entry)
    done = int(np.count_nonzero(over))
    status = {
        "last_enqueued_collective": n,
        "last_started_collective": n,
        "last_completed_collective": done,
    }
    dump = {
        "version": "2.10",
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": json.dumps(list(range(job.ranks)))}},
        "pg_status": {"0": status},
        "comm_lib_version": "2.29",
        "entries": entries,
    }
    Path(job.folder, f"rank_{rank}").write_bytes(pickle.dumps(dump))


def ring_template(entries: int, ranks: int) -> bytes:
    """A ring as the recorder itself writes it, with `entries` all-reduces."""
    import torch

    from unicomm import _core

    meta = json.dumps({"format": 1, "ops": OPS, "dtypes": {"2": "float32"}, "reductions": {"1": "SUM"}})
    recorder = _core.Recorder("", meta, 0, ranks, entries)
    comm = recorder.add_comm("main", "shm", "u1", f"0-{ranks - 1}" if ranks > 1 else "0", 0, ranks)
    tensor = [torch.empty(1 << 20)]
    for seq in range(1, entries + 1):
        recorder.finish(recorder.begin(comm, 4, seq, seq, tensor, tensor, 1))
    return bytes(recorder.snapshot())


def write_ring(job: Job, template: bytes, rank: int) -> None:
    """A copy of the template with the rank and its times. Empty pages stay holes in the file."""
    from unicomm.flight_recorder.ring.reader import COMM, HEADER, RECORD

    data = bytearray(template)
    began, over, n = job.times(rank)
    head = np.frombuffer(data, HEADER, 1)
    records = np.frombuffer(data, RECORD, int(head["rec_cap"][0]), int(head["rec_off"][0]))
    head["rank"], head["pid"], head["proc_start_ticks"] = rank, 1 << 22, 1
    head["start_real_ns"], head["start_mono_ns"], head["rec_next"], head["flags"] = BEGAN, 1, n, 1
    comm = np.frombuffer(data, COMM, 1, int(head["comm_off"][0]))
    comm["rank"], comm["coll_created"], comm["coll_started"] = rank, n, n
    comm["coll_completed"] = np.count_nonzero(over)
    records["id"][n:] = 0
    records["created_ns"][:n] = records["started_ns"][:n] = began - BEGAN + 1
    records["completed_ns"][:n] = np.where(over > 0, over - BEGAN + 1, 0)
    records["state"][:n] = np.where(over > 0, 3, 2)
    path = Path(job.folder, f"rank{rank:05d}.ucring")
    with path.open("wb") as file:
        for at in range(0, len(data), 1 << 12):
            page = data[at : at + (1 << 12)]
            if page.count(0) != len(page):
                file.seek(at)
                file.write(page)
        file.truncate(len(data))


def generate(job: Job, form: str) -> None:
    """Writes the files of all ranks, on all cores."""
    job.folder.mkdir(parents=True, exist_ok=True)
    write: Callable[[int], None] = partial(write_pickle, job)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        if form == "ring":  # torch is loaded in another process than the one that is to stay small
            template = pool.submit(ring_template, job.entries, job.ranks).result()
            write = partial(write_ring, job, template)
        list(pool.map(write, range(job.ranks), chunksize=max(1, job.ranks // 64)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--entries", type=int, default=2000)
    parser.add_argument("--format", choices=("pickle", "ring"), default="pickle")
    parser.add_argument("--guilty", type=int, default=-1)
    parser.add_argument("--behind", type=int, default=1)
    given = parser.parse_args()
    generate(Job(given.folder, given.ranks, given.entries, given.guilty, given.behind), given.format)


if __name__ == "__main__":
    main()
