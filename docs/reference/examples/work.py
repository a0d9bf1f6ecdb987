"""Examples of the reference: asynchronous operations. `comm` is a communicator of two ranks."""

import asyncio

import torch

import unicomm
from unicomm import ReduceOp

# %% Work, Work.wait, Work.is_completed
x = torch.ones(4)
work = comm.all_reduce(x, ReduceOp.SUM, async_op=True)
# ... compute something that does not touch x ...
work.wait()
assert work.is_completed()
assert x.tolist() == [2.0] * 4

# %% Work.wait_blocking
comm.barrier(async_op=True).wait_blocking(timeout=10)

# %% Work.status, WorkStatus
work = comm.barrier(async_op=True)
work.wait()
assert work.status is unicomm.WorkStatus.COMPLETED

# %% Work.exception
work = comm.barrier(async_op=True)
work.wait()
assert work.exception() is None

# %% Work.add_done_callback
done = []
work = comm.barrier(async_op=True)
work.add_done_callback(lambda work: done.append(work.name))
comm.barrier()  # operations run in the order of the calls
unicomm.testing.drain(comm)
assert done == ["barrier"]

# %% wait_all
tensors = [torch.ones(2), torch.ones(3)]
unicomm.wait_all([comm.all_reduce(x, ReduceOp.SUM, async_op=True) for x in tensors], timeout=10)
assert [x.sum().item() for x in tensors] == [4.0, 6.0]


# %% Work.__await__
async def program():
    x = torch.ones(1)
    await comm.all_reduce(x, ReduceOp.SUM, async_op=True)
    return x.item()


assert asyncio.run(program()) == 2.0
