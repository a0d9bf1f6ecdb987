"""Neighbouring stages send first and receive then.

kind: pipeline
verdict: wait-cycle-across-groups
line: dist.send(activations, peer)
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
peer = dist.get_rank() ^ 1
activations, gradients = torch.ones(2048, 1024), torch.empty(2048, 1024)
for _ in range(2):
    dist.send(activations, peer)
    dist.recv(gradients, peer)
dist.destroy_process_group()
