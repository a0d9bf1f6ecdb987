"""More elements than 31 bits can count: an all-reduce and a broadcast of 2**31 + 5 bytes."""

import torch

import unicomm
from tests.processes.programs.common import say

COUNT = 2**31 + 5


def places(seed: int) -> torch.Tensor:
    """Both ends, both sides of 2**31, and some in between."""
    some = torch.randint(COUNT, (2000,), generator=torch.Generator().manual_seed(seed))
    return torch.cat([torch.tensor([0, 1, 2**31 - 1, 2**31, COUNT - 1]), some])


def pattern(at: torch.Tensor, rank: int) -> torch.Tensor:
    return ((at * (rank + 3) + rank) % 251 - 125).to(torch.int8)


with unicomm.new_comm("shm", torch.device("cpu"), name="main", timeout=200) as comm:
    rank = comm.get_rank()
    at = places(1)
    x = torch.full((COUNT,), rank + 1, dtype=torch.int8)
    x[at] = pattern(at, rank)
    comm.all_reduce(x, unicomm.ReduceOp.SUM, False)
    sums = bool((x[at] == pattern(at, 0) + pattern(at, 1)).all())
    rest = places(2)
    rest = rest[~torch.isin(rest, at)]
    sums = sums and bool((x[rest] == 3).all())

    y, elsewhere = x.view(torch.uint8), places(3)
    y[elsewhere] = 200 + rank
    comm.broadcast(y, 1, False)
    say("moved", sums=sums, copies=bool((y[elsewhere] == 201).all()), places=len(at) + len(rest))
