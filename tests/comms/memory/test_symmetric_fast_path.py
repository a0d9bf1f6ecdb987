"""The native fast path of operations on symmetric memory."""

import time

import torch

from tests.comms import inside
from tests.symm.exchanges import check_collectives, check_experts, shared
from unicomm import new_comm, symm
from unicomm.c10d.compat import HashStore
from unicomm.comms.memory.symmetric import NoFastExchange
from unicomm.comms.operations.table import OPERATIONS
from unicomm.testing import run_ranks


def test_ranks_on_different_paths():
    """Hooks keep a rank from the fast path, which must not change what it says to the others."""

    def program(comm):
        symm.init(comm)
        seen = []
        if comm.get_rank() == 1:
            comm.register_pre_hook(lambda name, op_id, args: seen.append(args.name))
        check_experts(comm, 1, [1, 16], seed=3)
        check_collectives(comm, torch.float32, (4, 2), seed=3)
        fast = inside.symmetric_memory(comm).fast
        arguments = [shared(comm, torch.ones(6)), shared(comm, torch.ones(6)), [1, 1, 1], False, None]
        done = fast.all_to_all_v(77, *arguments) if comm.get_rank() != 1 else False
        if comm.get_rank() == 1:
            assert fast.all_to_all_v(77, *arguments) is False
            done = symm.all_to_all_v(*arguments[:3], comm)
        assert done == [1, 1, 1]
        return set(seen)

    seen = run_ranks(program, 3)
    assert {"all_to_all_vdev_2d", "all_to_all_vdev_2d_offset", "all_to_all_vdev"} <= seen[1]


def test_which_calls_the_fast_path_takes():
    """Whole tensors of the communicator's memory, and nothing that is wrong."""

    def program(comm):
        symm.init(comm)
        fast = inside.symmetric_memory(comm).fast
        code = {row.name: row.code for row in OPERATIONS.values()}
        x, out = shared(comm, torch.ones(6, 2)), shared(comm, torch.zeros(6, 2))
        small, plain = torch.empty(3, 2), torch.ones(6, 2)
        assert fast.broadcast(code["symm_broadcast"], x, 0, False, None) is True
        assert fast.all_to_all(code["symm_all_to_all"], x, out, True, None) is True
        assert fast.one_shot(code["one_shot_all_reduce"], x, plain, "max", False, None) is True
        assert fast.two_shot(code["two_shot_all_reduce_"], x, "min", None) is True
        for last in (False, True):
            to = small if not last else torch.empty(6, 1)
            assert fast.reduce_scatter(code["symm_reduce_scatter"], x, to, "sum", last, False, None) is True
        for call in (
            lambda: fast.broadcast(0, plain, 0, False, None),
            lambda: fast.broadcast(0, x, 2, False, None),
            lambda: fast.broadcast(0, x, 0, False, 1.0),
            lambda: fast.all_to_all(0, x, x, False, None),
            lambda: fast.all_to_all(0, x.view(-1)[:5], out.view(-1)[:5], False, None),
            lambda: fast.one_shot(0, x, out[:3], "sum", False, None),
            lambda: fast.one_shot(0, x, plain, "avg", False, None),
            lambda: fast.one_shot(0, x, plain.double(), "sum", False, None),
            lambda: fast.two_shot(0, plain, "sum", None),
            lambda: fast.reduce_scatter(0, x, plain, "sum", False, False, None),
            lambda: fast.reduce_scatter(0, x[:, :1], small, "sum", False, False, None),
        ):
            assert call() is False
        comm.barrier(False)

    run_ranks(program, 2)


def test_atomics():
    """The short and the general way give the same old values, also of negative and of large numbers."""

    def program(comm):
        symm.init(comm)
        for dtype, start in ((torch.int64, -3), (torch.uint64, (1 << 64) - 3)):
            window = comm.new_window(shared(comm, torch.zeros(2, dtype=dtype)))
            calls = []
            memory = inside.symmetric_memory(comm)
            short = memory.fast
            for general in (False, True):
                memory.fast = NoFastExchange() if general else short
                window.barrier()
                if comm.get_rank() == 0:
                    old = [window.compare_swap(1, 1, 0, start), window.fetch_add(1, 1, 5)]
                    old += [
                        window.fetch_add(1, 1, -2),
                        window.compare_swap(1, 1, 0, 0),
                        window.fetch_add(1, 1, 0),
                    ]
                    calls.append(old)
                    window.put(torch.zeros(2, dtype=dtype), 1, 0)
                window.barrier()
            if comm.get_rank() == 0:
                assert calls[0] == calls[1] == [0, start, 2, 0, 0]
            memory.fast = short
            window.barrier()

    run_ranks(program, 2)


def test_which_atomics_the_fast_path_takes():
    def program(comm):
        symm.init(comm)
        words = shared(comm, torch.zeros(2, dtype=torch.int64))
        fast, code = inside.symmetric_memory(comm).fast, OPERATIONS["fetch_add"].code
        place = (words.data_ptr(), 2, 10)
        comm.barrier()
        assert fast.atomic(code, False, comm.get_rank(), 1, 7, None, None, *place) == 0
        assert fast.atomic(code, True, comm.get_rank(), 1, 7, 9, None, *place) == 7
        assert words.tolist() == [0, 9]
        for refused in (
            (False, 2, 0, 1, None, None),
            (False, 0, 2, 1, None, None),
            (False, 0, -1, 1, None, None),
            (False, 0, 0, 1.5, None, None),
            (False, 0, 0, True, None, None),
            (False, 0, 0, 1 << 64, None, None),
            (True, 0, 0, 1, "2", None),
            (True, 0, 0, 1, None, None),
            (False, 0, 0, 1, None, 3.0),
        ):
            assert fast.atomic(code, *refused, *place) is False
        assert (
            fast.atomic(code, False, 0, 0, 1, None, None, words.data_ptr(), 2, 3) is False
        )  # of another type
        handle = comm.register_pre_hook(lambda *_: None)
        assert fast.atomic(code, False, 0, 0, 1, None, None, *place) is False
        handle.remove()
        comm.barrier()

    run_ranks(program, 2)


def test_an_atomic_takes_about_as_long_as_a_put():
    """Thirteen times as long before it had a short way; the fastest of many turns of each, in turns."""
    comm = new_comm("shm", "cpu", name="a", store=HashStore(), rank=0, size=1)
    symm.init(comm)
    window = comm.new_window(shared(comm, torch.zeros(8, dtype=torch.int64)))
    one = torch.ones(1, dtype=torch.int64)
    times = {"put": [], "fetch_add": [], "compare_swap": []}
    calls = {
        "put": lambda: window.put(one, 0, 0),
        "fetch_add": lambda: window.fetch_add(0, 0, 1),
        "compare_swap": lambda: window.compare_swap(0, 0, 1, 1),
    }
    for _ in range(200):
        for name, call in calls.items():
            begin = time.perf_counter_ns()
            for _ in range(5):
                call()
            times[name].append(time.perf_counter_ns() - begin)
    fastest = {name: min(of) for name, of in times.items()}
    assert fastest["fetch_add"] < 4 * fastest["put"], fastest
    assert fastest["compare_swap"] < 4 * fastest["put"], fastest
    comm.finalize()
