"""The floor of a collective within one host: the least that the machine's memory and cores allow.

A rank has to read and write some bytes, whatever the algorithm, and cores have to hear of each other some
times, one after the other. What reading and writing costs, and how long a core takes to hear of another, is
measured by floor.cpp between two cores. Ranks beyond the number of cores take turns; what it costs to change
from one to the other is not counted.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def moved(operation: str, n: int, ranks: int) -> tuple[float, float]:
    """Returns the bytes that one rank copies, and those that all do; a copy reads and writes each byte once.

    `n`: bytes that a rank gives to an all_reduce, all_gather or broadcast, sends as a message, gives to each
    rank in an all_to_all, or gets from a reduce_scatter.

    An all_reduce reads the ranks' inputs for one part of the result, writes that part for all to read, and
    copies the other parts. In a broadcast all ranks but one copy; in a message there and back, two, in turn.
    """
    each = {
        "all_reduce": (3 * n - n / ranks) / 2,
        "all_gather": n * ranks,
        "reduce_scatter": n * (ranks + 1) / 2,
        "all_to_all": n * ranks,
        "broadcast": n,
        "barrier": 0,
        "ping_pong": 2 * n,
    }[operation]
    return each, each * {"broadcast": ranks - 1, "ping_pong": ranks // 2}.get(operation, ranks)


def rounds(operation: str, ranks: int) -> int:
    """Returns how many signals from one core to another follow each other, none of which can be saved."""
    return 2 if operation == "ping_pong" else math.ceil(math.log2(ranks))


def machine() -> dict[str, Any] | None:
    """Returns the microseconds of floor.cpp, or None without a compiler or an x86-64 processor."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "floor")
        command = [compiler, "-O2", "-std=c++20", "-pthread", str(HERE / "floor.cpp"), "-o", str(program)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            return None
        said = subprocess.run([program], capture_output=True, check=True).stdout
        figures: dict[str, Any] = json.loads(said)
        return figures


def copying(n: float, figures: dict[str, Any]) -> float:
    """Returns the microseconds of a copy of n bytes on each core at once, from those of measured sizes."""
    known = sorted((int(size), what["copy"]) for size, what in figures.items() if size.isdigit())
    if n <= known[0][0]:
        return float(known[0][1] * n / known[0][0])
    for (low, at_low), (high, at_high) in itertools.pairwise(known):
        if n <= high:
            share = math.log(n / low) / math.log(high / low)
            return float(at_low * (at_high / at_low) ** share)
    return float(known[-1][1] * n / known[-1][0])


def floor(operation: str, n: int, ranks: int, cores: int, figures: dict[str, Any]) -> float:
    """Returns the least seconds of one call, by the figures of `machine`."""
    one, total = moved(operation, n, ranks)
    return (copying(max(one, total / cores), figures) + rounds(operation, ranks) * figures["flag"]) * 1e-6
