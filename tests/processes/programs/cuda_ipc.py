"""The table over CUDA devices, called directly: cuda_ipc.py LIBRARY (the runtime, or its mock) HOW

all   allocations, copies, teams; what is left
wait  rank 0 waits for rank 1 at a barrier, to which that never comes
"""

import ctypes
import gc
import sys

import numpy as np
import torch

import unicomm
from tests.processes.programs.common import hear, holdings, say, settled, threads
from unicomm import _core, symm

LIBRARY, HOW = sys.argv[1:]
T, N = 30.0, 1000
alone = threads()
comm = unicomm.new_comm("shm", torch.device("cpu"), name="main", timeout=60)
settled(alone, threads)  # its idle threads end
me, n = comm.get_rank(), comm.get_size()
table = _core.symm_cuda_ipc(LIBRARY)
lacks = symm.Capability.SIGNAL | symm.Capability.ATOMICS
assert symm.Capability(table.capabilities) & lacks == 0
runtime = ctypes.CDLL(LIBRARY)
before = holdings()
note = torch.zeros(128, dtype=torch.uint8)
if me == 0:
    fault, uid = table.unique_id(n, 1 << 20)
    assert fault is None
    note.copy_(torch.frombuffer(bytearray(uid), dtype=torch.uint8))
comm.broadcast(note, 0, False)
fault, domain = table.init(note.numpy().tobytes(), me, n, "devices", T)
assert fault is None, fault


def transferred(fault):
    """Copies are in the order of their stream."""
    assert fault is None, fault
    assert runtime.cudaStreamSynchronize(None) == 0
    return True


def check():
    fault, x = domain.allocate(8 * N, 256, T)
    assert fault is None
    assert x % 256 == 0
    fault, y = domain.allocate(8 * N, 64, T)
    assert fault is None
    own = np.arange(N) + N * me
    assert transferred(domain.put(x, own.ctypes.data, 8 * N, me, 0))  # from the host, as on a device
    assert domain.barrier(T, 0) is None
    got = np.zeros(N, np.int64)
    for pe in range(n):
        assert transferred(domain.get(got.ctypes.data, x, 8 * N, pe, 0))
        assert (got == np.arange(N) + N * pe).all()
    assert transferred(domain.get(y, x, 8 * N, (me + 1) % n, 0))  # from device to device
    assert transferred(domain.get(got.ctypes.data, y, 8 * N, me, 0))
    assert got[0] == N * ((me + 1) % n)
    assert domain.barrier(T, 0) is None
    # Many at once, done when quiet.
    rows = np.array([[own.ctypes.data + 8 * pe, y + 8 * me, 8, pe] for pe in range(n)])
    assert transferred(domain.transfer(True, rows, 0))
    assert domain.barrier(T, 0) is None
    assert transferred(domain.get(got.ctypes.data, y, 8 * n, me, 0))
    assert got[:n].tolist() == [N * pe + me for pe in range(n)]
    # Addresses of the others are good for copies of this process's own.
    fault, theirs = domain.ptr(x, 8 * N, (me + 1) % n)
    assert fault is None
    assert transferred(domain.put(y, theirs, 8, me, 0))
    assert transferred(domain.get(got.ctypes.data, y, 8, me, 0))
    assert got[0] == N * ((me + 1) % n)
    for wrong in (
        domain.put(own.ctypes.data, x, 8, 0, 0),
        domain.get(got.ctypes.data, x, 1 << 22, 0, 0),
        domain.get(got.ctypes.data, x, 8, n, 0),
        domain.ptr(x - (1 << 22), 8, 0)[0],
    ):
        assert "outside of the symmetric heap" in wrong[3]
    # All must ask for the same, and hear it if not; room comes back.
    assert domain.allocate(64 + me, 64, T)[0] is not None
    assert "no room" in domain.allocate(1 << 21, 64, T)[0][3]
    assert domain.free(y, T) is None
    assert domain.allocate(8 * N, 64, T) == (None, y)
    fault, team = domain.team_split(me % 2, 2, len(range(me % 2, n, 2)), T)
    assert fault is None
    for pe, rank in enumerate(range(me % 2, n, 2)):
        assert transferred(team.get(got.ctypes.data, x, 8, pe, 0))
        assert got[0] == N * rank
    assert team.barrier(T, 0) is None
    for call in (
        lambda: domain.put_signal(x, 0, 0, x, 1, symm.SignalOp.SET, 0, 0),
        lambda: domain.fetch_add(x, 1, 0, 0),
    ):
        try:
            call()
            raise RuntimeError("the library has no such thing")
        except AttributeError:
            pass
    assert domain.barrier(T, 0) is None


if HOW == "all":
    check()
    comm.barrier(False)
    domain.leave()
    del domain
    gc.collect()
    comm.barrier(False)
    # What another rank still had open is given back when the next one is about to come.
    assert table.discard_id(table.unique_id(n, 1 << 20)[1]) is None
    say("over", before=before, after=settled(before))
else:
    say("ready")
    if me == 0:
        hear()
        say("fault", fault=domain.barrier(T, 0)[:2])
    else:
        hear()
