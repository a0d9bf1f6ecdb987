"""Examples of the reference: symmetric memory. `comm` is a communicator of two ranks."""

import torch

import unicomm
from unicomm import symm

# %% symm.init, symm.empty, symm.free
symm.init(comm, heap_bytes=1 << 20)
x = symm.empty(4, comm=comm)  # at the same place on all ranks; lives until free
symm.free(x, comm)

# %% symm.capabilities, symm.Capability
symm.init(comm)
assert symm.Capability.PUT_GET in symm.capabilities(comm)

# %% symm.init_team
symm.init(comm)
x = symm.empty(2, comm=comm).fill_(float(comm.rank))
team = comm.split([comm.rank], "alone")
symm.init_team(team, comm)
assert symm.one_shot_all_reduce(x, team).tolist() == [comm.rank] * 2
team.finalize()

# %% symm.synchronize
symm.init(comm)
symm.synchronize(comm)  # on a GPU waits for the stream, and raises what was refused there

# %% symm.rendezvous, symm.Handle, symm.Handle.get_buffer, symm.Handle.barrier, symm.Handle.free
symm.init(comm)
x = symm.empty(4, comm=comm).fill_(float(comm.rank))
handle = symm.rendezvous(x, comm)
handle.barrier()
theirs = handle.get_buffer(1 - comm.rank, (2,), torch.float32, storage_offset=2)
assert theirs.tolist() == [1.0 - comm.rank] * 2
handle.barrier()
handle.free()

# %% symm.Handle.put_signal, symm.Handle.wait_signal
symm.init(comm)
handle = symm.rendezvous(symm.empty(1, comm=comm), comm)
handle.put_signal(1 - comm.rank)
handle.wait_signal(1 - comm.rank, timeout=10)
handle.free()

# %% symm.put
symm.init(comm)
x = symm.empty(1, comm=comm).fill_(float(comm.rank))
comm.barrier()
if comm.rank == 0:
    symm.put(x, 1, comm)
comm.barrier()
assert x.item() == 0.0

# %% symm.get
symm.init(comm)
x = symm.empty(1, comm=comm).fill_(float(comm.rank))
comm.barrier()
if comm.rank == 0:
    symm.get(x, 1, comm)
    assert x.item() == 1.0
comm.barrier()

# %% symm.put_signal, symm.wait_signal
symm.init(comm)
x = symm.empty(1, comm=comm).fill_(float(comm.rank))
pad = symm.empty(1, dtype=torch.int64, comm=comm).zero_()
comm.barrier()
if comm.rank == 0:
    symm.put_signal(x, pad[0], 1, 1, comm)
else:
    symm.wait_signal(pad[0], 1, 0, comm)
    assert x.item() == 0.0

# %% symm.broadcast
symm.init(comm)
x = symm.empty(2, comm=comm).fill_(float(comm.rank))
assert symm.broadcast(x, 1, comm).tolist() == [1.0, 1.0]

# %% symm.all_to_all
symm.init(comm)
x, out = symm.empty(2, comm=comm), symm.empty(2, comm=comm)
x.copy_(torch.tensor([0.0, 1.0]) + 10 * comm.rank)
assert symm.all_to_all(x, out, comm).tolist() == [comm.rank, 10.0 + comm.rank]

# %% symm.all_to_all_v
symm.init(comm)
x, out = symm.empty(3, 2, comm=comm).fill_(1.0), symm.empty(6, 2, comm=comm)
came = symm.all_to_all_v(x, out, [1, 2], comm)  # one row to rank 0, two to rank 1
assert came == [comm.rank + 1] * 2

# %% symm.one_shot_all_reduce
symm.init(comm)
x = symm.empty(2, comm=comm).fill_(comm.rank + 1.0)
assert symm.one_shot_all_reduce(x, comm, "sum").tolist() == [3.0, 3.0]

# %% symm.two_shot_all_reduce_
symm.init(comm)
x = symm.empty(2, comm=comm).fill_(comm.rank + 1.0)
symm.two_shot_all_reduce_(x, comm, "max")
assert x.tolist() == [2.0, 2.0]

# %% symm.reduce_scatter
symm.init(comm)
x = symm.empty(2, 2, comm=comm).fill_(1.0)
assert symm.reduce_scatter(x, torch.empty(1, 2), comm).tolist() == [[2.0, 2.0]]

# %% symm.all_to_all_vdev
symm.init(comm)
x, out = symm.empty(3, 2, comm=comm).fill_(1.0), symm.empty(6, 2, comm=comm)
splits = symm.empty(2, dtype=torch.int64, comm=comm)
came = symm.empty(2, 2, dtype=torch.int64, comm=comm)
splits.copy_(torch.tensor([1, 2]))
symm.all_to_all_vdev(x, out, splits, came, comm)
assert came[0].tolist() == [comm.rank + 1] * 2  # rows from each rank
assert came[1].tolist() == [0, comm.rank + 1]  # where they begin

# %% symm.all_to_all_vdev_2d, symm.all_to_all_vdev_2d_offset
symm.init(comm)
x, arrived, back = (symm.empty(n, 1, comm=comm) for n in (4, 8, 4))
splits, there, home = (symm.empty(*shape, dtype=torch.int64, comm=comm) for shape in ((4,), (2, 4), (2, 4)))
x.copy_(torch.arange(4.0).view(4, 1))
splits.fill_(1)  # a row for each of two experts of two ranks
symm.all_to_all_vdev_2d(x, arrived, splits, there, comm)  # dispatch
symm.all_to_all_vdev_2d_offset(arrived, back, there, home, comm)  # combine
assert torch.equal(back, x)

# %% symm.tile_reduce
symm.init(comm)
x, out = symm.empty(4, 4, comm=comm).fill_(1.0), symm.empty(4, 4, comm=comm).zero_()
symm.tile_reduce(x[:2, :2], out[:2, :2], 0, comm)
assert out.sum().item() == (8.0 if comm.rank == 0 else 0.0)

# %% symm.multi_root_tile_reduce
symm.init(comm)
x, out = symm.empty(4, 4, comm=comm).fill_(1.0), symm.empty(4, 4, comm=comm).zero_()
symm.multi_root_tile_reduce([x[:2], x[2:]], out[:2], [0, 1], comm)
assert out.sum().item() == 16.0  # each rank reduces one half

# %% symm.reduce_scatter_offset
symm.init(comm)
x = symm.empty(3, 2, comm=comm).fill_(1.0)
mine = torch.empty(1 + comm.rank, 2)
symm.reduce_scatter_offset(x, [mine], comm, dim=0, offsets=[1, 3])
assert mine.sum().item() == 4.0 * (1 + comm.rank)

# %% symm.ExpertExchange, symm.ExpertExchange.dispatch, symm.ExpertExchange.combine, symm.ExpertExchange.free
symm.init(comm)
exchange = symm.ExpertExchange(comm, experts=1, rows=4, width=2)
rows = torch.ones(3, 2, requires_grad=True)
arrived, route = exchange.dispatch(rows, [1, 2])  # one row to the expert of rank 0, two to that of rank 1
back = exchange.combine(arrived * 10, route)
back.sum().backward()
assert back.tolist() == [[10.0, 10.0]] * 3
assert rows.grad.tolist() == [[10.0, 10.0]] * 3
exchange.free()

# %% symm.Route
symm.init(comm)
exchange = symm.ExpertExchange(comm, experts=1, rows=4, width=2)
arrived, route = exchange.dispatch(torch.ones(2, 2), [1, 1])
assert arrived[route.blocks[0]].shape == (2, 2)  # the rows of this rank's only expert
exchange.free()

# %% symm.Compare, symm.SignalOp
assert symm.Compare.EQ != symm.Compare.GE
assert symm.SignalOp.SET != symm.SignalOp.ADD

# %% symm.use_in_torch, symm.torch_operators, symm.TorchOperator
try:
    names = symm.use_in_torch()  # torch.distributed._symmetric_memory on CPU tensors
    served = [operator.name for operator in symm.torch_operators() if operator.served]
    assert "UNICOMM" in names
    assert "one_shot_all_reduce" in served
except unicomm.NotReadyError as error:  # not built for this torch
    assert "unicomm build torch-bridge" in error.hint
