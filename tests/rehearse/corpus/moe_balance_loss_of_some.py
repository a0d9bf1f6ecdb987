"""The loss that balances the experts is averaged on the ranks that have routed a token to expert 0.

kind: MoE
verdict: wrong-operation
line: dist.all_reduce(balance, dist.ReduceOp.AVG)
culprits: 1
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
tokens = torch.randn(4 * size, 8)
received = torch.empty_like(tokens)
expert = torch.full((16,), 0 if rank == 1 else 1)
balance = torch.tensor([1.0])
if (expert == 0).any():
    dist.all_reduce(balance, dist.ReduceOp.AVG)
dist.all_to_all_single(received, tokens)
dist.destroy_process_group()
