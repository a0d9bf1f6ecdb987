"""In a batch of messages the last rank of an open chain still sends to the first, which does not receive.

kind: messages
verdict: unmatched-send-or-recv
line: batch_isend_irecv(messages)
"""

import torch
import torch.distributed as dist
from torch.distributed import P2POp, batch_isend_irecv, irecv, isend

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
mine, theirs = torch.ones(8), torch.empty(8)
messages = [P2POp(isend, mine, (rank + 1) % size)]
if rank > 0:
    messages.append(P2POp(irecv, theirs, rank - 1))
for work in batch_isend_irecv(messages):
    work.wait()
dist.destroy_process_group()
