"""CPU collectives of one host: unicomm over shared memory beside torch's Gloo process group.

    python benchmarks/cpu_collectives.py [--ranks 2] [--json result.json]

Both contenders are created once and measured in turn, size by size and repetition by repetition, in the same
processes, so that whatever else the machine does hits both. Every result is checked. The recorder and the
signature check of unicomm are on, as always. A figure is the median over the repetitions of the slowest
rank's time for one call; ratios are taken repetition by repetition. Compare ratios, not absolute figures.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SIZES = {
    "8 B": 8,
    "1 KiB": 1 << 10,
    "64 KiB": 1 << 16,
    "1 MiB": 1 << 20,
    "16 MiB": 1 << 24,
}
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier")


def calls(operation: str, tensor: torch.Tensor, size: int, comm: Any) -> dict[str, Callable[[], object]]:
    """One call of each contender, on tensors of their own."""
    import unicomm

    big = torch.empty(tensor.numel() * size, dtype=tensor.dtype)
    add = unicomm.ReduceOp.SUM
    a, b, big_a, big_b = tensor.clone(), tensor.clone(), big.zero_(), big.clone()
    table: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "all_reduce": (lambda: comm.all_reduce(a, add, False), lambda: dist.all_reduce(b)),
        "all_gather": (
            lambda: comm.all_gather_single(big_a, a, False),
            lambda: dist.all_gather_into_tensor(big_b, b),
        ),
        "reduce_scatter": (
            lambda: comm.reduce_scatter_single(a, big_a, add, False),
            lambda: dist.reduce_scatter_tensor(b, big_b),
        ),
        "all_to_all": (
            lambda: comm.all_to_all_single(big_a, big_a.clone(), False),
            lambda: dist.all_to_all_single(big_b, big_b.clone()),
        ),
        "broadcast": (lambda: comm.broadcast(a, 0, False), lambda: dist.broadcast(b, 0)),
        "barrier": (lambda: comm.barrier(False), dist.barrier),
    }
    mine, theirs = table[operation]
    return {"unicomm shm": mine, "gloo": theirs}


def check(comm: Any, rank: int, size: int) -> None:
    import unicomm

    for n in (2, 300, 300_000):
        x = torch.arange(n, dtype=torch.float32) + rank
        expected = torch.arange(n, dtype=torch.float32) * size + sum(range(size))
        comm.all_reduce(x, unicomm.ReduceOp.SUM, False)
        if not torch.equal(x, expected):
            raise SystemExit(f"rank {rank}: wrong sum of {n} elements")


def time_of(call: Callable[[], object], times: int) -> float:
    dist.barrier()
    start = time.perf_counter()
    for _ in range(times):
        call()
    mine = torch.tensor([(time.perf_counter() - start) / times])
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return float(mine)


def rank_main(options: argparse.Namespace) -> None:
    import unicomm

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    comm = unicomm.new_comm("shm", "cpu", name="bench")
    check(comm, rank, size)
    rows = []
    for operation in options.operations:
        for label, nbytes in SIZES.items():
            if operation == "barrier" and nbytes > 8:
                continue
            contenders = calls(operation, torch.ones(max(1, nbytes // 4)), size, comm)
            probe = {name: time_of(call, 3) for name, call in contenders.items()}
            times = {name: max(3, min(2000, int(0.05 / t))) for name, t in probe.items()}
            samples: dict[str, list[float]] = {name: [] for name in contenders}
            for _ in range(options.repetitions):
                for name, call in contenders.items():
                    samples[name].append(time_of(call, times[name]))
            ratios = [g / u for u, g in zip(samples["unicomm shm"], samples["gloo"], strict=True)]
            row = {
                "operation": operation,
                "size": label,
                "bytes": nbytes,
                **{name: statistics.median(v) for name, v in samples.items()},
                "ratio": statistics.median(ratios),
            }
            rows.append(row)
            if rank == 0:
                print(json.dumps(row), flush=True)
    comm.finalize()
    dist.destroy_process_group()
    if rank == 0:
        Path(options.result).write_text(json.dumps({"ranks": size, "rows": rows}))


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=7, help="turns of each contender (default: 7)")
    parser.add_argument("--operations", nargs="+", default=list(OPERATIONS), choices=OPERATIONS)
    parser.add_argument("--json", type=Path, help="also write the figures there")
    parser.add_argument("--result", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if "RANK" in os.environ:
        rank_main(options)
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.table import Table

    with tempfile.TemporaryDirectory() as temp:
        result = Path(temp, "result.json")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={options.ranks}", __file__, "--result", str(result)]
        command += ["--repetitions", str(options.repetitions), "--operations", *options.operations]
        columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        with (
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process,
            Progress(*columns, transient=True) as progress,
        ):
            task = progress.add_task("starting")
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("{"):
                    row = json.loads(line)
                    progress.update(task, description=f"{row['operation']} {row['size']}")
        if process.returncode:
            raise SystemExit(process.returncode)
        figures = json.loads(result.read_text())
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))
    table = Table(title=f"{options.ranks} ranks on {os.cpu_count()} cores, medians in microseconds")
    for heading in ("operation", "size", "unicomm shm", "gloo", "gloo / unicomm"):
        table.add_column(heading, justify="left" if heading == "operation" else "right")
    for row in figures["rows"]:
        table.add_row(
            row["operation"],
            row["size"],
            f"{row['unicomm shm'] * 1e6:,.1f}",
            f"{row['gloo'] * 1e6:,.1f}",
            f"{row['ratio']:.1f} x",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
