"""A data-parallel step between two hosts at 1 Gbit/s: float32 beside compressed gradients.

    python -m benchmarks.wire_step

Hosts are network namespaces of this machine whose links tc limits. One pair of ranks has a model of 25
million parameters for each contender, and takes steps with them in turn; medians, and ratios of one run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.forecast import launch, limited
from tools.namespaces import why_not
from unicomm.c10d import hooks

CONTENDERS = (("float32", False), ("mxfp8", True), ("int8", True), ("mxfp8", False), ("bfloat16", False))
WIDTH, LAYERS, WARM_UP = 2048, 6, 2


def rank(rows: int, steps: int) -> None:
    """One rank: steps with all models in turn."""
    torch.set_num_threads(1)
    dist.init_process_group("unicomm")
    models = []
    for wire, feedback in CONTENDERS:
        torch.manual_seed(0)
        plain = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)))
        model = DistributedDataParallel(plain, gradient_as_bucket_view=True)
        if wire != "float32":
            state = hooks.compressed(wire=wire, error_feedback=feedback)
            model.register_comm_hook(state, hooks.reduce_compressed)
        models.append(model)
    batch = torch.randn(rows, WIDTH)
    times: list[list[float]] = [[] for _ in models]
    for _ in range(steps + WARM_UP):
        for model, found in zip(models, times, strict=True):
            dist.barrier()
            began = time.perf_counter()
            model(batch).square().mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(parameter.grad, alpha=0.001)
                    parameter.grad.zero_()
            found.append(time.perf_counter() - began)
    if dist.get_rank() == 0:
        count = sum(parameter.numel() for parameter in models[0].parameters())
        medians = [statistics.median(found[WARM_UP:]) for found in times]
        print("FOUND", json.dumps({"parameters": count, "seconds": medians}), flush=True)
    dist.destroy_process_group()


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--steps", type=int, default=7)
    options = parser.parse_args()
    if options.rank:
        rank(options.rows, options.steps)
        return
    if reason := why_not():
        raise SystemExit(f"no network namespaces here: {reason}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the namespaces are removed on the way out
    os.environ |= {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    program: list[object] = [Path(__file__), "--rank", f"--rows={options.rows}", f"--steps={options.steps}"]
    with limited(2) as hosts:
        said = launch(hosts, 2, 1, program)
    found = json.loads(said.split("FOUND ", 1)[1].splitlines()[0])
    print(f"{found['parameters']} parameters, load average {os.getloadavg()[0]:.1f}")
    print("| gradients | ms a step | times as fast as float32 |\n|---|---|---|")
    for (wire, feedback), seconds in zip(CONTENDERS, found["seconds"], strict=True):
        name = wire + (", error feedback" if feedback else "")
        print(f"| {name} | {1000 * seconds:.0f} | {found['seconds'][0] / seconds:.2f} |")


if __name__ == "__main__":
    main()
