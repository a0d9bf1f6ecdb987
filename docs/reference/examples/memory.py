"""Examples of the reference: memory. `comm` is a communicator of two ranks."""

import torch

import unicomm
from unicomm import ReduceOp, symm

# %% empty
x = unicomm.empty(1 << 16, comm=comm).fill_(1.0)
comm.all_reduce(x, ReduceOp.SUM)  # other ranks read it where it lies
assert x[0].item() == 2.0

# %% MemAllocator, MemAllocator.empty, MemAllocator.holds, MemAllocator.allocated
allocator = comm.mem_allocator
x = allocator.empty(256, dtype=torch.int32)
assert allocator.holds(x)
assert not allocator.holds(torch.empty(256))
assert allocator.allocated() >= x.nbytes

# %% MemAllocator.tensor_register, MemAllocator.tensor_deregister
x = comm.mem_allocator.empty(256)
comm.mem_allocator.tensor_register(x)  # nothing to do on shm; on nccl the library maps it for other GPUs
comm.mem_allocator.tensor_deregister(x)

# %% MemAllocator.pool
try:
    pool = comm.mem_allocator.pool
except unicomm.UnsupportedError as error:  # only memory of GPUs has a pool
    assert "shm" in str(error)

# %% Window, Window.put, Window.signal, Window.wait_signal, Window.get_tensor, Window.free
symm.init(comm)
window = comm.new_window(symm.empty(8, comm=comm).zero_())
window.barrier()
other = 1 - comm.rank
window.put(torch.tensor([1.0, 2.0]), dst_rank=other, target_offset_nelems=4)
window.signal(other)
window.wait_signal(other)  # who has seen the signal sees the data put before it
assert window.get_tensor()[4:6].tolist() == [1.0, 2.0]
window.free()

# %% Window.tensor_register, Window.tensor_deregister, Window.get_size
symm.init(comm)
window = comm.new_window()
window.tensor_register(symm.empty(8, comm=comm))
assert window.get_size() == 32
window.tensor_deregister()
assert window.get_size() == 0
window.free()

# %% Window.get, Window.barrier
symm.init(comm)
window = comm.new_window(symm.empty(2, comm=comm).fill_(float(comm.rank)))
window.barrier()
x = torch.empty(2)
window.get(x, src_rank=1 - comm.rank, source_offset_nelems=0)
assert x.tolist() == [1.0 - comm.rank] * 2
window.free()

# %% Window.get_attr, Window.map_remote_tensor
symm.init(comm)
window = comm.new_window(symm.empty(2, comm=comm).fill_(float(comm.rank)))
window.barrier()
assert window.get_attr(1 - comm.rank).access_type.name == "UNIFIED"
assert window.map_remote_tensor(1 - comm.rank).tolist() == [1.0 - comm.rank] * 2
window.barrier()
window.free()

# %% Window.fetch_add, Window.compare_swap
symm.init(comm)
window = comm.new_window(symm.empty(2, dtype=torch.int64, comm=comm).zero_())
window.barrier()
window.fetch_add(rank=0, offset_nelems=0, value=5)
window.barrier()
assert window.fetch_add(rank=0, offset_nelems=0, value=0) == 10
if comm.rank == 1:
    assert window.compare_swap(rank=0, offset_nelems=1, expected=0, value=9) == 0
window.free()
