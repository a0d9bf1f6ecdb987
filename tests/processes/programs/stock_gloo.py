"""A group of torch's own Gloo in a program that has a group of unicomm, too."""

import torch
import torch.distributed as dist

from tests.processes.programs.common import say

dist.init_process_group("gloo")
ours = dist.new_group(backend="unicomm")
for i in range(2000):
    # Nobody keeps the tensors: the last reference is that of Gloo's Work, which a thread of Gloo destroys.
    dist.all_gather_into_tensor(torch.empty(8), torch.full((4,), float(i)))
x = torch.ones(4)
dist.all_reduce(x, group=ours)
say("done", sum=x.tolist())
dist.destroy_process_group()
