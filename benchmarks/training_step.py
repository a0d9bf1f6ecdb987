"""A training step of a transformer of 25 million parameters by DDP and by FSDP2: stock Gloo beside unicomm.

    python -m benchmarks.training_step                       # 2 ranks, then 4
    python -m benchmarks.training_step --ranks 2 --mpi       # by mpiexec, with backend `mpi` as well

All contenders are in the same processes and take their steps in turn, so that other load on the machine
affects each of them alike. DDP and FSDP2 have their default settings, the optimizer is plain SGD, each rank
has one thread. The time of a step is the slowest rank's; figures are medians, and ratios are taken turn by
turn. "exposed" is what a step takes longer than the same step of the same model without communication, in
the same turn; "CPU" is the processor time of all threads of all ranks that a step takes more than that. At
the end the weights of all contenders must agree.

Floor of DDP's step with n ranks: each gradient is read and written once by the reduction, n times 2 x 100 MB
through the memory of the host; all of it may be hidden behind the backward but the last bucket. No
communicator can take less time than DDP with buckets that are not sent.
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
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tools import mpi_libraries

_WORDS, _WIDTH, _LAYERS, _LENGTH = 4096, 512, 7, 64
_ALONE = "no communication"
_UNSENT = "buckets that are not sent"
_WARM_UP = 2


class Transformer(nn.Module):
    """Predicts the next word; 26 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_WORDS, _WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                _WIDTH, 8, 4 * _WIDTH, dropout=0.0, batch_first=True, norm_first=True, activation="gelu"
            )
            for _ in range(_LAYERS)
        )
        self.head = nn.Linear(_WIDTH, _WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1])
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        out: torch.Tensor = self.head(x)
        return out


def new_model() -> Transformer:
    torch.manual_seed(0)
    return Transformer()


def by_ddp(group: dist.ProcessGroup) -> nn.Module:
    return DistributedDataParallel(new_model(), process_group=group)


def send_nothing(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook that sends nothing: a step takes the time of the computation and of DDP itself,
    which copies each gradient into a bucket and back.
    """
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def by_fsdp(group: dist.ProcessGroup) -> nn.Module:
    model, mesh = new_model(), DeviceMesh.from_group(group, "cpu")
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


METHODS: dict[str, Callable[[dist.ProcessGroup], nn.Module]] = {"DDP": by_ddp, "FSDP2": by_fsdp}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, words: torch.Tensor) -> None:
    optimizer.zero_grad()
    out = model(words[:, :-1])
    nn.functional.cross_entropy(out.flatten(0, 1), words[:, 1:].flatten()).backward()
    optimizer.step()


def over_ranks(value: float, op: dist.ReduceOp.RedOpType) -> float:
    x = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(x, op=op)
    return x.item()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]


def rank_program(result: str, turns: int, with_mpi: bool) -> None:
    """Runs in each rank."""
    if with_mpi:  # torch's own rendezvous does not know mpiexec's variables
        from mpi4py import MPI

        os.environ |= {"RANK": str(MPI.COMM_WORLD.rank), "WORLD_SIZE": str(MPI.COMM_WORLD.size)}
    dist.init_process_group("gloo")
    groups: dict[str, Any] = {"stock Gloo": dist.group.WORLD}
    for name, backend in [("unicomm", "auto"), *([("unicomm mpi", "mpi")] if with_mpi else [])]:
        os.environ["UNICOMM_BACKEND"] = backend  # read when the group is made
        groups[name] = dist.new_group(backend="unicomm")
    generator = torch.Generator().manual_seed(dist.get_rank())
    figures: dict[str, Any] = {}
    for method, wrap in METHODS.items():
        models: dict[str, nn.Module] = {name: wrap(group) for name, group in groups.items()}
        if method == "DDP":
            models[_UNSENT] = by_ddp(groups["unicomm"])
            models[_UNSENT].register_comm_hook(None, lambda _, bucket: send_nothing(bucket))  # type: ignore[operator]
        models[_ALONE] = new_model()
        optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.01) for name, model in models.items()}
        taken: dict[str, dict[str, list[float]]] = {name: {"seconds": [], "cpu": []} for name in models}
        for turn in range(_WARM_UP + turns):
            words = torch.randint(_WORDS, (1, _LENGTH + 1), generator=generator)
            for name, model in models.items():
                dist.barrier()
                began, cpu = time.perf_counter(), time.process_time()
                step(model, optimizers[name], words)
                spent, used = time.perf_counter() - began, time.process_time() - cpu
                if turn >= _WARM_UP:
                    taken[name]["seconds"].append(over_ranks(spent, dist.ReduceOp.MAX))
                    taken[name]["cpu"].append(over_ranks(used, dist.ReduceOp.SUM))
        ours = weights(models["unicomm"])
        for name in groups:
            torch.testing.assert_close(weights(models[name]), ours, msg=f"{method} on {name} differs")
        figures[method] = taken
        del models, optimizers
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps(figures))
    dist.destroy_process_group()


def launch(ranks: int, turns: int, with_mpi: bool) -> dict[str, Any]:
    """Runs the ranks; returns their figures."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "UNICOMM_TRACE_DIR": ""}
    with tempfile.TemporaryDirectory(prefix="unicomm-bench-") as folder:
        result = Path(folder, "figures.json")
        program = [__file__, "--rank-result", str(result), "--turns", str(turns)]
        if with_mpi:
            mpi = mpi_libraries.choose()
            environment |= mpi.environment | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29561"}
            command = [*mpi.command, "-n", str(ranks), sys.executable, *program, "--mpi"]
        else:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command += [f"--nproc-per-node={ranks}", *program]
        subprocess.run(command, check=True, env=environment, timeout=1800)
        figures: dict[str, Any] = json.loads(result.read_text())
    return figures


def table_of(figures: dict[str, Any], ranks: int) -> Table:
    table = Table(title=f"One training step, transformer of 26 M parameters, {ranks} ranks")
    table.add_column("")
    for heading in ("step, ms", "exposed, ms", "more CPU, ms", "stock Gloo's step / this one"):
        table.add_column(heading, justify="right")
    for method, taken in figures.items():
        alone, gloo = taken[_ALONE], taken["stock Gloo"]
        for name, values in taken.items():
            exposed = [a - b for a, b in zip(values["seconds"], alone["seconds"], strict=True)]
            more = [a - b for a, b in zip(values["cpu"], alone["cpu"], strict=True)]
            ratio = [a / b for a, b in zip(gloo["seconds"], values["seconds"], strict=True)]
            cells = [f"{statistics.median(x) * 1e3:.0f}" for x in (values["seconds"], exposed, more)]
            table.add_row(f"{method}, {name}", *cells, f"{statistics.median(ratio):.2f}")
    return table


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="default: 2 4")
    parser.add_argument("--turns", type=int, default=12, help="steps of each contender (default: 12)")
    parser.add_argument("--mpi", action="store_true", help="start by mpiexec; measure backend `mpi`, too")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    parser.add_argument("--rank-result", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_result:
        torch.set_num_threads(1)
        rank_program(options.rank_result, options.turns, options.mpi)
        return
    results = {}
    for ranks in options.ranks:
        results[ranks] = launch(ranks, options.turns, options.mpi)
        Console().print(table_of(results[ranks], ranks))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
