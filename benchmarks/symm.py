"""Symmetric memory beside Gloo and, where their wheels are installed, MPIs: exchanges of rows, puts, gets.

    python -m benchmarks.symm                     # 2 and 4 ranks: some minutes
    python -m benchmarks.symm --ranks 2 --json build/symm.json
    python -m tools.mpi_libraries       # installs the MPI wheels under build/mpi

Measured as in cpu_collectives.py: all contenders side by side, in turn, repetition by repetition, results
checked, the slowest rank's time, medians and ratios of one run. symm_rank.py says what each contender does.
Gloo and MPI are told the sizes that they receive; the exchanges on symmetric memory find them out. "copy" is
the floor: all ranks copy as many bytes in their own memory at the same time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks.cpu_collectives import console, groups, measure

OPERATIONS = ("all_to_all_v", "dispatch", "combine", "put", "get", "signal", "copy")
SIZES = {"4 KiB": 1 << 12, "64 KiB": 1 << 16, "1 MiB": 1 << 20, "8 MiB": 1 << 23, "32 MiB": 1 << 25}
OURS = ("unicomm", "unicomm, vdev")


def row_of(case: dict[str, Any], ranks: int, size: str, samples: dict[str, list[float]]) -> dict[str, Any]:
    """`over`: how many times as long Gloo and the best MPI took as the slower one of ours, as the median over
    the repetitions, and by the fastest repetition of each, which other load of the machine disturbs least."""
    medians = {name: statistics.median(values) for name, values in samples.items()}
    fastest = {name: min(values) for name, values in samples.items()}
    mpis = [name for name in samples if name != "Gloo" and not name.startswith("unicomm")]
    ours = [name for name in OURS if name in samples]
    slower = [max(at) for at in zip(*(samples[name] for name in ours), strict=True)]
    over = {}
    for label, names in (("Gloo", ["Gloo"] if "Gloo" in samples else []), ("best MPI", mpis)):
        if names:
            best = [min(at) for at in zip(*(samples[name] for name in names), strict=True)]
            median = statistics.median(a / b for a, b in zip(best, slower, strict=True))
            over[label] = median, min(fastest[n] for n in names) / max(fastest[n] for n in ours)
    return {**case, "ranks": ranks, "size": size, "seconds": medians, "fastest": fastest, "over": over}


def show(rows: list[dict[str, Any]], ranks: int) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row["seconds"]))
    table = Table(
        title=f"{ranks} ranks on {os.cpu_count()} cores, medians in microseconds; ratios: median, fastest"
    )
    table.add_column("operation")
    for name in ["size", *names, "Gloo / ours", "MPI / ours", "GB/s"]:
        table.add_column(name, justify="right")
    for row in rows:
        cells = [f"{row['seconds'][n] * 1e6:,.1f}" if n in row["seconds"] else "-" for n in names]
        for label, goal in (("Gloo", 5), ("best MPI", 1)):
            ratios = row["over"].get(label, ())
            marked = [f"[{'green' if ratio >= goal else 'red'}]{ratio:.1f}[/]" for ratio in ratios]
            cells.append(" / ".join(marked) or "-")
        ours = min(row["fastest"][name] for name in OURS if name in row["seconds"])
        cells.append(f"{row['bytes'] / ours / 1e9:.1f}")
        table.add_row(row["operation"], row["size"], *cells)
    console.print(table)


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--repetitions", type=int, default=7, help="turns of each contender")
    parser.add_argument("--operations", nargs="+", default=list(OPERATIONS), choices=OPERATIONS)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--json", type=Path, help="also write the figures there")
    options = parser.parse_args()
    cases = [
        ({"operation": operation, "bytes": SIZES[size]}, size)
        for operation in options.operations
        for size in options.sizes
    ]
    rows: list[dict[str, Any]] = []
    for ranks in options.ranks:
        with groups(ranks, "symm_rank.py") as started:
            columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
            with Progress(*columns, transient=True, console=console) as progress:
                task = progress.add_task("", total=len(cases))
                for case, size in cases:
                    progress.update(task, description=f"{ranks} ranks, {case['operation']} {size}")
                    samples = measure(started, case, options.repetitions)
                    if samples:
                        rows.append(row_of(case, ranks, size, samples))
                    progress.advance(task)
        show([row for row in rows if row["ranks"] == ranks], ranks)
    if options.json:
        options.json.write_text(json.dumps({"cores": os.cpu_count(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
