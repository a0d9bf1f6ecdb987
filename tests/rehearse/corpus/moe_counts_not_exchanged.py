"""Each rank takes its own counts of tokens for those that the others send to it.

kind: MoE
verdict: split-mismatch
line: dist.all_to_all_single(received, tokens, counts, counts)
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
expert = torch.randint(0, size, (64,))
tokens = torch.randn(64, 8)[expert.argsort()]
counts = expert.bincount(minlength=size).tolist()
received = torch.empty(sum(counts), 8)
dist.all_to_all_single(received, tokens, counts, counts)
dist.destroy_process_group()
