"""The cost of a communicator, beside a new group of Gloo: creation, split, memory.

    python -m benchmarks.communicators               # 2, 4 and 8 processes, 64 threads
    python -m benchmarks.communicators --json FILE   # writes the figures to FILE, too

A figure is the median over the repetitions of the slowest rank's time; all kinds are created in turn. Memory
is a rank's growth after its first operations. Address space is larger, since pages exist once they are used.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

console = Console(width=None if sys.stdout.isatty() else 110)


def rank_main(folder: str, repetitions: int) -> None:
    """One process of a group that torchrun started."""
    import torch.distributed as dist

    import unicomm

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    everyone = list(range(size))
    device, x = torch.device("cpu"), torch.ones(4)
    took: dict[str, list[float]] = {}

    def timed(name: str, make: Any) -> Any:
        dist.barrier()
        began = time.perf_counter()
        made = make()
        took.setdefault(name, []).append(time.perf_counter() - began)
        return made

    timed("warm-up", partial(unicomm.new_comm, "shm", device, name="warm")).finalize()
    for i in range(repetitions):
        comm = timed("new_comm shm", partial(unicomm.new_comm, "shm", device, name=f"c{i}"))
        half = timed("split shm", partial(comm.split, everyone, f"s{i}"))
        timed("first all_reduce shm", partial(comm.all_reduce, x, unicomm.ReduceOp.SUM))
        group = timed("new_group gloo", partial(dist.new_group, backend="gloo"))
        timed("first all_reduce gloo", partial(dist.all_reduce, x, group=group))
        segment = comm.memory()["segment"]
        half.finalize()
        comm.finalize()
        dist.destroy_process_group(group)
    del took["warm-up"]
    told = {"seconds": took, "segment": segment / size}
    Path(folder, str(rank)).write_text(json.dumps(told))
    dist.destroy_process_group()


def processes(ranks: int, repetitions: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += [__file__, "--rank-of", folder, "--repetitions", str(repetitions)]
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=300)
        told = [json.loads(Path(folder, str(r)).read_text()) for r in range(ranks)]
    slowest = {
        name: statistics.median(map(max, zip(*(t["seconds"][name] for t in told), strict=True)))
        for name in told[0]["seconds"]
    }
    return {"ranks": ranks, "kind": "processes", "seconds": slowest, "segment": told[0]["segment"]}


def threads(ranks: int, repetitions: int) -> dict[str, Any]:
    """Ranks as threads of this process."""
    from unicomm.testing import run_ranks

    creations, splits, segment = [], [], 0.0
    for _ in range(repetitions):
        began = time.perf_counter()

        def program(comm: Any) -> tuple[float, float, float]:
            made = time.perf_counter()
            half = comm.split(list(range(comm.get_size())), "half")
            split = time.perf_counter() - made
            half.finalize()
            return made, split, comm.memory()["segment"] / comm.get_size()

        made, split, segments = zip(*run_ranks(program, ranks), strict=True)
        creations.append(max(made) - began)
        splits.append(max(split))
        segment = segments[0]
    seconds = {"new_comm shm": statistics.median(creations), "split shm": statistics.median(splits)}
    return {"ranks": ranks, "kind": "threads", "seconds": seconds, "segment": segment}


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--json", type=Path, help="also write the figures there")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.rank_of:
        return rank_main(options.rank_of, options.repetitions)
    rows = [processes(n, options.repetitions) for n in (2, 4, 8)]
    rows += [threads(n, options.repetitions) for n in (1, 2, 64)]
    names = list(dict.fromkeys(name for row in rows for name in row["seconds"]))
    table = Table(title=f"milliseconds of the slowest rank, {os.cpu_count()} cores")
    for name in ["ranks", *names, "segment, KiB a rank"]:
        table.add_column(name, justify="right")
    for row in rows:
        cells = [f"{row['seconds'][n] * 1e3:,.1f}" if n in row["seconds"] else "-" for n in names]
        table.add_row(f"{row['ranks']} {row['kind']}", *cells, f"{row['segment'] / 1024:,.0f}")
    console.print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return None


if __name__ == "__main__":
    main()
