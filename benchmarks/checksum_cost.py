"""The cost of checksums: of the kernel, and beside an all-reduce of two ranks.

    python -m benchmarks.checksum_cost
    python -m benchmarks.checksum_cost --backends shm gloo

First the kernel over one tensor, in GB/s, by instruction set, beside a copy of the tensor. Then all_reduce of
float32 on two ranks that are processes, in turns: without hints, and with `{"checksum": True}`. Figures of
the kernel are the best of many rounds, those of operations medians of rank 0 over all turns.
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

import torch

import unicomm
from unicomm import _core
from unicomm.c10d.compat import TCPStore

SIZES = {"8 B": 8, "64 KiB": 64 << 10, "16 MiB": 16 << 20, "256 MiB": 256 << 20}
TURNS = 9
OFF: dict[str, str | bool] = {}
WAYS = {"off": OFF, "on": {"checksum": True}}


def rounds(size: int) -> int:
    return max(5, min(2000, (64 << 20) // size))


def best(once: Callable[[], object], times: int) -> float:
    """The least seconds of one call."""
    found = float("inf")
    for _ in range(times):
        start = time.perf_counter()
        once()
        found = min(found, time.perf_counter() - start)
    return found


def kernel() -> None:
    isas = [name for name in ("avx512", "avx2", "baseline") if _core.set_fold_isa(name)]
    print(f"{'kernel':>10} " + " ".join(f"{isa:>10}" for isa in isas) + f" {'copy':>10}   (GB/s read)")
    for label, size in SIZES.items():
        x = torch.ones(size // 4)
        y = torch.empty_like(x)
        cells = []
        for isa in isas:
            _core.set_fold_isa(isa)
            cells.append(size / best(lambda x=x: _core.checksum([x]), rounds(size)) / 1e9)
        cells.append(size / best(lambda x=x, y=y: y.copy_(x), rounds(size)) / 1e9)
        print(f"{label:>10} " + " ".join(f"{cell:10.2f}" for cell in cells))
    _core.set_fold_isa(isas[0])


def rank_main(backend: str) -> None:
    comms = {
        way: unicomm.new_comm(backend, torch.device("cpu"), name=way, hints=hints)
        for way, hints in WAYS.items()
    }
    found: dict[str, dict[str, list[float]]] = {}
    for label, size in list(SIZES.items())[:3]:
        x = torch.ones(size // 4)
        n = max(5, min(1000, (32 << 20) // size))
        times = found[label] = {way: [] for way in WAYS}
        for _ in range(TURNS):
            for way, comm in comms.items():
                comm.barrier(async_op=False)
                start = time.perf_counter()
                for _ in range(n):
                    comm.all_reduce(x, unicomm.ReduceOp.MAX, async_op=False)
                times[way].append((time.perf_counter() - start) / n)
    if comms["off"].get_rank() == 0:
        print(json.dumps(found), flush=True)
    for comm in comms.values():
        comm.finalize()


def operations(backend: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        base = os.environ | {
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "UNICOMM_TRACE_DIR": folder,
        }
        command = [sys.executable, "-m", "benchmarks.checksum_cost", "--rank", backend]
        ranks = [
            subprocess.Popen(
                command, env=base | {"RANK": str(r), "LOCAL_RANK": str(r)}, stdout=subprocess.PIPE, text=True
            )
            for r in range(2)
        ]
        out = [rank.communicate(timeout=300)[0] for rank in ranks]
    found = json.loads(out[0])
    print(f"{backend:>10} {'off (us)':>10} {'on (us)':>10} {'more (us)':>10} {'on/off':>8}")
    for label, times in found.items():
        off, on = (statistics.median(times[way]) * 1e6 for way in WAYS)
        print(f"{label:>10} {off:10.1f} {on:10.1f} {on - off:10.1f} {on / off:8.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backends", nargs="*", default=["shm", "gloo"])
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        rank_main(given.rank)
        return
    print(f"load average {os.getloadavg()[0]:.1f}")
    kernel()
    for backend in given.backends:
        operations(backend)


if __name__ == "__main__":
    main()
