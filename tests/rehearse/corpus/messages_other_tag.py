"""The sender has a new tag for gradients; the receiver still waits for the old one.

kind: messages
verdict: unmatched-send-or-recv
line: dist.send(torch.ones(4), 1, tag=8) | dist.recv(gradient, 0, tag=7)
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
gradient = torch.empty(4)
if rank == 0:
    dist.send(torch.ones(4), 1, tag=8)
elif rank == 1:
    dist.recv(gradient, 0, tag=7)
dist.destroy_process_group()
