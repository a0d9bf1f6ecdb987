"""Time and memory of merging the traces of many ranks.

    python -m benchmarks.profile_merge --ranks 64 --events 20000

Writes traces of the form that torch's profiler writes, from a model of a data-parallel job (steps of
computation, collectives on two groups, clocks that differ), and merges them in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COLUMNS = [
    *(
        "op",
        "seq_num",
        "group",
        "thread",
        "traced",
        "issued_ns",
        "started_ns",
        "completed_ns",
        "state",
        "is_async",
    ),
    *("in_elements", "out_elements", "dtype", "root", "peer", "bytes", "in_splits", "out_splits", "batch"),
]
START = 1_800_000_000_000_000_000


def rank_trace(rank: int, ranks: int, events: int, share: float, arrivals: list[list[int]]) -> str:
    """One rank's trace: `share` of its events are collectives, which all leave together."""
    rng = random.Random(rank)
    clock = rng.randrange(-5_000_000, 5_000_000)  # this host's clock against the others'
    pid = 1000 + rank
    base = START - START % 10**15
    count = int(events * share)
    rows, out = [], []

    def event(name: str, cat: str, at: int, dur: int, args: str) -> None:
        us = (at + clock - base) / 1000
        out.append(
            f'  {{\n    "ph": "X", "cat": "{cat}", "name": "{name}", "pid": {pid}, "tid": {pid},\n'
            f'    "ts": {us:.3f}, "dur": {dur / 1000:.3f},\n    "args": {{\n      {args}\n    }}\n  }}'
        )

    other = (events - count) // max(count, 1)
    for seq in range(count):
        begin = arrivals[seq][rank]
        end = max(arrivals[seq]) + 20_000
        for i in range(other):
            at = begin - 90_000 + i * (80_000 // max(other, 1))
            args = f'"External id": {len(out)}, "Record function id": 0, "Ev Idx": {len(out)}'
            event(f"aten::op_{i % 20}", "cpu_op", at, 70_000 // max(other, 1), args)
        event("unicomm::all_reduce", "cpu_op", begin, end - begin, f'"External id": {len(out)}, "Ev Idx": 0')
        times = [begin + clock, begin + clock, end + clock + rng.randrange(2000)]
        rows.append(
            ["all_reduce", seq // 2 + 1, seq % 2, pid, 1, *times, 3, 0, 1024, 1024, "float32", -1, -1]
        )
        rows[-1] += [4096, "", "", 0]
    group = {"group_name": "", "backend": "shm", "ranks": f"0-{ranks - 1}", "rank": rank, "size": ranks}
    table = {
        "version": 1,
        "host": f"host{rank // 8}",
        "pid": pid,
        "started_ns": START + clock,
        "stopped_ns": arrivals[-1][rank] + clock + 1_000_000,
        "dropped": 0,
        "groups": [{"uid": f"u{g}", "name": f"group{g}", "description": f"g{g}", **group} for g in range(2)],
        "columns": COLUMNS,
        "rows": rows,
    }
    head = f'{{\n  "schemaVersion": 1,\n  "unicomm": {json.dumps(table)},\n  "baseTimeNanoseconds": {base},\n'
    return head + '  "traceEvents": [\n' + ",\n".join(out) + '\n  ],"traceName": "t" }\n'


def generate(folder: Path, ranks: int, events: int, share: float, late: int = -1) -> list[Path]:
    """Traces of all ranks; rank `late` is 3 ms late to the collective in the middle."""
    rng = random.Random(7)
    arrivals, at = [], START
    for seq in range(int(events * share)):
        at += 200_000
        arrivals.append([at + rng.randrange(10_000) for _ in range(ranks)])
        if late >= 0 and seq == int(events * share) // 2:
            arrivals[-1][late] += 3_000_000
            at += 3_000_000
    paths = []
    for rank in range(ranks):
        paths.append(folder / f"rank{rank}.json")
        paths[-1].write_text(rank_trace(rank, ranks, events, share, arrivals))
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--events", type=int, default=20_000)
    parser.add_argument("--share", type=float, default=0.1, help="of the events that are collectives")
    parser.add_argument("--form", default="json", choices=["json", "json.gz", "pftrace"])
    parser.add_argument("--command", default="merge", choices=["merge", "report"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = generate(folder, options.ranks, options.events, options.share)
        size = sum(p.stat().st_size for p in paths)
        command = [sys.executable, "-m", "unicomm.launch.cli", "profile", options.command, *map(str, paths)]
        if options.command == "merge":
            command += ["-o", str(folder / f"merged.{options.form}")]
        began = time.perf_counter()
        subprocess.run(command, check=True)
        took = time.perf_counter() - began
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        what = f"{options.ranks} ranks x {options.events} events, {size / 1e6:.0f} MB"
        print(f"{what}: {took:.1f} s, {peak:.0f} MB of memory")


if __name__ == "__main__":
    main()
