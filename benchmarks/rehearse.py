"""Time and memory of a rehearsal of the three-dimensional program, by the number of ranks.

python -m benchmarks.rehearse --mesh 4x4x4 8x16x8 --jobs 2
python -m benchmarks.rehearse --mesh 4x4x4 --meta
python -m benchmarks.rehearse --mesh --large 8192x80x8    # width x blocks x ranks, with --meta
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

PROGRAMS = Path(__file__).parent.parent / "tests/rehearse/programs"
_LOOK = 2.0  # seconds between two looks at the memory
_NO_LIMIT = 1 << 40  # MB
_TOKENS = 2048  # of a batch


def tree(pid: int) -> list[int]:
    """Returns a process and all that descend from it."""
    found = [pid]
    for one in found:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{one}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found


def memory(pid: int) -> int:
    """Returns the bytes of memory of a process and its descendants; shared pages count once in all."""
    total = 0
    for one in tree(pid):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{one}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total


def measure(name: str, program: str, arguments: Sequence[object], ranks: int, jobs: int, meta: bool) -> str:
    """Rehearses once. Returns a row of the table."""
    command = [sys.executable, "-m", "unicomm", "rehearse", "--nproc-per-node", str(ranks)]
    command += ["--jobs", str(jobs), "--patience", "3600", *["--meta"] * meta]
    command += [str(PROGRAMS / program), *map(str, arguments)]
    before, begin, most = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic(), 0
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        while process.poll() is None:
            most = max(most, memory(process.pid))
            time.sleep(_LOOK)
        output.seek(0)
        said = output.read()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if process.returncode:
        raise SystemExit(said[-4000:])
    wall, load = time.monotonic() - begin, os.getloadavg()[0]
    figures = f"{cpu:.0f} s | {cpu / ranks:.2f} s | {wall:.0f} s | {most / 2**30:.1f} GB | {load:.0f}"
    return f"| {name}{', --meta' * meta} | {ranks} | {figures} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mesh", nargs="*", default=["4x4x4", "4x8x8"], help="pipeline x data x tensor")
    parser.add_argument("--large", nargs="*", default=[], help="width x blocks x ranks")
    parser.add_argument("--meta", action="store_true", help="for the meshes")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    console = Console()
    console.print(
        "| mesh | ranks | CPU time | per rank | wall | peak memory | load |\n|---|---|---|---|---|---|---|"
    )
    for mesh in options.mesh:
        sizes = list(map(int, mesh.split("x")))
        arguments, ranks = [*sizes, options.steps], math.prod(sizes)
        row = measure(mesh, "three_dimensional.py", arguments, ranks, options.jobs, options.meta)
        console.print(row, soft_wrap=True)
    for large in options.large:
        width, blocks, ranks = map(int, large.split("x"))
        arguments = [width, blocks, 1, _NO_LIMIT, _TOKENS]
        row = measure(large, "large_transformer.py", arguments, ranks, options.jobs, meta=True)
        console.print(row, soft_wrap=True)


if __name__ == "__main__":
    main()
