"""An ordinary DistributedDataParallel script, which trains a network on handwritten digits.

torchrun --standalone --nproc-per-node 2 examples/ddp.py
"""

import argparse
import json
import statistics
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32, help="images per rank and step")
    parser.add_argument("--width", type=int, default=768, help="width of the hidden layers")
    parser.add_argument("--result", help="write rank 0's figures to this file, as JSON")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    data = TensorDataset(images[:1500], labels[:1500])
    sampler: DistributedSampler = DistributedSampler(data, shuffle=True, seed=0)
    loader = DataLoader(data, options.batch, sampler=sampler, drop_last=True)

    width = options.width
    layers = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss_of = nn.CrossEntropyLoss()

    losses, seconds = [], []
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for batch, target in loader:
            began = time.perf_counter()
            optimizer.zero_grad()
            loss = loss_of(model(batch), target)
            loss.backward()
            optimizer.step()
            seconds.append(time.perf_counter() - began)
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        losses.append((total[0] / total[1]).item())
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {losses[-1]:.6f}", flush=True)

    with torch.no_grad():
        right = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    of_all_ranks = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(of_all_ranks, weights)
    if rank == 0:
        figures = {
            "group": type(dist.group.WORLD).__name__,
            "losses": losses,
            "accuracy": right,
            "milliseconds": 1000 * statistics.median(seconds[len(seconds) // 10 :]),
            "parameters": weights.numel(),
            "identical": all(torch.equal(weights, other) for other in of_all_ranks),
        }
        print(f"accuracy {right:.1%}, {figures['milliseconds']:.2f} ms a step", flush=True)
        if options.result:
            with open(options.result, "w") as file:
                json.dump(figures, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
