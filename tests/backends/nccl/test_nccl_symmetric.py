"""Symmetric memory on a window of NCCL's, over the mock NCCL: the table's functions, called directly."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from tests.backends.nccl.test_nccl_memory import Changed
from tests.backends.nccl.test_nccl_processes import run
from tests.mocks.nccl.kinds import of, streams_of
from unicomm import Communicator
from unicomm.backends.nccl.window_table import WindowTable
from unicomm.comms.errors import CommTimeoutError, InvalidArgumentError, UnsupportedError
from unicomm.comms.operations.symmetric_table import Capability, Compare, SignalOp
from unicomm.testing import run_ranks

T = 30.0
WITH_TABLE = ["nccl-new", "nccl-one-sided"]
TIMEOUT, PEER_LOST, MISMATCH, ABORTED, INTERNAL, UNSUPPORTED = 1, 2, 3, 4, 5, 7  # FaultCode


@pytest.fixture(autouse=True)
def _peer_errors(monkeypatch):
    monkeypatch.setenv("NCCL_MOCK_PEER_ERRORS", "1")  # a rank that fails fails all


class Heap:
    """One rank's end, with calls that say whether there was a fault and wait for the stream."""

    def __init__(self, comm: Communicator, heap: int = 1 << 16) -> None:
        self.comm, self.rank, self.size = comm, comm.get_rank(), comm.get_size()
        backend = comm.unsafe_backend
        self.table = WindowTable(
            backend._handle, backend._windows, backend._registrations, backend.device_copies
        )
        _, uid = self.table.unique_id(self.size, heap)
        _, self.domain = self.table.init(uid, self.rank, self.size, "heap", T)

    def do(self, what: str, *arguments: Any) -> Any:
        """The result beside the fault, of a call that has none; when the stream is through."""
        found = self.fault_and(what, *arguments)
        assert found[0] is None, (what, found)
        streams_of(self.comm).synchronize()
        return found[1] if len(found) > 1 else None

    def fault(self, what: str, *arguments: Any) -> tuple[int, str]:
        fault = self.fault_and(what, *arguments)[0]
        assert fault is not None, what
        return fault[0], fault[3]

    def fault_and(self, what: str, *arguments: Any) -> Any:
        found = getattr(self.domain, what)(*arguments)
        return found if isinstance(found, tuple) and len(found) == 2 else (found,)

    def words(self, count: int) -> int:
        return int(self.do("allocate", 8 * count, 64, T))

    def read(self, address: int, count: int, pe: int) -> list[int]:
        got = np.zeros(count, np.int64)
        self.do("get", got.ctypes.data, address, 8 * count, pe, 0)
        return got.tolist()

    def write(self, address: int, values: list[int], pe: int) -> None:
        own = np.array(values, np.int64)
        self.do("put", address, own.ctypes.data, own.nbytes, pe, 0)


@pytest.mark.parametrize("name", WITH_TABLE)
def test_copies_and_addresses(name):
    of(name)

    def program(comm: Communicator) -> None:
        heap = Heap(comm)
        me, n = heap.rank, heap.size
        assert Capability(heap.table.capabilities) == ~Capability.ATOMICS & sum(Capability)
        x, y = heap.words(10), heap.words(3)
        heap.write(x, [me] * 10, me)
        heap.do("barrier", T, 0)
        assert [heap.read(x + 8, 2, pe) for pe in range(n)] == [[pe, pe] for pe in range(n)]
        heap.write(y + 8 * me, [me + 7], (me + 1) % n)
        heap.do("barrier", T, 0)
        assert heap.read(y + 8 * ((me - 1) % n), 1, me) == [(me - 1) % n + 7]
        # Many at once, and by address.
        rows = np.array([[x, x + 8 * (2 + me), 8, pe] for pe in range(n)])
        heap.do("transfer", True, rows, 0)
        heap.do("barrier", T, 0)
        assert heap.read(x, 2 + n, me)[2:] == list(range(n))
        theirs = heap.do("ptr", x, 80, (me + 1) % n)
        assert (
            np.frombuffer((np.ctypeslib.ctypes.c_char * 8).from_address(theirs), np.int64)[0] == (me + 1) % n
        )
        heap.do("barrier", T, 0)
        outside = "outside of the symmetric heap"
        for wrong in (
            ("put", y - (1 << 20), x, 8, 0, 0),
            ("get", y, x, 1 << 20, 0, 0),
            ("get", y, x, 8, n, 0),
            ("ptr", x, 8, -1),
        ):
            code, text = heap.fault(*wrong)
            assert code == INTERNAL
            assert outside in text
        with pytest.raises(AttributeError, match="fetch_add"):
            heap.domain.fetch_add(x, 1, 0, 0)

    run_ranks(program, 3, backend=name)


def test_an_absent_rank_is_waited_for_until_the_timeout(monkeypatch, raised):
    """With blocking=0 the library goes on connecting after its call has returned."""
    of("nccl-new")
    monkeypatch.setenv("NCCL_MOCK_LAZY_CONNECT", "1")
    over = threading.Event()

    def program(comm: Communicator) -> BaseException | None:
        if comm.get_rank() == 1:
            assert over.wait(60)
            return None
        backend = comm.unsafe_backend
        table = WindowTable(backend._handle, backend._windows, backend._registrations, backend.device_copies)
        try:
            return raised(table.init, table.unique_id(2, 1 << 16)[1], 0, 2, "heap", 0.3)
        finally:
            comm.abort()
            over.set()

    error = run_ranks(program, 2, backend="nccl-new", hints={"blocking": "0"})[0]
    assert type(error) is CommTimeoutError
    assert "not all ranks initialised symmetric memory in time" in error.message


def test_allocations_are_agreed_on():
    of("nccl-new")

    def program(comm: Communicator) -> None:
        heap = Heap(comm)
        x, y = heap.words(8), heap.words(8)
        fault, _ = heap.domain.allocate(64 if heap.rank != 1 else 128, 64, T)
        assert (fault[0], fault[1]) == (MISMATCH, [1])
        assert "no room for" in heap.fault("allocate", 1 << 17, 64, T)[1]
        fault = heap.domain.free(y if heap.rank != 2 else x, T)
        assert (fault[0], fault[1]) == (MISMATCH, [2])
        heap.do("free", x, T)
        assert heap.words(8) == x
        assert heap.do("allocate", 8, 4096, T) % 4096 == 0
        assert heap.fault("free", y + 64, T)[0] == INTERNAL  # begins nothing: nobody is asked

    run_ranks(program, 3, backend="nccl-new")


@pytest.mark.parametrize("blocking", ["1", "0"])
def test_teams(blocking):
    of("nccl-new")

    def program(comm: Communicator) -> None:
        heap = Heap(comm)
        me = heap.rank
        x = heap.words(1)
        heap.write(x, [me], me)
        heap.do("barrier", T, 0)
        assert heap.do("team_split", 0, 0, 0, T) is None
        team = heap.do("team_split", me % 2, 2, 2, T)
        got = np.zeros(1, np.int64)
        assert team.get(got.ctypes.data, x, 8, 1, 0) is None
        streams_of(comm).synchronize()
        assert got[0] == me % 2 + 2
        assert team.barrier(T, 0) is None
        assert team.put_signal(0, 0, 0, x, 1, SignalOp.ADD, 1 - me // 2, 0) is None
        assert team.wait_signal(x, Compare.GE, 1, 1 - me // 2, T, 0) is None
        streams_of(comm).synchronize()
        assert team.allocate(8, 64, T)[0][0] == INTERNAL
        assert team.team_split(0, 1, 2, T)[0][0] == UNSUPPORTED
        # A different idea of a team: all hear of it, and the domain goes on.
        assert heap.fault("team_split", 0, 1, 3 if me == 2 else 4, T)[0] == MISMATCH
        assert heap.fault("team_split", 2, 1, 3, T)[0] == MISMATCH
        backwards = heap.do("team_split", 3, -1, 4, T)
        assert backwards.get(got.ctypes.data, x, 8, 0, 0) is None
        streams_of(comm).synchronize()
        assert got[0] == 3
        heap.do("barrier", T, 0)

    run_ranks(program, 4, backend="nccl-new", hints={"blocking": blocking})


@pytest.mark.parametrize("name", WITH_TABLE)
def test_signals_are_counted(name):
    of(name)

    def program(comm: Communicator) -> None:
        heap = Heap(comm)
        me, n = heap.rank, heap.size
        to, source = (me + 1) % n, (me - 1) % n
        x, word, other = heap.words(4), heap.words(1), heap.words(1)
        own = heap.words(4)
        heap.write(own, [me] * 4, me)
        heap.do("put_signal", x, own, 32, word, 1, SignalOp.ADD, to, 0)
        heap.do("put_signal", 0, 0, 0, word, 1, SignalOp.ADD, to, 0)
        heap.do("wait_signal", word, Compare.GE, 1, source, T, 0)
        assert heap.read(x, 4, me) == [source] * 4
        heap.do("wait_signal", word, Compare.GT, 1, source, T, 0)  # the second
        heap.do("wait_signal", word, Compare.GE, 2, source, T, 0)  # is there already
        elsewhere = np.full(4, me, np.int64)
        refused = {
            ("put_signal", x, elsewhere.ctypes.data, 32, word, 1, SignalOp.ADD, to, 0): "symmetric heap",
            ("put_signal", 0, 0, 0, word, 1, SignalOp.SET, to, 0): "adds 1",
            ("put_signal", 0, 0, 0, word, 2, SignalOp.ADD, to, 0): "adds 1",
            ("put_signal", 0, 0, 0, other, 1, SignalOp.ADD, to, 0): "one signal for each pair",
            ("wait_signal", word, Compare.EQ, 1, source, T, 0): ">= or > a value only",
            ("wait_signal", word, Compare.GE, 1, ~source, T, 0): "which one has to be said",
            ("wait_signal", other, Compare.GE, 1, source, T, 0): "one signal for each pair",
        }
        for call, why in refused.items():
            code, text = heap.fault(*call)
            assert code == UNSUPPORTED
            assert why in text
        heap.do("free", word, T)  # what was sent for it may still come
        assert heap.words(1) == word
        assert heap.fault("wait_signal", word, Compare.GE, 3, source, T, 0)[0] == UNSUPPORTED
        heap.do("barrier", T, 0)

    run_ranks(program, 3, backend=name)


def test_ranks_out_of_reach_get_signals_and_what_comes_with_them(monkeypatch):
    of("nccl-new")
    monkeypatch.setenv("NCCL_MOCK_LSA", "2")

    def program(comm: Communicator) -> None:
        heap = Heap(comm)
        me = heap.rank
        near, far = me ^ 1, me ^ 2
        x = heap.words(2)
        heap.write(x, [me], near)
        heap.do("barrier", T, 0)
        assert heap.read(x, 1, me) == [near]
        heap.do("barrier", T, 0)
        for call in (("put", x, x, 8, far, 0), ("get", x, x, 8, far, 0), ("ptr", x, 8, far)):
            code, text = heap.fault(*call)
            assert code == UNSUPPORTED
            assert f"PE {far} cannot be addressed" in text
        own = heap.words(1)
        heap.write(own, [me + 50], me)
        heap.do("put_signal", x, own, 8, x + 8, 1, SignalOp.ADD, far, 0)
        heap.do("wait_signal", x + 8, Compare.GE, 1, far, T, 0)
        assert heap.read(x, 1, me) == [far + 50]
        heap.do("barrier", T, 0)

    run_ranks(program, 4, backend="nccl-new")


def test_indices_of_signals_are_shared_with_windows(raised):
    of("nccl-one-sided")  # which has one

    def program(comm: Communicator) -> None:
        window = comm.new_window(comm.mem_allocator.empty(8))
        assert Capability.SIGNAL not in Capability(Heap(comm).table.capabilities)
        window.free()
        assert Capability.SIGNAL in Capability(Heap(comm).table.capabilities)
        error = raised(comm.new_window, comm.mem_allocator.empty(8))
        assert type(error) is UnsupportedError
        assert "windows and symmetric memory have all 1" in str(error)

    run_ranks(program, 2, backend="nccl-one-sided")


def test_a_rank_without_memory(monkeypatch, raised):
    library = of("nccl-new").opened
    turn = iter([(1, 0)])

    def one_fails(real: Any, nbytes: int) -> Any:
        return next(turn, None) or real(nbytes)

    monkeypatch.setattr(library, "native", Changed(library.native, {"mem_alloc": one_fails}))

    def program(comm: Communicator) -> str:
        error = raised(Heap, comm)
        assert type(error) is InvalidArgumentError
        comm.barrier(False)  # it goes on
        return str(error)

    said = run_ranks(program, 2, backend="nccl-new")
    assert sorted("this rank has no memory" in text for text in said) == [False, True]


def test_a_library_that_is_too_old(raised):
    of("nccl-shrinks")

    def program(comm: Communicator) -> BaseException:
        return raised(comm.unsafe_backend.symmetric_table)

    (error,) = run_ranks(program, 1, backend="nccl-shrinks", hints={"symmetric": "windows"})
    assert type(error) is UnsupportedError
    assert "it came with NCCL 2.29.2" in str(error)


def test_a_rank_that_does_not_come_to_an_allocation():
    """The host waits for it no longer than it was told, although a copy to it lasts as long as the stream."""
    of("nccl-new")
    over = threading.Event()

    def program(comm: Communicator) -> tuple[Any, int]:
        heap = Heap(comm)
        if heap.rank == 1:
            assert over.wait(60)
            comm.abort()
            return None, 0
        fault = heap.fault("allocate", 8, 64, 0.3)
        left = streams_of(comm)._c.mock_last_error()
        over.set()
        comm.abort()
        return fault, left

    found = run_ranks(program, 2, backend="nccl-new")
    assert found[0] == ((TIMEOUT, "the ranks did not meet"), 0)  # and the program finds no error of ours


def test_it_ends_with_the_communicator():
    of("nccl-new")
    kept = []

    def program(comm: Communicator) -> None:
        heap = Heap(comm)
        x = heap.words(1)
        heap.write(x, [5], heap.rank)
        kept.append((heap.domain, x))
        if comm.get_name() == "aborted":
            comm.abort()
            assert heap.fault("barrier", T, 0)[0] == ABORTED
            assert heap.fault("allocate", 8, 64, T)[0] == ABORTED

    run_ranks(program, 2, backend="nccl-new", name="aborted")
    run_ranks(program, 2, backend="nccl-new", name="finalized")
    for domain, x in kept:
        assert domain.barrier(T, 0)[0] == ABORTED
        own = np.frombuffer((np.ctypeslib.ctypes.c_char * 8).from_address(x), np.int64)
        assert own[0] == 5  # memory stays for as long as somebody holds it


@pytest.mark.processes
def test_processes_share_it_and_miss_who_dies(tmp_path, mock_nccl_library):
    mock_nccl_library()
    ranks = run(tmp_path, "kill", job="symmetric_job.py")
    assert ranks[1][0] == -9
    for code, out, complaints in (ranks[0], ranks[2]):
        assert (code, out) == (0, f"fault {PEER_LOST}\ndone\n"), (ranks, complaints)
