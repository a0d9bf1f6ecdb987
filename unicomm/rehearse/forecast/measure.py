"""Measures operations of the ranks of a job, for a topology file. All ranks call `measure`."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from .topology import Topology, load, to_toml

_SECONDS = 0.4  # that one size of one operation takes about
_FEWEST, _MOST = 5, 200  # repetitions
_LEAST_BYTES = 1 << 10
_WIDTH, _ROWS, _LAYERS = 512, 64, 6  # of what is computed for `crowded`: weights of 6 MiB


def save(path: Path, most_bytes: int) -> None:
    """Measures, and has rank 0 add the times to the topology file `path`, which it makes if there is none."""
    dist.init_process_group("gloo")
    size, local = dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    times = measure(most_bytes)
    slower = crowding() if local == size else 1.0
    if dist.get_rank() == 0:
        known = (
            load(str(path))
            if path.exists()
            else replace(load("cpu"), name=path.stem, cores=len(os.sched_getaffinity(0)))
        )
        if local == size:
            known = replace(known, crowded={**known.crowded, size: slower})
        path.write_text(to_toml(_with(known, times, size, local == size)))
    dist.destroy_process_group()


def _with(known: Topology, times: dict[str, list[tuple[float, float]]], size: int, within: bool) -> Topology:
    table = {
        op: dict(by_size)
        for op, by_size in (known.measured_within if within else known.measured_between).items()
    }
    for op, points in times.items():
        table.setdefault(op, {})[size] = points
    return replace(known, measured_within=table) if within else replace(known, measured_between=table)


def measure(most_bytes: int) -> dict[str, list[tuple[float, float]]]:
    """Returns the median times of operations for growing sizes: (bytes of the whole vector, seconds)."""
    out: dict[str, list[tuple[float, float]]] = {}
    count = _LEAST_BYTES
    while count <= most_bytes:
        for op, call in _calls(count).items():
            out.setdefault(op, []).append((count, _median(call)))
        count *= 4
    return out


def crowding() -> float:
    """Returns how much longer a rank computes while all others do so than alone."""
    weights = [torch.randn(_WIDTH, _WIDTH) * (2 / _WIDTH) ** 0.5 for _ in range(_LAYERS)]
    rows = torch.randn(_ROWS, _WIDTH)

    def compute() -> None:
        x = rows
        for weight in weights:
            x = (x @ weight).relu()
        for weight in reversed(weights):
            weight.addmm_(x.t(), x, alpha=1e-9)

    def mean() -> float:
        """For at least 20 time slices of a scheduler that gives out some milliseconds at a time."""
        end, times = time.perf_counter() + _SECONDS, []
        while time.perf_counter() < end:
            times.append(_time(compute))
        return statistics.fmean(times)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    compute()
    alone = torch.zeros(1)
    for rank in range(dist.get_world_size()):
        dist.barrier()
        if rank == dist.get_rank():
            alone[0] = mean()
    dist.barrier()
    crowded = torch.tensor([mean()])
    torch.set_num_threads(threads)
    dist.all_reduce(alone)
    dist.all_reduce(crowded)
    return max(1.0, float(crowded / alone))


def _calls(count: int) -> dict[str, Callable[[], object]]:
    """Returns calls of the operations on vectors of about `count` bytes."""
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = torch.zeros(max(1, count // 4 // size) * size)
    part, other = torch.zeros(whole.numel() // size), torch.zeros_like(whole)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "all_gather_single": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter_single": lambda: dist.reduce_scatter_tensor(part, whole),
        "all_to_all_single": lambda: dist.all_to_all_single(other, whole),
    }
    if size == 2:
        calls["send"] = (lambda: dist.send(whole, 1)) if rank == 0 else (lambda: dist.recv(whole, 0))
    return calls


def _median(call: Callable[[], object]) -> float:
    """Returns the median time of a call; rank 0 says how often it is made."""
    first = _time(call)
    rounds = torch.tensor([min(_MOST, max(_FEWEST, int(_SECONDS / max(first, 1e-6))))])
    dist.broadcast(rounds, 0)
    times = []
    for _ in range(int(rounds)):
        dist.barrier()
        times.append(_time(call))
    longest = torch.tensor([statistics.median(times)])
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return float(longest)


def _time(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
