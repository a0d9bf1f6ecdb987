"""Windows and one-sided operations: what they do and refuse, and how they end when a rank does not come."""

import threading

import pytest
import torch

import unicomm
from tests import recorded
from tests.symm.exchanges import shared
from unicomm import symm
from unicomm.comms.memory.window import WindowAccess
from unicomm.comms.operations.table import OPERATIONS
from unicomm.flight_recorder.analysis.analyze import analyze
from unicomm.flight_recorder.recording import writer
from unicomm.flight_recorder.table.load import load
from unicomm.testing import run_ranks

F = torch.float32


def test_put_get_and_signals():
    def program(comm):
        symm.init(comm)
        n, me = comm.get_size(), comm.get_rank()
        after, before = (me + 1) % n, (me - 1) % n
        room = shared(comm, torch.zeros(8))
        window = comm.new_window(room)
        assert window.get_size() == 32
        assert window.get_tensor() is room
        for step in range(20):
            # Signals count: nobody who signals waits, and data come before their signal.
            window.put(torch.tensor([step, me], dtype=F), after, 3, False)
            window.signal(after, False)
            window.wait_signal(before, False)
            assert room.tolist() == [0, 0, 0, step, before, 0, 0, 0]
            window.signal(before, False)
            window.wait_signal(after, False)
        got = torch.zeros(2)
        assert window.get(got, after, 3, False).seq == 0
        assert got.tolist() == [19, me]
        assert window.map_remote_tensor(after)[3:5].tolist() == [19, me]
        assert window.get_attr(after).access_type is WindowAccess.UNIFIED
        window.tensor_deregister()
        with pytest.raises(unicomm.NotReadyError, match="no tensor"):
            window.put(got, after, 0, False)
        window.tensor_register(room[4:])
        window.put(torch.ones(1), after, 0, False)
        window.barrier()
        assert room[4] == 1
        window.free()
        with pytest.raises(unicomm.NotReadyError, match="was freed"):
            window.signal(after, False)

    run_ranks(program, 3)


def test_asynchronous_operations_keep_their_order():
    def program(comm):
        symm.init(comm)
        other = 1 - comm.get_rank()
        room = shared(comm, torch.zeros(4))
        window = comm.new_window(room)
        works = []
        for i in range(4):
            works.append(window.put(torch.tensor([i + 1.0]), other, i, True))
            works.append(window.signal(other, True))
        works += [window.wait_signal(other, True) for _ in range(4)]
        for work in works:
            work.wait()
        assert room.tolist() == [1, 2, 3, 4]
        window.barrier(True).wait()

    run_ranks(program, 2)


def test_atomics():
    def program(comm):
        symm.init(comm)
        n, me = comm.get_size(), comm.get_rank()
        window = comm.new_window(shared(comm, torch.zeros(4, dtype=torch.int64)))
        seen = [window.fetch_add(0, 1, -1) for _ in range(50)]
        won = window.compare_swap(n - 1, 2, 0, me + 1) == 0
        window.barrier()
        assert window.map_remote_tensor(0)[1] == -50 * n
        owner = int(window.map_remote_tensor(n - 1)[2])
        assert won == (owner == me + 1)
        with pytest.raises(unicomm.InvalidArgumentError, match="element 4 of a window of 4"):
            window.fetch_add(0, 4, 1)
        return seen

    seen = run_ranks(program, 3)
    assert sorted(value for values in seen for value in values) == list(
        range(-149, 1)
    )  # each value was seen once


@pytest.mark.parametrize("shift", [1, 1024, -1, -1024])
@pytest.mark.parametrize("count", [1 << 10, 4 << 20])
def test_parts_of_the_own_tensor_that_overlap(shift, count):
    """Large ones are stored past the caches, if all ranks move as much."""

    def program(comm):
        symm.init(comm)
        me, window = comm.get_rank(), comm.new_window(symm.empty(count, dtype=torch.int64, comm=comm))
        x, there, here = window.get_tensor(), max(shift, 0), max(-shift, 0)
        length = count - abs(shift)
        for move in ("put", "get"):
            x.copy_(torch.arange(count))
            wanted = x.clone()
            wanted[there : there + length] = x[here : here + length].clone()
            if move == "put":
                window.put(x[here : here + length], me, there, False)
            else:
                window.get(x[there : there + length], me, here, False)
            assert torch.equal(x, wanted), move
        comm.barrier(False)

    run_ranks(program, 2)


def test_put_and_signal_on_a_symmetric_tensor():
    def program(comm):
        symm.init(comm)
        me, other = comm.get_rank(), 1 - comm.get_rank()
        x, pad = shared(comm, torch.full((6,), me + 1.0)), shared(comm, torch.zeros(2, dtype=torch.int64))
        symm.put_signal(x[2 * me : 2 * me + 2], pad[1], 7, other, comm)  # a view goes to where it is
        symm.wait_signal(pad[1], 7, other, comm)
        assert x.tolist() == [1, 1, 2, 2, me + 1, me + 1]
        comm.barrier(False)
        symm.get(x[4 + me : 5 + me], other, comm)
        assert x[4 + me] == other + 1
        comm.barrier(False)
        x[5 - me] = 10 + me
        comm.barrier(False)
        symm.put(x[5 - me : 6 - me], other, comm)
        handle = symm.rendezvous(x, comm)
        assert handle.get_buffer(other, (2, 2), F, 1).shape == (2, 2)
        with pytest.raises(unicomm.InvalidArgumentError, match="bytes 4 to 28 of a buffer of 24"):
            handle.get_buffer(other, (6,), F, 1)
        handle.put_signal(other)
        handle.wait_signal(other)
        handle.barrier()
        assert x[4:].tolist() == [11, 10]
        handle.free()

    run_ranks(program, 2)


def test_what_is_refused():
    def program(comm):
        with pytest.raises(unicomm.InvalidArgumentError, match="does not have yet"):
            comm.new_window(torch.ones(3))
        symm.init(comm)
        room = shared(comm, torch.zeros(8))
        with pytest.raises(unicomm.InvalidArgumentError, match="not in the symmetric memory"):
            comm.new_window(torch.ones(3))
        with pytest.raises(unicomm.UnsupportedError, match="takes no hints"):
            comm.new_window(room, hints={"a": "b"})
        window = comm.new_window(room)
        two = torch.ones(2)
        cases = [
            ("dst_rank must be in range", lambda: window.put(two, 1, 0, False)),
            ("elements 7 to 9 of a window of 8", lambda: window.put(two, 0, 7, False)),
            ("elements 8 to 10", lambda: window.get(two, 0, 8, False)),
            ("offset -1 is negative", lambda: window.put(two, 0, -1, False)),
            ("is no whole number", lambda: window.put(two, 0, 1.5, False)),
            ("is of torch.float64, not torch.float32", lambda: window.put(two.double(), 0, 0, False)),
            ("is on meta", lambda: window.put(two.to("meta"), 0, 0, False)),
            ("not contiguous", lambda: window.get(torch.ones(4)[::2], 0, 0, False)),
            ("atomics need int64", lambda: window.fetch_add(0, 0, 1)),
            ("peer_rank must be", lambda: window.signal(-1, False)),
            ("registered already", lambda: window.tensor_register(room)),
        ]
        for message, call in cases:
            with pytest.raises(unicomm.InvalidArgumentError, match=message):
                call()
        assert not room.any()

    run_ranks(program, 1)


def test_a_library_that_lacks_something():
    """Refused before any side effect; what can be done without it still works."""

    def program(comm):
        backend = comm.unsafe_backend
        whole = type(backend).symmetric_table(backend)
        some = symm.Capability.HEAP | symm.Capability.PUT_GET
        backend.symmetric_table = lambda *_: whole.limited(int(some))
        symm.init(comm)
        assert symm.capabilities(comm) == some
        x = shared(comm, torch.full((4,), comm.get_rank() + 1, dtype=torch.int64))
        window = comm.new_window(x)
        for lacks, call in [
            ("signal", lambda: window.signal(0, False)),
            ("pointer", lambda: window.map_remote_tensor(0)),
            ("atomics", lambda: window.fetch_add(0, 0, 1)),
            ("signal", lambda: symm.put_signal(x, x[0], 1, 0, comm)),
        ]:
            with pytest.raises(unicomm.UnsupportedError, match=f"'host' lacks: {lacks}"):
                call()
        assert window.get_attr(0).access_type is WindowAccess.SEPARATE
        assert symm.one_shot_all_reduce(x, comm).tolist() == [3] * 4
        symm.two_shot_all_reduce_(x, comm, "max")
        return x.tolist()

    assert run_ranks(program, 2) == [[2] * 4] * 2


def test_a_signal_that_does_not_come():
    def program(comm):
        symm.init(comm)
        window = comm.new_window()
        if comm.get_rank() == 0:
            with pytest.raises(
                unicomm.CommTimeoutError, match=r"rank 1 did not signal within 0\.05 s"
            ) as error:
                window.wait_signal(1, False, timeout=0.05)
            assert (error.value.op, error.value.culprits) == ("wait_signal", (1,))
            with pytest.raises(unicomm.CommTimeoutError, match="broken earlier"):
                comm.barrier(False)
        else:
            # Who waits elsewhere hears of it.
            with pytest.raises(unicomm.CommError):
                comm.barrier(False)

    run_ranks(program, 2)


WAITS = {
    "signal": lambda comm, window: window.wait_signal(0, False),
    "barrier": lambda comm, window: window.barrier(),
    "allocate": lambda comm, window: symm.empty(3, comm=comm),
}


@pytest.mark.parametrize("wait", WAITS)
def test_abort_ends_waits(wait):
    def program(comm):
        symm.init(comm)
        window = comm.new_window()
        comm.barrier(False)
        if comm.get_rank() == 0:
            comm.abort()
            return
        with pytest.raises(unicomm.AbortedError) as error:
            WAITS[wait](comm, window)
        assert error.value.culprits == (0,)

    run_ranks(program, 2)


def test_abort_by_another_thread_of_the_rank():
    def program(comm):
        symm.init(comm)
        window = comm.new_window()
        comm.barrier(False)
        if comm.get_rank() == 0:
            threading.Thread(target=comm.abort).start()
        with pytest.raises(unicomm.AbortedError):
            window.wait_signal(1 - comm.get_rank(), False)

    run_ranks(program, 2)


def test_a_rank_that_left():
    def program(comm):
        symm.init(comm)
        x = symm.empty(4, comm=comm)
        x.fill_(5)
        if comm.get_rank() == 1:
            with pytest.raises(unicomm.PeerLostError, match="rank 0 has finalized") as error:
                symm.broadcast(x, 0, comm)
            assert error.value.culprits == (0,)
        else:
            comm.finalize()
        return x  # readable still

    assert all(x.tolist() == [5] * 4 for x in run_ranks(program, 2))


def test_the_heap():
    """Freed memory is used again, views of others' memory see it, and a full heap is no end."""

    def program(comm):
        symm.init(comm, heap_bytes=1 << 20)
        first = symm.empty(100_000, comm=comm)
        with pytest.raises(unicomm.InvalidArgumentError, match="no room for 800000 bytes"):
            symm.empty(200_000, comm=comm)
        at = first.data_ptr()
        symm.free(first, comm)
        second = symm.empty(200_000, comm=comm)
        assert second.data_ptr() == at
        second.fill_(comm.get_rank())
        symm.free(second, comm)
        third = symm.empty(1000, dtype=torch.int32, comm=comm)
        assert not third.any()  # the pages were given back

    run_ranks(program, 2)


@pytest.mark.usefixtures("fresh_recorder")
def test_records():
    """The flight recorder has the operations with sizes and peers, and hooks see them."""
    names = []

    def program(comm):
        symm.init(comm)
        x = shared(comm, torch.ones(4))
        if comm.get_rank() == 0:
            comm.register_pre_hook(lambda name, op_id, args: names.append((args.name, args.peer)))
        window = comm.new_window(x)
        window.put(torch.ones(2), 1, 0, False)
        window.barrier()
        symm.one_shot_all_reduce(x, comm)
        comm.barrier(False)

    run_ranks(program, 2)
    assert names[-4:] == [("put", 1), ("symm_barrier", -1), ("one_shot_all_reduce", -1), ("barrier", -1)]
    ring = recorded.ring()
    puts = [record for record in ring.records if int(record["op"]) == OPERATIONS["put"].code]
    assert [(int(p["state"]), int(p["peer"]), int(p["seq"])) for p in puts] == [(3, 1, 0)] * 2
    # Their numbers are not those of collectives: the analyzer sees a job in order.
    report = analyze(load([writer.recorder_path()]))
    assert not report.main.culprits, report.main.sentence
