"""The table of rocSHMEM's unit, called directly: rocshmem.py LIBRARY HOW

all     allocations, copies, signals, atomics, teams; wrong calls
absent  rank 1 does not come to an allocation, and rank 0 gives up
"""

import sys

import numpy as np
import torch

import unicomm
from tests.processes.programs.common import hear, say
from unicomm import _core, symm

LIBRARY, HOW = sys.argv[1:]
T, N = 60.0, 1000
comm = unicomm.new_comm("shm", torch.device("cpu"), name="main", timeout=60)
me, n = comm.get_rank(), comm.get_size()
table = _core.symm_library(LIBRARY)
capabilities = symm.Capability(table.capabilities)


def share(uid):
    note = torch.zeros(128, dtype=torch.uint8)
    if me == 0:
        note.copy_(torch.frombuffer(bytearray(uid), dtype=torch.uint8))
    comm.broadcast(note, 0, False)
    return note.numpy().tobytes()


def begin():
    fault, uid = table.unique_id(n, 1 << 20) if me == 0 else (None, b"")
    assert fault is None, fault
    fault, domain = table.init(share(uid), me, n, "devices", T)
    assert fault is None, fault
    return domain


def good(fault):
    assert fault is None, fault


def check(domain):
    fault, x = domain.allocate(8 * N, 256, T)
    good(fault)
    assert x % 256 == 0
    fault, y = domain.allocate(8 * N, 64, T)
    good(fault)
    own = np.arange(N) + N * me
    got = np.zeros(N, np.int64)

    def fetch(address, count, pe):
        good(domain.get(got.ctypes.data, address, 8 * count, pe, 0))
        good(domain.quiet(0))
        settle()
        return got[:count]

    def settle():  # the host waits for the stream: an atomic does
        domain.fetch_add(y + 8 * (N - 1), 0, me, 0)

    # To oneself and to others; `put` is there after a barrier, in the stream's order.
    good(domain.put(x, own.ctypes.data, 8 * N, me, 0))
    good(domain.barrier(T, 0))
    for pe in range(n):
        assert (fetch(x, N, pe) == np.arange(N) + N * pe).all()
    good(domain.barrier(T, 0))
    # Many at once, done when quiet.
    rows = np.array([[own.ctypes.data + 8 * pe, y + 8 * me, 8, pe] for pe in range(n)])
    good(domain.transfer(True, rows, 0))
    good(domain.barrier(T, 0))
    assert fetch(y, n, me).tolist() == [N * pe + me for pe in range(n)]
    back = np.array([[got.ctypes.data + 8 * pe, x + 8, 8, pe] for pe in range(n)])
    good(domain.transfer(False, back, 0))
    settle()
    assert got[:n].tolist() == [N * pe + 1 for pe in range(n)]
    good(domain.barrier(T, 0))
    if symm.Capability.POINTER in capabilities:
        fault, theirs = domain.ptr(x, 8, (me + 1) % n)
        good(fault)
        view = _core.symm_bytes(domain, theirs, 8).view(np.int64)
        assert view[0] == N * ((me + 1) % n)

    # Signals: with data, alone, set and added; all comparisons in turn.
    fault, words = domain.allocate(64, 64, T)
    good(fault)
    zeros = np.zeros(8, np.int64)  # sources are read when the stream comes to it
    good(domain.put(words, zeros.ctypes.data, 64, me, 0))
    good(domain.barrier(T, 0))
    after, before = (me + 1) % n, (me - 1) % n
    five = np.full(1, 500 + me)
    good(domain.put_signal(x, five.ctypes.data, 8, words, 7, symm.SignalOp.SET, after, 0))
    good(domain.wait_signal(words, symm.Compare.EQ, 7, before, T, 0))
    assert fetch(x, 1, me)[0] == 500 + before
    good(domain.barrier(T, 0))  # nobody goes on to count before all have seen it
    good(domain.put_signal(0, 0, 0, words, 2, symm.SignalOp.ADD, after, 0))
    good(domain.wait_signal(words, symm.Compare.GE, 9, before, T, 0))
    good(domain.barrier(T, 0))
    true = {"NE": 8, "GT": 8, "LT": 10, "LE": 9, "EQ": 9, "GE": 9}
    for name, value in true.items():
        good(domain.wait_signal(words, symm.Compare[name], value, before, T, 0))
    good(domain.barrier(T, 0))
    good(domain.put(x, own.ctypes.data, 8, after, 0))
    good(domain.fence(0))
    good(domain.put_signal(0, 0, 0, words, 1, symm.SignalOp.SET, after, 0))
    good(domain.wait_signal(words, symm.Compare.EQ, 1, before, T, 0))
    assert fetch(x, 1, me)[0] == N * before  # what was put before the fence came before the signal
    good(domain.barrier(T, 0))

    # Atomics at rank 0.
    for _ in range(50):
        fault, _old = domain.fetch_add(words + 8, me + 1, 0, 0)
        good(fault)
    good(domain.barrier(T, 0))
    assert domain.fetch_add(words + 8, 0, 0, 0) == (None, 50 * n * (n + 1) // 2)
    fault, won = domain.compare_swap(words + 16, 0, me + 1, 0, 0)
    good(fault)
    good(domain.barrier(T, 0))
    fault, winner = domain.compare_swap(words + 16, 0, 99, 0, 0)
    assert 1 <= winner <= n
    assert (won == 0) == (winner == me + 1)

    # All must ask for the same, and hear it if not; room comes back.
    fault, _ = domain.allocate(64 + me, 64, T)
    assert fault[0] == 3
    assert f"rank {n - 1}: allocate {63 + n} bytes" in fault[3]
    assert "no room" in domain.allocate(1 << 21, 64, T)[0][3]
    assert "an alignment is a power of 2" in domain.allocate(64, 8192, T)[0][3]
    assert "nothing was allocated" in domain.free(x + 8, T)[3]
    good(domain.free(y, T))
    fault, again = domain.allocate(8 * N, 64, T)
    good(fault)
    assert again == y
    for wrong in (
        domain.put(own.ctypes.data, x, 8, 0, 0),
        domain.get(got.ctypes.data, x, 1 << 22, 0, 0),
        domain.get(got.ctypes.data, x, 8, n, 0),
        domain.put_signal(x, x, 8, own.ctypes.data, 1, symm.SignalOp.SET, 0, 0),
        domain.wait_signal(own.ctypes.data, symm.Compare.EQ, 1, 0, T, 0),
        domain.fetch_add(own.ctypes.data, 1, 0, 0)[0],
    ):
        assert "outside of the symmetric heap" in wrong[3]

    # Teams of the even and of the odd ranks, at the same time; a barrier of one is none of the other's.
    count = len(range(me % 2, n, 2))
    fault, team = domain.team_split(me % 2, 2, count, T)
    good(fault)
    good(domain.put(x, own.ctypes.data, 8, me, 0))
    good(domain.quiet(0))
    if me % 2 == 0:
        for _ in range(3):
            good(team.barrier(T, 0))
    comm.barrier(False)
    if me % 2 == 1:
        good(team.barrier(T, 0))
    good(domain.barrier(T, 0))
    for pe, rank in enumerate(range(me % 2, n, 2)):
        good(team.get(got.ctypes.data, x, 8, pe, 0))
        settle()
        assert got[0] == N * rank
    # What a member put is there for all members after their barrier.
    good(team.put(x + 16, own.ctypes.data + 16, 8, (me // 2 + 1) % count, 0))
    good(team.barrier(T, 0))
    settle()
    assert _core.symm_bytes(domain, x + 16, 8).view(np.int64)[0] == 2 + N * (
        me % 2 + (me // 2 - 1) % count * 2
    )
    assert "a team has no memory" in team.allocate(8, 8, T)[0][3]
    fault, none = domain.team_split(0, 1, 1 if me == 0 else 0, T)
    good(fault)
    assert (none is None) == (me != 0)
    fault, none = domain.team_split(0, 1, 2 if me == 0 else 0, T)
    assert fault[0] == 3
    assert "its members name others" in fault[3]
    good(domain.barrier(T, 0))


domain = begin()
if HOW == "all":
    check(domain)
    # Another end of the same world, beside it and after it.
    beside = begin()
    good(beside.barrier(T, 0))
    del beside
    comm.barrier(False)
    fault, big = domain.allocate(600_000, 64, T)
    good(fault)
    del domain
    comm.barrier(False)
    domain = begin()  # what was left has been freed
    fault, big = domain.allocate(600_000, 64, T)
    good(fault)
    fault, uid = table.unique_id(n + 1, 0)
    assert "rocSHMEM has one world a process" in fault[3]
    fault, _ = table.init(b"x" * 128, me, n, "other", T)
    assert "rocSHMEM has one world a process" in fault[3]
    comm.barrier(False)
    say("over", capabilities=int(capabilities))
else:
    comm.barrier(False)
    if me == 0:
        fault, _ = domain.allocate(64, 64, 1.0)
        say("fault", fault=list(fault[:2]), text=fault[3])
        fault, _ = domain.allocate(64, 64, 1.0)
        say("again", text=fault[3])
    hear()
