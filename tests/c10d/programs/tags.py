"""Messages with tags, received in another order than they were sent.

tags.py FOLDER: each rank writes its results to FOLDER/RANK.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
results = []


def message(tag, n):
    return torch.full((n,), 100.0 * rank + tag)


def received(n, source, tag):
    x = torch.zeros(n)
    told = dist.recv(x, source, tag=tag)
    results.append([told, tag, n, x[0].item(), x[-1].item()])


# One sender, five tags, equal and different sizes, in reverse.
for sizes in ((4, 4, 4, 4, 4), (1, 50, 3, 300_000, 7), (2_000_000, 5, 1_500_000, 2, 1)):
    if rank == 0:
        works = [dist.isend(message(tag, n), 1, tag=tag) for tag, n in enumerate(sizes)]
        for work in works:
            work.wait()
    elif rank == 1:
        for tag, n in reversed(list(enumerate(sizes))):
            received(n, 0, tag)
    dist.barrier()

# Two messages with one tag keep their order; a third with another tag stands between them.
if rank == 0:
    pairs = ((3, 1.0), (4, 2.0), (3, 3.0), (0, 4.0), (3, 5.0))
    works = [dist.isend(torch.full((6,), value), 1, tag=tag) for tag, value in pairs]
    for work in works:
        work.wait()
elif rank == 1:
    for tag in (0, 3, 3, 4, 3):
        received(6, 0, tag)
dist.barrier()

# Receives under way in one order, messages in another.
if rank == 1:
    works = [dist.isend(message(tag, 8), 0, tag=tag) for tag in (11, 12, 13)]
elif rank == 0:
    xs = [torch.zeros(8) for _ in range(3)]
    works = [dist.irecv(x, 1, tag=tag) for x, tag in zip(xs, (13, 11, 12), strict=True)]
if rank < 2:
    for work in reversed(works):
        work.wait()
if rank == 0:
    results.append([x.tolist() for x in xs])
dist.barrier()

# From any rank, by tag.
if rank == 1:
    works = [dist.isend(message(tag, 3), 0, tag=tag) for tag in (20, 21)]
    for work in works:
        work.wait()
elif rank == 2:
    dist.send(message(22, 3), 0, tag=22)
elif rank == 0:
    for tag in (22, 21, 20):
        received(3, None, tag)
dist.barrier()

(Path(sys.argv[1]) / str(rank)).write_text(json.dumps(results))
dist.barrier()
dist.destroy_process_group()
