"""Messages that the receiver reads where they lie, beside staged ones: one copy against two in a pipeline.

    python -m benchmarks.one_copy

Processes on one host, with a communicator for each value of the hint `one_copy`. They are measured in turns,
so that other load on the machine affects all. Figures are medians of a message there and back, in
microseconds, and of the ratio turn by turn; the floor is the time of one copy each way in one process, at the
speed of `Tensor.copy_`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

import unicomm

MIB = 1 << 20
SIZES = (MIB, 4 * MIB, 16 * MIB, 64 * MIB)
TURNS = 15
WAYS = ("staged", "one copy")


def rank(number: int, world: int, folder: str) -> None:
    store = dist.FileStore(str(Path(folder, "store")), world)
    torch.set_num_threads(1)
    comms = {}
    for way, hint in zip(WAYS, ("off", "on"), strict=True):
        place = dist.PrefixStore(way, store)
        comms[way] = unicomm.new_comm(
            "shm", "cpu", name=way, store=place, rank=number, size=world, hints={"one_copy": hint}
        )
    found: dict[str, dict[str, list[float]]] = {}
    for size in SIZES:
        x, y = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
        times = max(1, 8 * MIB // size)
        for case in ("pairs", "one pair") if world > 2 else ("one pair",):
            here = found.setdefault(f"{case}, {size // MIB} MiB", {way: [] for way in (*WAYS, "floor")})
            for _ in range(TURNS):
                for way in WAYS:
                    comm = comms[way]
                    comm.barrier()
                    began = time.perf_counter()
                    for _ in range(times if case == "pairs" or number < 2 else 0):
                        for sends in (number % 2 == 0, number % 2 == 1):
                            if sends:
                                comm.send(x, number ^ 1)
                            else:
                                comm.recv(y, number ^ 1)
                    here[way].append((time.perf_counter() - began) / times * 1e6)
                comm.barrier()
                if number == 0:
                    began = time.perf_counter()
                    y.copy_(x)
                    here["floor"].append((time.perf_counter() - began) * 2e6)
    if number == 0:
        Path(folder, "figures").write_text(json.dumps(found))
    for comm in comms.values():
        comm.finalize()


def main() -> None:
    if len(sys.argv) == 4:
        rank(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
        return
    for world in (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-m", "benchmarks.one_copy"]
            arguments = [[str(r), str(world), folder] for r in range(world)]
            ranks = [subprocess.Popen([*command, *a], env=environment) for a in arguments]
            if any(r.wait(timeout=600) for r in ranks):
                raise SystemExit("a rank has failed")
            found = json.loads(Path(folder, "figures").read_text())
        for case, figures in found.items():
            staged, one = figures["staged"], figures["one copy"]
            ratio = statistics.median(a / b for a, b in zip(staged, one, strict=True))
            medians = "".join(f"{name} {statistics.median(f):9.0f}  " for name, f in figures.items())
            print(f"{world} ranks, {case:>18}: {medians} staged / one copy {ratio:5.2f}", flush=True)


if __name__ == "__main__":
    main()
