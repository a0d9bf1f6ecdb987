"""Under torchrun with the switch: groups of each kind, and what stands behind them. groups.py FOLDER"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
me = dist.get_rank()
behind = []
members = [[0, 1, 2, 3], [0, 1], [2, 3], [0, 2], [0, 1, 3]]
groups = [dist.group.WORLD, *(dist.new_group(ranks) for ranks in members[1:])]
for group, ranks in zip(groups, members, strict=True):
    if me not in ranks:
        behind.append("-")
        continue
    x = torch.full((3000,), float(me))
    dist.all_reduce(x, group=group)
    assert torch.all(x == sum(ranks)), x
    parts = [torch.zeros(2) for _ in ranks]
    dist.all_gather(parts, torch.full((2,), float(me)), group=group)
    assert [int(p[0]) for p in parts] == ranks
    behind.append(group._get_backend(torch.device("cpu")).get_comm().get_backend())
if me % 2:  # across hosts and within, together
    dist.send(torch.full((4,), float(me)), 0)
elif me == 0:
    for source in (3, 1):
        y = torch.zeros(4)
        dist.recv(y, source)
        assert y[0] == source
Path(sys.argv[1], f"{me}.txt").write_text(" ".join(behind))
dist.destroy_process_group()
