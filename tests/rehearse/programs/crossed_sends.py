"""Two pipeline stages that both send before they receive."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
peer = rank ^ 1
activations, gradients = torch.ones(1024, 1024), torch.empty(1024, 1024)
dist.send(activations, peer)
dist.recv(gradients, peer)
dist.destroy_process_group()
