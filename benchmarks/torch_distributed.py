"""torch.distributed on unicomm beside stock Gloo: the cost of a call, small all-reduces, and a step of DDP.

    python -m benchmarks.torch_distributed [--ranks 2] [--json result.json]

Both groups are in the same processes and are measured in turn, so that other load on the machine affects
both. Figures are medians over the repetitions of the slowest rank's time; ratios are taken repetition by
repetition. The step is bound by communication: ten linear layers of 1024 x 1024, one row of data a rank,
plain SGD, gradients of 42 MB that are views of DDP's buckets. Both models must end with the same weights.
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

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import unicomm
from unicomm.c10d.process_group import UnicommProcessGroup


def per_call(f: Callable[[], object], seconds: float) -> float:
    """Seconds of one call, over as many as fit into `seconds`."""
    f()
    began, n = time.perf_counter(), 0
    while n == 0 or time.perf_counter() - began < seconds:
        for _ in range(20):
            f()
        n += 20
    return (time.perf_counter() - began) / n


def repeated(f: Callable[[], object], times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        f()
    return (time.perf_counter() - began) / times


def slowest(seconds: float) -> float:
    x = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    return x.item()


def alone() -> dict[str, list[float]]:
    """The cost of a call with one rank: nothing is sent."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ours = dist.new_group(backend="unicomm")
    assert isinstance(ours, UnicommProcessGroup)
    x = torch.ones(4)
    comm = ours.get_comm()
    contenders = {
        "stock Gloo": lambda: dist.all_reduce(x),
        "unicomm": lambda: dist.all_reduce(x, group=ours),
        "communicator": lambda: comm.all_reduce(x, unicomm.ReduceOp.SUM),
    }
    figures: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(40):
        for name, f in contenders.items():
            figures[name].append(per_call(f, 0.01))
    dist.destroy_process_group()
    return figures


def model() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(10):
        layers += [nn.Linear(1024, 1024), nn.ReLU()]
    return nn.Sequential(*layers)


def together(result: str) -> None:
    """Runs in each rank, under torchrun."""
    dist.init_process_group("gloo")
    ours = dist.new_group(backend="unicomm")
    groups = {"stock Gloo": dist.group.WORLD, "unicomm": ours}
    figures: dict[str, dict[str, list[float]]] = {"all_reduce": {}, "step": {}}
    x = torch.ones(4)
    for _ in range(30):
        for name, group in groups.items():
            x.fill_(1)
            dist.all_reduce(x, group=group)
            assert x.tolist() == [float(dist.get_world_size())] * 4
            spent = repeated(lambda group=group: dist.all_reduce(x.fill_(1), group=group), 100)
            figures["all_reduce"].setdefault(name, []).append(slowest(spent))
    nets = {
        name: DistributedDataParallel(model(), process_group=group, gradient_as_bucket_view=True)
        for name, group in groups.items()
    }
    optimizers = {name: torch.optim.SGD(net.parameters(), lr=0.01) for name, net in nets.items()}
    data = torch.randn(1, 1024, generator=torch.Generator().manual_seed(dist.get_rank()))
    for i in range(25):
        for name, net in nets.items():
            dist.barrier()
            began = time.perf_counter()
            optimizers[name].zero_grad()
            net(data).pow(2).mean().backward()
            optimizers[name].step()
            spent = slowest(time.perf_counter() - began)
            if i >= 5:
                figures["step"].setdefault(name, []).append(spent)
    for p, q in zip(*(net.parameters() for net in nets.values()), strict=True):
        torch.testing.assert_close(p, q)
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps(figures))
    dist.destroy_process_group()


def show(title: str, figures: dict[str, list[float]], unit: float, name: str) -> dict[str, float]:
    medians = {who: statistics.median(values) * unit for who, values in figures.items()}
    ratio = statistics.median(a / b for a, b in zip(figures["stock Gloo"], figures["unicomm"], strict=True))
    said = ", ".join(f"{who} {value:.2f} {name}" for who, value in medians.items())
    print(f"{title}: {said}; stock Gloo takes {ratio:.2f} times as long as unicomm")
    return medians | {"ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--rank-result", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_result:
        together(options.rank_result)
        return
    torch.set_num_threads(1)
    out = {"one rank": show("dist.all_reduce of 4 floats, 1 rank", alone(), 1e6, "us")}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "figures.json")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={options.ranks}", __file__, f"--rank-result={result}"]
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=600)
        figures = json.loads(result.read_text())
    title = f"{options.ranks} ranks"
    out["all_reduce"] = show(f"dist.all_reduce of 4 floats, {title}", figures["all_reduce"], 1e6, "us")
    out["step"] = show(f"step of DDP, 10.5 M parameters, {title}", figures["step"], 1e3, "ms")
    if options.json:
        Path(options.json).write_text(json.dumps(out, indent=2))


if __name__ == "__main__":
    main()
