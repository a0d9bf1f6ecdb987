"""The table over NVSHMEM's mock, called directly: nvshmem_table.py LIBRARY HOW

all      allocations, copies, signals, teams; a second world; the end, and another world after it
limited  several PEs on one GPU: what is refused, and what goes
absent   rank 1 never comes to an allocation
joined   a world that something else has made, with the ranks in the communicator's order; then with others
"""

import gc
import sys

import numpy as np
import torch

import unicomm
from tests.processes.programs.common import say
from tests.processes.programs.foreign_nvshmem import Foreign
from unicomm import _core
from unicomm.comms.operations.symmetric_table import Capability, Compare, SignalOp

LIBRARY, HOW = sys.argv[1:]
T, N = 30.0, 1000
comm = unicomm.new_comm("shm", torch.device("cpu"), name="main", timeout=60)
me, n = comm.get_rank(), comm.get_size()
table = _core.symm_nvshmem(LIBRARY)
lacks = Capability.ATOMICS
assert Capability(table.capabilities) == ~lacks & Capability(127), Capability(table.capabilities)


def shared_id(heap=0):
    note = torch.zeros(128, dtype=torch.uint8)
    if me == 0:
        fault, uid = table.unique_id(n, heap)
        assert fault is None, fault
        note.copy_(torch.frombuffer(bytearray(uid), dtype=torch.uint8))
    comm.broadcast(note, 0, False)
    return note.numpy().tobytes()


def world(heap):
    uid = shared_id(heap)
    fault, domain = table.init(uid, me, n, "first", T)
    assert fault is None, fault
    return uid, domain


def allocate(domain, nbytes, align=64):
    fault, at = domain.allocate(nbytes, align, T)
    assert fault is None, fault
    assert at % align == 0
    return at


class HostStream:
    """A stream of the mock's, on which the calls of one rank are."""

    def __init__(self):
        import ctypes

        self._c = ctypes.CDLL(LIBRARY)
        made = ctypes.c_void_p()
        assert self._c.mock_stream_create(ctypes.byref(made)) == 0
        self.handle = made.value

    def synchronize(self):
        import ctypes

        assert self._c.mock_stream_synchronize(ctypes.c_void_p(self.handle)) == 0


def check(domain, stream):
    s = stream.handle
    x, y, words = allocate(domain, 8 * N, 256), allocate(domain, 8 * N), allocate(domain, 64)
    own, got = np.arange(N) + N * me, np.zeros(N, np.int64)
    assert domain.put(x, own.ctypes.data, 8 * N, me, s) is None
    zeros = np.zeros(8, np.int64)
    assert domain.put(words, zeros.ctypes.data, 64, me, s) is None
    assert domain.barrier(T, s) is None
    for pe in range(n):
        assert domain.get(got.ctypes.data, x, 8 * N, pe, s) is None
        stream.synchronize()
        assert (got == np.arange(N) + N * pe).all()
    # To the next one, with a signal, which it waits for on its stream; each comparison once.
    to, source = (me + 1) % n, (me - 1) % n
    assert domain.put_signal(y, own.ctypes.data, 8 * N, words, 5, SignalOp.SET, to, s) is None
    assert domain.put_signal(0, 0, 0, words, 2, SignalOp.ADD, to, s) is None
    for compare, value in (
        (Compare.EQ, 7),
        (Compare.NE, 0),
        (Compare.GT, 6),
        (Compare.GE, 7),
        (Compare.LT, 8),
        (Compare.LE, 7),
    ):
        assert domain.wait_signal(words, compare, value, source, T, s) is None
    assert domain.get(got.ctypes.data, y, 8 * N, me, s) is None
    stream.synchronize()
    assert (got == np.arange(N) + N * source).all()
    assert domain.barrier(T, s) is None
    # Non-blocking ones are there after quiet, and a barrier.
    rows = np.array([[own.ctypes.data + 8 * pe, y + 8 * me, 8, pe] for pe in range(n)])
    assert domain.transfer(True, rows, s) is None
    assert domain.barrier(T, s) is None
    assert domain.get(got.ctypes.data, y, 8 * n, me, s) is None
    stream.synchronize()
    assert got[:n].tolist() == [N * pe + me for pe in range(n)]
    fault, theirs = domain.ptr(x, 8 * N, to)
    assert fault is None
    assert domain.put(y, theirs, 8, me, s) is None
    assert domain.get(got.ctypes.data, y, 8, me, s) is None
    stream.synchronize()
    assert got[0] == N * to
    assert "no such PE" in domain.get(got.ctypes.data, x, 8, n, s)[3]
    assert "cannot be addressed" in domain.ptr(own.ctypes.data, 8, to)[0][3]
    # All must ask for the same, and hear it if not; nothing is lost by that, and what is freed comes back.
    fault = domain.allocate(64 + me, 64, T)[0]
    assert fault[0] == 3
    assert "rank 0: allocate 64 bytes; rank 1: allocate 65 bytes" in fault[3]
    assert "no room" in domain.allocate(1 << 30, 64, T)[0][3]
    assert domain.free(y, T) is None
    assert domain.allocate(8 * N, 64, T) == (None, y)
    # Teams: of each its own, and of the first rank alone.
    mine = list(range(me % 2, n, 2))
    fault, team = domain.team_split(me % 2, 2, len(mine), T)
    assert fault is None, fault
    for pe, rank in enumerate(mine):
        assert team.get(got.ctypes.data, x, 8, pe, s) is None
        stream.synchronize()
        assert got[0] == N * rank
    assert team.barrier(T, s) is None
    assert "not those of a team" in team.allocate(64, 64, T)[0][3]
    fault, alone = domain.team_split(0, 1, int(me == 0), T)
    assert (fault, alone is None) == (None, me != 0)
    fault, wrong = domain.team_split(0, 0, 2, T)  # all hear of it
    assert (fault[0], wrong) == (3, None)
    stream.synchronize()
    assert domain.barrier(T, s) is None
    stream.synchronize()


if HOW == "all":
    stream = HostStream()
    uid, domain = world(4 << 20)
    version, file, status = _core.symm_nvshmem_info()
    assert (file, status) == (LIBRARY, 2), (file, status)
    check(domain, stream)
    # The same ranks may have it twice; others may not, and hear what to do.
    fault, twice = table.init(uid, me, n, "again", T)
    assert fault is None
    allocate(twice, 64)
    if me == 0:
        assert table.unique_id(n, 0) == (None, bytes(4) + uid[4:])
        assert "'first' of" in table.unique_id(n - 1, 0)[0][3]
    assert "split that one" in table.init(bytes(128), me, n, "other", T)[0][3]
    domain.leave()
    assert "has left" in domain.barrier(T, 0)[3]
    assert twice.barrier(T, stream.handle) is None
    stream.synchronize()
    del domain, twice
    gc.collect()
    _, domain = world(1 << 20)  # once the first is finalised on all
    assert "no room" in domain.allocate(2 << 20, 64, T)[0][3]
    say("over")
elif HOW == "limited":
    stream = HostStream()
    _, domain = world(1 << 20)
    x, own, got = allocate(domain, 8 * n), np.array([me]), np.zeros(n, np.int64)
    for pe in range(n):
        assert domain.put(x + 8 * me, own.ctypes.data, 8, pe, stream.handle) is None
    assert domain.barrier(T, stream.handle) is None
    assert domain.get(got.ctypes.data, x, 8 * n, me, stream.handle) is None
    stream.synchronize()
    assert got.tolist() == list(range(n))
    for fault in (
        domain.wait_signal(x, Compare.GE, 0, 0, T, stream.handle),
        domain.team_split(0, 1, n, T)[0],
    ):
        assert fault[0] == 7, fault
        assert "NVSHMEM's limited mode" in fault[3], fault
    say("over")
elif HOW == "joined":
    stream = HostStream()
    theirs = Foreign(LIBRARY, comm)
    theirs.begin(me, n)
    uid, domain = world(0)
    check(domain, stream)
    assert domain.free(allocate(domain, 64), T) is None
    fault, twice = table.init(uid, me, n, "again", T)  # as symmetric memory does beside the communicator
    assert fault is None
    del domain, twice
    gc.collect()
    assert _core.symm_nvshmem_info()[2] == 2  # still there
    _, domain = world(0)
    allocate(domain, 64)
    del domain
    gc.collect()
    if me == 0:
        assert table.unique_id(n + 1, 0)[0] is None  # which ranks there are is looked at on each
    fault, other = table.init(bytes(128), me, n, "other", T)
    assert (f"PE {me} of {n}; on rank 0 it is not init" in fault[3], other) == (True, None), fault
    theirs.end()
    _, domain = world(1 << 20)  # of its own
    del domain
    gc.collect()
    theirs.begin(n - 1 - me, n)  # in another order
    fault, domain = table.init(shared_id(), me, n, "turned", T)
    assert f"PE {n - 1 - me} of {n}, and the communicator has it as rank {me} of {n}" in fault[3], fault
    theirs.end()
    if me == 0:
        theirs.begin(0, 1)  # on rank 0 alone
    fault, domain = table.init(shared_id(), me, n, "partly", T)
    assert ("of 1, and the communicator" if me == 0 else "this rank has none") in fault[3], fault
    say("over")
else:
    _, domain = world(1 << 20)
    if me == 0:
        fault = domain.allocate(64, 64, 0.2)[0]
        later = [domain.allocate(64, 64, T)[0], domain.put(0, 0, 8, 0, 0), table.unique_id(n, 0)[0]]
        say("fault", first=fault[0], later=[f[3] for f in later])
    else:
        say("fault")
comm.barrier(False)
comm.finalize()
