"""Examples of the reference: differentiable functions. `comm` is a communicator of two ranks."""

import torch

import unicomm.functional as F

# %% functional.all_reduce
x = torch.tensor([comm.rank + 1.0], requires_grad=True)
y = F.all_reduce(x, "sum", comm)
y.sum().backward()
assert (y.item(), x.grad.item()) == (3.0, 2.0)  # the sum of both ranks' gradients

# %% functional.broadcast
assert F.broadcast(torch.tensor([float(comm.rank)]), 1, comm).item() == 1.0

# %% functional.reduce
y = F.reduce(torch.ones(1), 0, "sum", comm)
assert y.item() == (2.0 if comm.rank == 0 else 1.0)

# %% functional.all_gather_single
assert F.all_gather_single(torch.tensor([float(comm.rank)]), comm).tolist() == [0.0, 1.0]

# %% functional.reduce_scatter_single
assert F.reduce_scatter_single(torch.arange(2.0), "sum", comm).tolist() == [2.0 * comm.rank]

# %% functional.all_to_all_single
y = F.all_to_all_single(torch.tensor([0.0, 1.0]) + 10 * comm.rank, comm)
assert y.tolist() == [comm.rank, 10.0 + comm.rank]

# %% functional.all_to_all_v_single
sends = [[1, 2], [3, 0]]  # rank 0 keeps one row, and rank 1 keeps none
receives = [row[comm.rank] for row in sends]
y = F.all_to_all_v_single(torch.arange(3.0), receives, sends[comm.rank], comm)
assert len(y) == sum(receives)

# %% functional.permute
assert F.permute(torch.tensor([float(comm.rank)]), [1, 0], comm).item() == 1.0 - comm.rank

# %% functional.gather
y = F.gather(torch.tensor([float(comm.rank)]), 0, comm)
assert y.tolist() == ([0.0, 1.0] if comm.rank == 0 else [])

# %% functional.scatter
y = F.scatter(torch.arange(4.0), 0, 2, comm)  # two rows for each rank
assert y.tolist() == ([0.0, 1.0] if comm.rank == 0 else [2.0, 3.0])

# %% functional.reduce_to_root
y = F.reduce_to_root(torch.ones(1), 0, comm)
assert y.item() == (2.0 if comm.rank == 0 else 0.0)

# %% functional.gather_to_root
y = F.gather_to_root(torch.ones(1), 0, [2], comm)
assert y.tolist() == ([1.0, 1.0] if comm.rank == 0 else [0.0, 0.0])

# %% functional.all_reduce_
x = torch.ones(2)
F.all_reduce_(x, "sum", comm)
assert x.tolist() == [2.0, 2.0]

# %% functional.broadcast_
x = torch.tensor([float(comm.rank)])
F.broadcast_(x, 1, comm)
assert x.item() == 1.0

# %% functional.all_reduce_coalesced
a, b = F.all_reduce_coalesced([torch.ones(1), torch.ones(2)], "sum", comm)
assert (a.tolist(), b.tolist()) == ([2.0], [2.0, 2.0])

# %% functional.all_gather_single_coalesced
(whole,) = F.all_gather_single_coalesced([torch.tensor([float(comm.rank)])], comm)
assert whole.tolist() == [0.0, 1.0]

# %% functional.reduce_scatter_single_coalesced
(part,) = F.reduce_scatter_single_coalesced([torch.ones(4)], "sum", comm)
assert part.tolist() == [2.0, 2.0]

# %% functional.all_reduce_async
y = F.all_reduce_async(torch.ones(1), "sum", comm)
assert (y + 1).item() == 3.0  # waits where the result is used

# %% functional.broadcast_async
assert F.broadcast_async(torch.tensor([float(comm.rank)]), 1, comm).item() == 1.0

# %% functional.all_gather_single_async
assert F.all_gather_single_async(torch.tensor([float(comm.rank)]), comm).tolist() == [0.0, 1.0]

# %% functional.reduce_scatter_single_async
assert F.reduce_scatter_single_async(torch.ones(2), "sum", comm).tolist() == [2.0]

# %% functional.all_to_all_single_async
y = F.all_to_all_single_async(torch.tensor([0.0, 1.0]) + 10 * comm.rank, comm)
assert y.tolist() == [comm.rank, 10.0 + comm.rank]

# %% functional.all_to_all_v_single_async
y = F.all_to_all_v_single_async(torch.arange(2.0), [1, 1], [1, 1], comm)
assert y.tolist() == [comm.rank, comm.rank]

# %% functional.send, functional.recv
if comm.rank == 0:
    F.send(torch.tensor([7.0]), 1, comm)
else:
    assert F.recv(torch.empty(1), 0, comm).item() == 7.0  # a new tensor of that shape and dtype

# %% functional.barrier
F.barrier(comm)

# %% functional.communicator, functional.group_size
assert F.communicator(comm, torch.device("cpu")) is comm
assert F.group_size(comm) == 2

# %% functional.OPS, functional.FunctionalOp
assert F.OPS["all_reduce"].arguments == "str op"
