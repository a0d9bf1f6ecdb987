"""Data-parallel training by hand: a classifier of handwritten digits, whose gradients a communicator sums.

    torchrun --nproc-per-node 2 examples/digits.py

Each rank takes its share of every batch. The summed gradients, and therefore the loss curve, are those of one
rank with the whole batch; `make demo` runs this file and checks that.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from sklearn.datasets import load_digits
from torch import nn

import unicomm

BATCH = 64


def data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loads 1797 images of 8 x 8 pixels; every fifth image is for testing."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32) / 16
    y = torch.tensor(labels)
    test = torch.arange(len(x)) % 5 == 0
    return x[~test], y[~test], x[test], y[test]


def train(comm: unicomm.Communicator, epochs: int) -> dict[str, object]:
    rank, size = comm.get_rank(), comm.get_size()
    torch.manual_seed(0)  # the same weights and the same order of images on all ranks
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    x, y, x_test, y_test = data()
    losses, communicating = [], 0.0
    began = time.perf_counter()
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("loss {task.fields[loss]:.4f}")
    with Progress(*columns, TimeRemainingColumn(), disable=rank != 0) as progress:
        task = progress.add_task(
            f"training on {size} rank{'s' * (size > 1)}", total=epochs, loss=float("nan")
        )
        for _ in range(epochs):
            total = torch.zeros(1)
            for batch in torch.randperm(len(x)).split(BATCH):
                mine = batch[rank::size]
                # The sum is divided by the size of the whole batch, because ranks may have unequal shares.
                loss = nn.functional.cross_entropy(model(x[mine]), y[mine], reduction="sum") / len(batch)
                optimizer.zero_grad()
                loss.backward()
                start = time.perf_counter()
                works = [
                    comm.all_reduce(p.grad, unicomm.ReduceOp.SUM, async_op=True) for p in model.parameters()
                ]
                for work in works:
                    work.wait()
                communicating += time.perf_counter() - start
                optimizer.step()
                total += loss.detach() * len(batch)
            comm.all_reduce(total, unicomm.ReduceOp.SUM, async_op=False)
            losses.append(float(total) / len(x))
            progress.update(task, advance=1, loss=losses[-1])
    seconds = time.perf_counter() - began
    accuracy = float((model(x_test).argmax(1) == y_test).float().mean())

    # All ranks must have the same bits: gather the weights of all ranks and compare.
    weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    of_all_ranks = [torch.empty_like(weights) for _ in range(size)]
    comm.all_gather(of_all_ranks, weights, async_op=False)
    identical = all(torch.equal(w.view(torch.int32), weights.view(torch.int32)) for w in of_all_ranks)
    return {
        "ranks": size,
        "losses": losses,
        "accuracy": accuracy,
        "identical": identical,
        "seconds": seconds,
        "communicating": communicating,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=20, help="passes over the images (default: 20)")
    parser.add_argument("--backend", default="shm", help="the communicator's backend (default: shm)")
    parser.add_argument("--result", type=Path, help="write rank 0's figures to this file, as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with unicomm.new_comm(options.backend, torch.device("cpu"), name="gradients") as comm:
        result = train(comm, options.epochs)
        if comm.get_rank() == 0 and options.result:
            options.result.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
