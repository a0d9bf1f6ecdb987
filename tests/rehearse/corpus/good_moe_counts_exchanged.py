"""The ranks exchange how many tokens they route to each other, then the tokens, and send the results back.

kind: MoE
verdict: all-good
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
for _ in range(2):
    expert = torch.randint(0, size, (64,))
    tokens = torch.randn(64, 8)[expert.argsort()]
    sent = expert.bincount(minlength=size)
    taken = torch.empty_like(sent)
    dist.all_to_all_single(taken, sent)
    received = torch.empty(int(taken.sum()), 8)
    dist.all_to_all_single(received, tokens, taken.tolist(), sent.tolist())
    results = torch.empty_like(tokens)
    dist.all_to_all_single(results, received * 2, sent.tolist(), taken.tolist())
dist.destroy_process_group()
