"""Groups of some ranks, made in all the ways that `dist.new_group` has, on 4 ranks.

subgroups.py SPELLING: SPELLING is the backend of the default group, or "none". Each rank compares what the
members of each group see with what they ought to see, and prints the number of groups that it was in.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

spelling = sys.argv[1]
dist.init_process_group(None if spelling == "none" else spelling, timeout=timedelta(seconds=60))
rank, size = dist.get_rank(), dist.get_world_size()
seen = 0


def use(members, group):
    """Checks a group of `members`, in the order of their ranks in the group."""
    global seen
    if rank not in members:
        assert group is None or group == dist.GroupMember.NON_GROUP_MEMBER, group
        return
    seen += 1
    assert dist.get_process_group_ranks(group) == members
    assert dist.get_rank(group) == members.index(rank)
    x = torch.tensor([float(2**rank)])
    dist.all_reduce(x, group=group)
    assert x.item() == sum(2**r for r in members), (members, x)
    y = torch.tensor([rank])
    dist.broadcast(y, src=members[0], group=group)
    assert y.item() == members[0]
    gathered = [None] * len(members)
    dist.all_gather_object(gathered, rank, group=group)
    assert gathered == members


everyone = list(range(size))
use(everyone, dist.group.WORLD)
for backend in ("gloo", "cpu:gloo", None):
    use([0, 2], dist.new_group([0, 2], backend=backend))
    use([1, 3], dist.new_group([3, 1], backend=backend))
    use(everyone, dist.new_group(backend=backend))
    use([2], dist.new_group([2], backend=backend))

# Some ranks alone make a group; from then on the ranks know different numbers of groups.
for some in ([1, 2, 3], [0, 1], [0, 2], [0, 1, 3], [0, 1]):
    if rank in some:
        use(some, dist.new_group(some, use_local_synchronization=True))
use([0, 3], dist.new_group([0, 3], use_local_synchronization=True))

use([3, 0, 2], dist.new_group([3, 0, 2], sort_ranks=False))
use([2, 1], dist.new_group([2, 1], sort_ranks=False, backend="gloo"))

# Two groups of the same ranks at a time, one of which is destroyed and made again.
three = [0, 1, 3]
first = dist.new_group(three)
for _ in range(3):
    second = dist.new_group(three)
    use(three, second)
    if rank in three:
        dist.destroy_process_group(first)
    first = dist.new_group(three)
    use(three, first)
    if rank in three:
        dist.destroy_process_group(second)
use(three, first)

own, _ = dist.new_subgroups(2)
use([rank // 2 * 2, rank // 2 * 2 + 1], own)
own, _ = dist.new_subgroups_by_enumeration([[0, 3], [2, 1]])
use([0, 3] if rank in (0, 3) else [1, 2], own)

for wrong in ([0, 0], [9], [-1, 0]):
    try:
        dist.new_group(wrong)
    except ValueError:
        continue
    raise AssertionError(f"a group of {wrong}")
use([0, 1], dist.new_group([0, 1]))

dist.barrier()
dist.destroy_process_group()
print(f"rank {rank} saw {seen} groups", flush=True)
