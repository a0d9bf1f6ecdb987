"""A mixture of experts on real handwritten digits, with the experts spread over ranks.

    python examples/moe.py                             # 4 ranks, as threads of this process
    torchrun --nproc-per-node 4 examples/moe.py        # the same as processes

Each image is cut into 16 tokens. A gate sends each token to 2 of 8 experts, which live on the ranks, 8 / n
on each: rows go there by symmetric memory and come back, and so do their gradients. The same layer with all
experts in one place is trained beside it: the outputs, the gradients and the losses have to be equal.
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

EXPERTS, CHOSEN = 8, 2  # all in all, and for each token
WIDTH, HIDDEN = 32, 64  # of a token
TOKENS = 16  # of an image: squares of 2 x 2 pixels
BATCH = 96
DTYPE = torch.float64  # so that equal means equal, and not nearly so


class MixtureOfExperts(nn.Module):
    """y = x + sum of gate weight times expert, over the chosen experts of each token.

    Without a communicator all experts are here; with one, this rank has its share of them.
    """

    def __init__(self, comm: unicomm.Communicator | None, tokens: int) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        everyone = [
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
            for _ in range(EXPERTS)
        ]
        self.exchange: symm.ExpertExchange | None = None
        if comm is not None:
            share = EXPERTS // comm.get_size()
            everyone = everyone[comm.get_rank() * share :][:share]
            rows = tokens * CHOSEN
            self.exchange = symm.ExpertExchange(comm, share, rows, WIDTH, dtype=DTYPE, major_align=8)
        self.experts = nn.ModuleList(everyone)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(CHOSEN)
        order = chosen.flatten().argsort(stable=True)  # of all (token, choice), by expert
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
        self.embed = nn.Linear(4 + TOKENS, WIDTH)  # what is there, and where
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
    """Figures of this rank: losses of both, and the largest differences of outputs, gradients and losses."""
    rank, size = comm.get_rank(), comm.get_size()
    if EXPERTS % size:
        raise SystemExit(f"{EXPERTS} experts cannot be shared by {size} ranks equally: take 1, 2, 4 or 8")
    symm.init(comm)
    images = -(-BATCH // size)
    x, y = data()
    # The same weights everywhere, and none drawn from a generator that ranks as threads share.
    alone = Classifier(None, BATCH).to(DTYPE)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in alone.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=DTYPE) / p.shape[-1] ** 0.5)
    shared = Classifier(comm, images).to(DTYPE)
    share = EXPERTS // size

    def twin(name: str) -> str:
        """The parameter of `alone` that one of `shared` is a copy of."""
        head, found, rest = name.partition("experts.experts.")
        if not found:
            return name
        number, _, tail = rest.partition(".")
        return f"{head}{found}{rank * share + int(number)}.{tail}"

    one = dict(alone.named_parameters())
    shared.load_state_dict({name: one[twin(name)].detach() for name, _ in shared.named_parameters()})
    everyones = [p for name, p in shared.named_parameters() if "experts.experts" not in name]
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
                # A sum divided by the whole batch's size: ranks may have one image more or less.
                loss = entropy(out, y[mine], reduction="sum") / len(batch)
                loss.backward()
                loss_alone = entropy(wanted, y[batch])
                loss_alone.backward()
                # An expert's gradient has come back from all ranks' tokens; the others' are summed here.
                for p in everyones:
                    comm.all_reduce(p.grad, unicomm.ReduceOp.SUM, False)
                for name, p in shared.named_parameters():
                    gap = float((p.grad - one[twin(name)].grad).abs().max())
                    gaps["gradients"] = max(gaps["gradients"], gap)
                for optimizer in optimizers:
                    optimizer.step()
                total += loss.detach() * len(batch)
                total_alone += float(loss_alone.detach()) * len(batch)
            comm.all_reduce(total, unicomm.ReduceOp.SUM, False)
            losses.append(float(total) / len(x))
            losses_alone.append(total_alone / len(x))
            progress.update(task, advance=1, loss=losses[-1])
    assert shared.experts.exchange is not None
    shared.experts.exchange.free()
    worst = torch.tensor([gaps["outputs"], gaps["gradients"]], dtype=DTYPE)
    comm.all_reduce(worst, unicomm.ReduceOp.MAX, False)
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
    parser.add_argument("--ranks", type=int, default=4, help="as threads, without torchrun (default: 4)")
    parser.add_argument("--result", type=Path, help="write the figures there as JSON")
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
