"""Examples of the reference: communicators. `comm` is a communicator of two ranks."""

import torch

import unicomm
from unicomm import ReduceOp

# %% new_comm
with unicomm.new_comm("shm", torch.device("cpu"), name="main", timeout=60) as comm:
    x = torch.ones(3)
    comm.all_reduce(x, ReduceOp.SUM)
    assert x.tolist() == [comm.size] * 3

# %% Communicator
x = torch.tensor([comm.rank + 1.0])
comm.all_reduce(x, ReduceOp.SUM)
assert x.item() == 3.0
try:
    comm.broadcast(x, root=7)
except unicomm.InvalidArgumentError as error:  # nothing was sent: the communicator stays usable
    assert error.op == "broadcast"
comm.barrier()

# %% Communicator.broadcast
x = torch.tensor([float(comm.rank)])
comm.broadcast(x, root=1)
assert x.item() == 1.0

# %% Communicator.all_reduce
x = torch.tensor([1.0, 10.0]) * (comm.rank + 1)
comm.all_reduce(x, ReduceOp.AVG)
assert x.tolist() == [1.5, 15.0]

# %% Communicator.all_reduce_contributions
total = torch.empty(3)
comm.all_reduce_contributions(total, torch.ones(4, 3), ReduceOp.SUM)  # 4 rows of each rank
assert total.tolist() == [4.0 * comm.size] * 3

# %% Communicator.reduce
x = torch.tensor([comm.rank + 1.0])
comm.reduce(x, root=0, op=ReduceOp.MAX)
assert x.item() == (2.0 if comm.rank == 0 else 2.0 * comm.rank)

# %% Communicator.all_gather
parts = [torch.empty(2) for _ in range(comm.size)]
comm.all_gather(parts, torch.full((2,), float(comm.rank)))
assert [part.tolist() for part in parts] == [[0.0, 0.0], [1.0, 1.0]]

# %% Communicator.all_gather_v
parts = [torch.empty(1), torch.empty(2)]  # rank i sends i + 1 elements
comm.all_gather_v(parts, torch.full((comm.rank + 1,), float(comm.rank)))
assert [part.tolist() for part in parts] == [[0.0], [1.0, 1.0]]

# %% Communicator.all_gather_single
whole = torch.empty(comm.size * 2)
comm.all_gather_single(whole, torch.full((2,), float(comm.rank)))
assert whole.tolist() == [0.0, 0.0, 1.0, 1.0]

# %% Communicator.reduce_scatter
mine = torch.empty(1)
comm.reduce_scatter(mine, [torch.tensor([1.0]), torch.tensor([5.0])], ReduceOp.SUM)
assert mine.item() == (2.0 if comm.rank == 0 else 10.0)

# %% Communicator.reduce_scatter_v
mine = torch.empty(comm.rank + 1)  # rank i gets i + 1 elements
comm.reduce_scatter_v(mine, [torch.ones(1), torch.ones(2)], ReduceOp.SUM)
assert mine.tolist() == [2.0] * (comm.rank + 1)

# %% Communicator.reduce_scatter_single
mine = torch.empty(2)
comm.reduce_scatter_single(mine, torch.arange(4.0), ReduceOp.SUM)
assert mine.tolist() == ([0.0, 2.0] if comm.rank == 0 else [4.0, 6.0])

# %% Communicator.all_to_all_single
out = torch.empty(2)
comm.all_to_all_single(out, torch.tensor([0.0, 1.0]) + 10 * comm.rank)
assert out.tolist() == [comm.rank, 10.0 + comm.rank]

# %% Communicator.all_to_all_v_single
# Rank 0 sends one row to itself and two to rank 1; rank 1 sends all three to rank 0.
sends = [[1, 2], [3, 0]]
receives = [row[comm.rank] for row in sends]
out = torch.empty(sum(receives))
comm.all_to_all_v_single(out, torch.arange(3.0), receives, sends[comm.rank])
assert out.tolist() == ([0.0, 0.0, 1.0, 2.0] if comm.rank == 0 else [1.0, 2.0])

# %% Communicator.all_to_all
out = [torch.empty(1) for _ in range(comm.size)]
comm.all_to_all(out, [torch.tensor([10.0 * comm.rank + to]) for to in range(comm.size)])
assert [part.item() for part in out] == [comm.rank, 10.0 + comm.rank]

# %% Communicator.barrier
comm.barrier(timeout=10)

# %% Communicator.scatter
mine = torch.empty(1)
parts = [torch.tensor([3.0]), torch.tensor([4.0])] if comm.rank == 0 else []
comm.scatter(mine, parts, root=0)
assert mine.item() == 3.0 + comm.rank

# %% Communicator.gather
parts = [torch.empty(1), torch.empty(1)] if comm.rank == 0 else []
comm.gather(parts, torch.tensor([float(comm.rank)]), root=0)
assert [part.item() for part in parts] == ([0.0, 1.0] if comm.rank == 0 else [])

# %% Communicator.gather_single
whole = torch.empty(2) if comm.rank == 0 else None
comm.gather_single(whole, torch.tensor([float(comm.rank)]), root=0)
assert whole is None or whole.tolist() == [0.0, 1.0]

# %% Communicator.send, Communicator.recv
if comm.rank == 0:
    comm.send(torch.tensor([7.0]), dst=1)
else:
    x = torch.empty(1)
    comm.recv(x, src=0)
    assert x.item() == 7.0

# %% Communicator.batch_op_create, BatchSendRecv, BatchSendRecv.send, BatchSendRecv.recv, BatchSendRecv.issue
other, got = 1 - comm.rank, torch.empty(1)
batch = comm.batch_op_create()
batch.send(torch.tensor([float(comm.rank)]), other).recv(got, other)
batch.issue()  # both ranks send first, and neither waits for the other
assert got.item() == other

# %% P2POp
batch = comm.batch_op_create().send(torch.ones(1), 1 - comm.rank)
assert batch.ops[0].kind == "send"
assert batch.ops[0].peer == 1 - comm.rank

# %% Communicator.all_gather_p_init, Communicator.all_gather_p_exec, Communicator.all_gather_p_free
whole = torch.empty(2)
handle = comm.all_gather_p_init(whole)
for step in range(3):
    comm.all_gather_p_exec(handle, torch.tensor([10.0 * step + comm.rank]))
    assert whole.tolist() == [10.0 * step, 10.0 * step + 1]
comm.all_gather_p_free(handle)

# %% Communicator.split
half = comm.split([comm.rank], "alone")  # each rank names its own part
assert half.size == 1
assert half.get_ranks() == [comm.rank]
half.finalize()

# %% Communicator.get_init_handle, Communicator.reconfigure
with unicomm.new_comm("shm", torch.device("cpu"), name="elastic", enable_reconfigure=True) as own:
    handles = [None] * comm.size
    unicomm.objcol.all_gather_object(comm, handles, own.get_init_handle())
    own.reconfigure(1, handles)
    assert (own.rank, own.size) == (comm.rank, 2)
    own.reconfigure(2, [own.get_init_handle()])  # goes on alone
    assert own.size == 1
    comm.barrier()  # each rank reaches the others' memory until they are done

# %% Communicator.finalize
own = comm.split([comm.rank], "short")
own.finalize()
try:
    own.barrier()
except unicomm.NotReadyError as error:
    assert error.comm == "short"

# %% Communicator.abort, Communicator.is_aborted
own = comm.split([comm.rank], "ended")
own.abort()
assert own.is_aborted()
try:
    own.barrier()
except unicomm.AbortedError as error:
    assert error.culprits == (0,)
own.finalize()

# %% Communicator.set_timeout, Communicator.get_timeout
comm.set_timeout(20)
assert comm.get_timeout() == 20.0

# %% Communicator.expect_slow
with comm.expect_slow("checkpoint", 600):  # the others wait for up to ten minutes
    pass  # write the checkpoint
comm.barrier()

# %% Communicator.set_hints
try:
    comm.set_hints({"no_such_hint": "1"})
except unicomm.InvalidArgumentError as error:
    assert "known:" in error.hint

# %% Communicator.register_pre_hook, Communicator.register_post_hook
calls = []
with (
    comm.register_pre_hook(lambda name, op_id, args: calls.append(f"before {name.name} #{args.seq}")),
    comm.register_post_hook(lambda name, op_id, args: calls.append(f"after {name.name}")),
):
    comm.barrier()
assert calls == ["before barrier #1", "after barrier"]

# %% Communicator.register_abort_hook
errors = []
own = comm.split([comm.rank], "watched")
own.register_abort_hook(errors.append)
own.abort()
assert isinstance(errors[0], unicomm.AbortedError)
own.finalize()

# %% Communicator.rank, Communicator.size, Communicator.get_rank, Communicator.get_size
assert comm.rank == comm.get_rank()
assert comm.size == comm.get_size() == 2

# %% Communicator.get_ranks
swapped = comm.split([1, 0], "swapped")
assert swapped.get_ranks() == [1, 0]
assert swapped.rank == 1 - comm.rank
swapped.finalize()

# %% Communicator.get_name, Communicator.get_uid, Communicator.get_device, Communicator.get_options
assert comm.get_name() == "ranks"
assert comm.get_uid()
assert comm.get_device() == torch.device("cpu")
assert comm.get_options().timeout == comm.get_timeout()

# %% Communicator.get_backend, Communicator.get_backend_version, Communicator.get_capabilities
assert comm.get_backend() == "shm"
assert comm.get_backend_version().startswith("native core")
assert comm.get_capabilities().checks_mismatch

# %% Communicator.memory
assert sum(comm.memory().values()) > 0

# %% Communicator.mem_allocator
x = comm.mem_allocator.empty(1024)
comm.all_reduce(x.fill_(1.0), ReduceOp.SUM)  # moved without a staging copy where that is faster

# %% Communicator.unsafe_backend
assert comm.unsafe_backend.name == "shm"

# %% Communicator.new_window
unicomm.symm.init(comm)
window = comm.new_window(unicomm.symm.empty(4, comm=comm))
window.put(torch.tensor([1.0]), dst_rank=1 - comm.rank, target_offset_nelems=0)
window.barrier()
assert window.get_tensor()[0].item() == 1.0
window.free()

# %% CommOptions
options = comm.get_options()
assert options.timeout == 30.0
assert not options.enable_reconfigure

# %% ReduceOp, ReduceOp.PREMUL_SUM, ReduceOp.name
x = torch.tensor([1.0])
comm.all_reduce(x, ReduceOp.PREMUL_SUM(0.25))  # each rank's tensor times the factor, then summed
assert x.item() == 0.5
assert ReduceOp.MAX.name == "MAX"

# %% RedOpType
assert ReduceOp(unicomm.RedOpType.SUM) == ReduceOp.SUM
