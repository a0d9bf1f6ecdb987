"""One rank of a small language model's training, for benchmarks/text_training.py and the tests.

The text is the source code of Python's standard library, byte by byte. Nothing here depends on the number of
ranks but which part of the global batch a rank takes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import unicomm
from unicomm.c10d import hooks

MICROBATCHES = 4  # of a global batch


def text(most: int = 4 << 20) -> torch.Tensor:
    """The bytes of the standard library's modules, in order of their names."""
    found = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        found += path.read_bytes()
        if len(found) >= most:
            break
    return torch.frombuffer(found[:most], dtype=torch.uint8).long()


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        mixed = self.mix(self.before(x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = mixed.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(functional.gelu(self.up(self.between(x))))


class Model(nn.Module):
    """A transformer that predicts the next byte."""

    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)
        generator = torch.Generator().manual_seed(0)  # not torch's own: ranks may be threads
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, 0.02, generator=generator)
                elif name.endswith("bias"):
                    parameter.zero_()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mean loss of a batch of rows, one byte longer than the model."""
        x = self.bytes(tokens[:, :-1]) + self.places.weight
        logits = self.head(self.norm(self.blocks(x)))
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def batches(data: torch.Tensor, step: int, rows: int, length: int) -> list[torch.Tensor]:
    """The microbatches of a step."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(0, len(data) - length - 1, (rows,), generator=generator)
    return list(torch.stack([data[s : s + length + 1] for s in starts.tolist()]).chunk(MICROBATCHES))


def rate(step: int, steps: int) -> float:
    return 2e-3 * min(1.0, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * step / steps))


def digest(model: nn.Module) -> str:
    whole = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return hashlib.sha256(whole.numpy().tobytes()).hexdigest()


def train_reproducibly(
    comm: unicomm.Communicator,
    steps: int,
    width: int = 128,
    layers: int = 4,
    length: int = 64,
    rows: int = 16,
) -> tuple[str, list[float]]:
    """Trains with every microbatch's gradient as a contribution of its own. Returns a digest of the weights,
    and the losses, which have the same bits for any number of ranks that divides `MICROBATCHES`."""
    data, model = text(), Model(width, layers, length)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.95))
    count, mine = MICROBATCHES // comm.get_size(), comm.get_rank()
    losses = []
    for step in range(steps):
        contributions = []
        for batch in batches(data, step, rows, length)[mine * count : (mine + 1) * count]:
            optimizer.zero_grad()
            loss = model(batch)
            loss.backward()
            gradients = [p.grad.flatten() for p in parameters if p.grad is not None]
            contributions.append(torch.cat([*gradients, loss.detach().reshape(1)]))
        total = torch.empty_like(contributions[0])
        comm.all_reduce_contributions(total, torch.stack(contributions), unicomm.ReduceOp.AVG)
        at = 0
        for parameter in parameters:
            parameter.grad = total[at : at + parameter.numel()].view_as(parameter).clone()
            at += parameter.numel()
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps)
        optimizer.step()
        losses.append(float(total[-1]))
    return digest(model), losses


def train_compressed(wire: str, feedback: bool, steps: int) -> dict[str, Any]:
    """Trains under DistributedDataParallel. Returns the loss of each step, and on held-out text."""
    length, rows, size, rank = 64, 16, dist.get_world_size(), dist.get_rank()
    data = text()
    seen, unseen = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]
    plain = Model(128, 5, length)
    model = DistributedDataParallel(plain, bucket_cap_mb=2)
    if wire != "float32":
        state = hooks.compressed(wire=wire, error_feedback=feedback)
        model.register_comm_hook(state, hooks.reduce_compressed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    losses = []
    for step in range(steps):
        count = MICROBATCHES // size
        mine = torch.cat(batches(seen, step, rows, length)[rank * count : (rank + 1) * count])
        optimizer.zero_grad()
        loss = model(mine)
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps)
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / size)
    with torch.no_grad():
        other = [float(plain(torch.cat(batches(unseen, s, 64, length)))) for s in range(8)]
    return {
        "losses": losses,
        "unseen": sum(other) / len(other),
        "parameters": sum(p.numel() for p in plain.parameters()),
        "digest": digest(plain),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--wire", default="float32")
    parser.add_argument("--feedback", type=int, default=1)
    parser.add_argument("--reproducible", metavar="BACKEND", help="train so, on this backend")
    parser.add_argument("--hints", default="{}", help="of the communicator, as JSON")
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.reproducible:
        hints = json.loads(options.hints)
        with unicomm.new_comm(options.reproducible, torch.device("cpu"), name="text", hints=hints) as comm:
            weights, losses = train_reproducibly(comm, options.steps)
            rank, found = comm.get_rank(), {"digest": weights, "losses": losses}
    else:
        dist.init_process_group("unicomm")
        rank, found = dist.get_rank(), train_compressed(options.wire, bool(options.feedback), options.steps)
        dist.destroy_process_group()
    Path(f"{options.result}.{rank}").write_text(json.dumps({"pid": os.getpid(), **found}))


if __name__ == "__main__":
    main()
