"""Methods of a process group in both of torch's forms: lists and options; tensors, root, op and timeout.

forms.py FOLDER: each rank writes its results to FOLDER/RANK.
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
group, device = dist.group.WORLD, torch.device("cpu")
rank, size = dist.get_rank(), dist.get_world_size()
MAX, LIMIT = dist.ReduceOp.MAX, timedelta(seconds=50)
results = []


def mine():
    return torch.full((2,), float(rank + 1))


def in_place(call):
    x = mine()
    call(x).wait()
    results.append(x.tolist())


def gathered(call, here=True):
    outs = [torch.zeros(2) for _ in range(size)] if here else []
    call(outs).wait()
    results.append([out.tolist() for out in outs])


def scattered(call, n=2):
    out = torch.zeros(n)
    call(out).wait()
    results.append(out.tolist())


in_place(group.allreduce)
in_place(lambda x: group.allreduce(x, MAX))
in_place(lambda x: group.allreduce(x, op=MAX))
in_place(lambda x: group.allreduce(x, MAX, LIMIT))
in_place(lambda x: group.allreduce(tensor=x, op=MAX, timeout=LIMIT))
in_place(lambda x: group.allreduce([x]))
in_place(lambda x: group.allreduce(tensors=[x], opts=dist.AllreduceOptions()))
in_place(lambda x: group.broadcast(x, 1))
in_place(lambda x: group.broadcast(tensor=x, root=1, timeout=LIMIT))
for root in range(size):
    x = mine()
    group.reduce(x, root, MAX, LIMIT).wait()
    results.append(x.tolist() if rank == root else None)
gathered(lambda outs: group.allgather(outs, mine()))
gathered(lambda outs: group.allgather([outs], [mine()]))
gathered(lambda outs: group.allgather(output_tensors=outs, input_tensor=mine(), timeout=LIMIT))
gathered(lambda outs: group.gather(outs, mine(), 0), rank == 0)
gathered(lambda outs: group.gather(outs, mine(), root=1, timeout=LIMIT), rank == 1)
parts = [mine() * part for part in range(size)]
scattered(lambda out: group.scatter(out, parts if rank == 1 else [], 1))
scattered(lambda out: group.reduce_scatter(out, parts))
scattered(lambda out: group.reduce_scatter(out, parts, MAX, LIMIT))
rows = torch.arange(size) + 10.0 * rank
scattered(lambda out: group.alltoall_base(out, rows, [], []), size)
scattered(lambda out: group.alltoall_base(out, rows, [], [], timeout=LIMIT), size)
group.barrier().wait()
group.barrier(LIMIT).wait()
group.barrier(timeout=LIMIT).wait()
results.append(group._get_backend(device).options._timeout.total_seconds())
for wrong in (group.allreduce, lambda: group.reduce(mine()), lambda: group.barrier(root=1)):
    try:
        wrong()
    except TypeError:
        continue
    raise SystemExit("a wrong call was taken")
(Path(sys.argv[1]) / str(rank)).write_text(json.dumps(results))
os._exit(0)  # a thread of torch's Gloo may still release a tensor
