"""Examples of the reference: errors. `comm` is a communicator of two ranks."""

import threading

import torch

import unicomm
from unicomm import ReduceOp

# %% CommError
try:
    comm.all_reduce(torch.ones(1 + comm.rank), ReduceOp.SUM)
except unicomm.CommError as error:  # all errors of communicators
    assert (error.op, error.comm, error.seq, error.rank) == ("all_reduce", "ranks", 1, comm.rank)
    assert error.culprits
    assert error.hint

# %% MismatchError
try:
    comm.broadcast(torch.ones(4), root=comm.rank)  # two roots
except unicomm.MismatchError as error:
    assert error.culprits
comm.barrier()  # nothing was written, and the communicator stays usable

# %% SilentCorruptionError
total = torch.ones(4)
try:
    comm.all_reduce(total, ReduceOp.SUM, hints={"checksum": True})  # the ranks compare their results
    assert torch.equal(total, torch.full((4,), 2.0))
except unicomm.SilentCorruptionError as error:
    print(f"bits have flipped in the memory of rank {error.culprits}: do not use the result")

# %% CommTimeoutError
late = threading.Event()


def program(comm):
    if comm.rank == 1:
        late.wait(60)  # does something else
        return
    try:
        comm.recv(torch.empty(1), src=1, timeout=0.2)
    except unicomm.CommTimeoutError as error:
        assert error.culprits == (1,)
    assert comm.is_aborted()  # create a new communicator to go on
    late.set()


unicomm.testing.run_ranks(program, 2)

# %% DeadlockError
try:
    comm.recv(torch.empty(1), src=1 - comm.rank)  # both receive first, and nobody sends
except unicomm.DeadlockError as error:  # before the timeout of 30 seconds
    assert error.culprits == (0, 1)
except unicomm.AbortedError:
    pass  # the other rank was faster to find out

# %% PeerLostError
if comm.rank == 0:
    comm.finalize()  # as if its program had ended
else:
    try:
        comm.barrier()
    except unicomm.PeerLostError as error:
        assert error.culprits == (0,)

# %% AbortedError
if comm.rank == 0:
    comm.abort()
else:
    try:
        comm.barrier()
    except unicomm.AbortedError as error:
        assert error.culprits == (0,)

# %% UnsupportedError
with unicomm.new_comm("fake", "cpu", rank=0, size=8) as fake:
    try:
        unicomm.symm.init(fake)
    except unicomm.UnsupportedError as error:  # before any side effect
        assert "fake" in str(error)

# %% InvalidArgumentError
try:
    comm.send(torch.ones(1), dst=9)
except unicomm.InvalidArgumentError as error:  # a ValueError, too; only on this rank
    assert isinstance(error, ValueError)
comm.barrier()

# %% BackendError
# What a rank raises that finds no memory for a communicator, or whose library fails.
error = unicomm.BackendError("the library failed", op="all_reduce", comm="main", hint="look at its log")
assert str(error).endswith("-> look at its log")

# %% NotReadyError
own = comm.split([comm.rank], "own")
own.finalize()
try:
    own.barrier()
except unicomm.NotReadyError as error:
    assert error.op == "barrier"

# %% CommError.locate, CommError.again, CommError.sort_culprits
# For backends, which raise errors that unicomm completes.
error = unicomm.CommTimeoutError("no answer", hint="look at rank 1")
error.sort_culprits(dead=[1], absent=[], late=[3])
assert error.culprits == (1, 3)
error.locate("barrier", "main", rank=0, seq=7)
assert str(error).startswith("[barrier #7, communicator 'main', rank 0] no answer")
assert error.again("still no answer").culprits == (1, 3)  # a new error with the same fields
