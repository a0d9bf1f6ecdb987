"""A mixture of experts on handwritten digits, with the experts spread over the ranks.

    python examples/moe.py                             # 4 ranks, as threads of this process
    torchrun --nproc-per-node 4 examples/moe.py        # the same with processes

Each image is cut into 16 tokens. A gate sends each token to 2 of 8 experts, of which each of n ranks has 8/n.
Tokens travel to the experts and back through symmetric memory, and so do their gradients. A second layer with
all experts in one place is trained alongside; outputs, gradients and losses of both have to be equal.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn

import unicomm
from unicomm import symm
from unicomm.testing import run_ranks

EXPERTS, CHOSEN = 8, 2  # the number of experts, in total and per token
WIDTH, HIDDEN = 32, 64  # of a token, and inside an expert
TOKENS = 16  # per image: squares of 2 x 2 pixels
BATCH = 96
DTYPE = torch.float64  # so that rounding stays far below the allowed difference


class MixtureOfExperts(nn.Module):
    """y = x + the sum of gate weight times expert, over the chosen experts of each token.

    Without a communicator this module has all experts; with one, it has this rank's share of them.
    """

    def __init__(self, comm: unicomm.Communicator | None, tokens: int) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        experts = [
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
            for _ in range(EXPERTS)
        ]
        self.exchange: symm.ExpertExchange | None = None
        if comm is not None:
            share = EXPERTS // comm.get_size()
            experts = experts[comm.get_rank() * share :][:share]
            rows = tokens * CHOSEN
            self.exchange = symm.ExpertExchange(comm, share, rows, WIDTH, dtype=DTYPE, major_align=8)
        self.experts = nn.ModuleList(experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(CHOSEN)
        order = chosen.flatten().argsort(stable=True)  # all (token, choice) pairs, by expert
        token = order // CHOSEN
        splits = chosen.flatten().bincount(minlength=EXPERTS)
        rows = x[token]
        if self.exchange is None:
            done = self.run(rows, rows.split(splits.tolist()))
        else:
            there, route = self.exchange.dispatch(rows, splits)
            done = self.exchange.combine(self.run(there, [there[b] for b in route.blocks]), route)
        weighted = done * weights.flatten()[order].unsqueeze(1)
        return x + torch.zeros_like(x).index_add(0, token, weighted)

    def run(self, rows: torch.Tensor, blocks: object) -> torch.Tensor:
        done = [expert(block) for expert, block in zip(self.experts, blocks, strict=True)]
        return torch.cat(done).view_as(rows)


class Classifier(nn.Module):
    def __init__(self, comm: unicomm.Communicator | None, images: int) -> None:
        super().__init__()
        self.embed = nn.Linear(4 + TOKENS, WIDTH)  # the pixels, and the place in the image
        self.experts = MixtureOfExperts(comm, images * TOKENS)
        self.head = nn.Linear(TOKENS * WIDTH, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        squares = images.view(-1, 4, 2, 4, 2).transpose(2, 3).reshape(-1, TOKENS, 4)
        place = torch.eye(TOKENS, dtype=DTYPE).expand(len(images), -1, -1)
        tokens = self.embed(torch.cat([squares, place], 2)).flatten(0, 1)
        return self.head(self.experts(tokens).view(len(images), -1))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=DTYPE) / 16, torch.tensor(labels)


def train(comm: unicomm.Communicator, epochs: int) -> dict[str, object]:
    """Trains both layers. Returns their losses, and the largest differences of outputs and gradients."""
    rank, size = comm.get_rank(), comm.get_size()
    if EXPERTS % size:
        raise SystemExit(f"{size} ranks cannot share {EXPERTS} experts equally: use 1, 2, 4 or 8 ranks")
    symm.init(comm)
    images = -(-BATCH // size)
    x, y = data()
    # All ranks draw the same weights from a generator of their own; ranks as threads share torch's.
    alone = Classifier(None, BATCH).to(DTYPE)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in alone.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=DTYPE) / p.shape[-1] ** 0.5)
    shared = Classifier(comm, images).to(DTYPE)
    share = EXPERTS // size

    def twin(name: str) -> str:
        """Returns the name in `alone` of a parameter of `shared`."""
        head, found, rest = name.partition("experts.experts.")
        if not found:
            return name
        number, _, tail = rest.partition(".")
        return f"{head}{found}{rank * share + int(number)}.{tail}"

    one = dict(alone.named_parameters())
    shared.load_state_dict({name: one[twin(name)].detach() for name, _ in shared.named_parameters()})
    replicated = [p for name, p in shared.named_parameters() if "experts.experts" not in name]
    optimizers = [torch.optim.Adam(model.parameters(), lr=3e-3) for model in (shared, alone)]
    entropy = nn.functional.cross_entropy
    losses: list[float] = []
    losses_alone: list[float] = []
    gaps = {"outputs": 0.0, "gradients": 0.0}
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("loss {task.fields[loss]:.4f}")
    with Progress(*columns, TimeRemainingColumn(), disable=rank != 0) as progress:
        task = progress.add_task(f"{EXPERTS} experts on {size} ranks", total=epochs, loss=float("nan"))
        for _ in range(epochs):
            total, total_alone = torch.zeros(1, dtype=DTYPE), 0.0
            for batch in torch.randperm(len(x), generator=generator).split(BATCH):
                mine = batch[rank::size]
                for optimizer in optimizers:
                    optimizer.zero_grad()
                out, wanted = shared(x[mine]), alone(x[batch])
                gaps["outputs"] = max(gaps["outputs"], float((out - wanted[rank::size]).detach().abs().max()))
                # The sum is divided by the size of the whole batch, because ranks may have unequal shares.
                loss = entropy(out, y[mine], reduction="sum") / len(batch)
                loss.backward()
                loss_alone = entropy(wanted, y[batch])
                loss_alone.backward()
                # An expert's gradient already contains the tokens of all ranks; the other gradients do not.
                for p in replicated:
                    comm.all_reduce(p.grad, unicomm.ReduceOp.SUM, async_op=False)
                for name, p in shared.named_parameters():
                    gap = float((p.grad - one[twin(name)].grad).abs().max())
                    gaps["gradients"] = max(gaps["gradients"], gap)
                for optimizer in optimizers:
                    optimizer.step()
                total += loss.detach() * len(batch)
                total_alone += float(loss_alone.detach()) * len(batch)
            comm.all_reduce(total, unicomm.ReduceOp.SUM, async_op=False)
            losses.append(float(total) / len(x))
            losses_alone.append(total_alone / len(x))
            progress.update(task, advance=1, loss=losses[-1])
    assert shared.experts.exchange is not None
    shared.experts.exchange.free()
    worst = torch.tensor([gaps["outputs"], gaps["gradients"]], dtype=DTYPE)
    comm.all_reduce(worst, unicomm.ReduceOp.MAX, async_op=False)
    return {
        "ranks": size,
        "losses": losses,
        "losses_alone": losses_alone,
        "outputs": float(worst[0]),
        "gradients": float(worst[1]),
    }


def report(figures: dict[str, object]) -> bool:
    console = Console()
    losses, alone = figures["losses"], figures["losses_alone"]
    assert isinstance(losses, list)
    assert isinstance(alone, list)
    table = Table(title=f"{EXPERTS} experts, {CHOSEN} for each token")
    for heading in ("loss in epoch", "one process", f"{figures['ranks']} ranks"):
        table.add_column(heading, justify="right")
    for epoch in sorted({0, len(losses) // 2, len(losses) - 1}):
        table.add_row(str(epoch + 1), f"{alone[epoch]:.6f}", f"{losses[epoch]:.6f}")
    console.print(table)
    gap = max(abs(a - b) for a, b in zip(losses, alone, strict=True))
    checks = {
        f"the outputs are equal (largest difference {figures['outputs']:.1e})": figures["outputs"] < 1e-9,
        f"the gradients are equal (largest difference {figures['gradients']:.1e})": figures["gradients"]
        < 1e-9,
        f"the losses are equal (largest difference {gap:.1e})": gap < 1e-9,
        "the loss falls": losses[-1] < losses[0],
    }
    for what, good in checks.items():
        console.print(f"[{'green' if good else 'red'}]{'ok' if good else 'FAILED'}[/] {what}")
    return all(checks.values())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=3, help="passes over the images (default: 3)")
    parser.add_argument(
        "--ranks", type=int, default=4, help="ranks as threads, without torchrun (default: 4)"
    )
    parser.add_argument("--result", type=Path, help="write the figures to this file, as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        with unicomm.new_comm("shm", torch.device("cpu"), name="experts") as comm:
            figures = train(comm, options.epochs)
            if comm.get_rank():
                return 0
    else:
        figures = run_ranks(lambda comm: train(comm, options.epochs), options.ranks, timeout=600)[0]
    if options.result:
        options.result.write_text(json.dumps(figures))
    return 0 if report(figures) else 1


if __name__ == "__main__":
    sys.exit(main())
