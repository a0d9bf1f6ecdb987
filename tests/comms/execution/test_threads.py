"""Several threads of a rank on one communicator, and on several."""

from __future__ import annotations

import pytest
import torch

from tests.comms import inside
from tests.comms.calls import check_sum
from tests.threads import results
from unicomm import Communicator, ReduceOp
from unicomm.testing import run_ranks

SUM = ReduceOp.SUM


@pytest.mark.parametrize("backend", ["shm", "gloo", "tcp"])
@pytest.mark.parametrize("way", ["direct", "general", "async", "mixed"])
def test_numbers_follow_the_order(backend, way):
    """Whichever threads meet: operation number s of one rank is operation number s of the others."""
    threads, each = 4, 150 if backend == "shm" else 25

    def program(comm: Communicator) -> dict[int, list[int]]:
        me, n = comm.get_rank(), comm.get_size()
        met: dict[int, list[int]] = {}

        def job(thread: int) -> None:
            for i in range(each):
                own = me * 10000 + thread * 1000 + i
                out, x = torch.zeros(n, dtype=torch.int64), torch.tensor([own])
                kind = ["direct", "general", "async"][(thread + i) % 3] if way == "mixed" else way
                timeout = None if kind == "direct" else 50
                work = comm.all_gather_single(out, x, kind == "async", timeout=timeout)
                work.wait()
                assert out[me] == own
                met[work.seq] = out.tolist()

        results([lambda t=t: job(t) for t in range(threads)])
        assert sorted(met) == list(range(1, threads * each + 1))
        assert check_sum(comm).seq == threads * each + 1
        return met

    first, *others = run_ranks(program, 3, backend=backend, timeout=60)
    assert all(met == first for met in others)


def test_communicators_in_parallel():
    """Each thread has a communicator of its own; one rank's slow thread holds up no other."""

    def program(comm: Communicator) -> None:
        children = [comm.split([0, 1, 2], f"child{i}") for i in range(3)]

        def job(child: Communicator | None) -> None:
            assert child is not None
            for i in range(100):
                x = torch.full((100,), float(i))
                child.all_reduce(x, SUM, i % 3 == 0).wait()
                assert bool((x == 3 * i).all())
            child.finalize()

        results([lambda c=c: job(c) for c in children])

    run_ranks(program, 3, timeout=60)


def test_hooks_come_and_go_in_all_threads():
    """However they interleave: afterwards none is left, and the direct way is open."""

    def program(comm: Communicator) -> None:
        def job() -> None:
            for _ in range(300):
                with comm.register_pre_hook(lambda *_: None), comm.register_post_hook(lambda *_: None):
                    pass

        results([job] * 4)
        assert not inside.engine(comm).hooks.active
        assert inside.fast_path(comm).barrier(False, None, None).seq == 1
        called: list[int] = []
        with comm.register_pre_hook(lambda name, op_id, args: called.append(args.seq)):
            assert inside.fast_path(comm).barrier(False, None, None) is False
            comm.barrier(False)
        assert called == [2]

    run_ranks(program, 1)


def test_finalize_in_one_thread_only():
    """Threads that lose the race get the error for a finalized communicator, or nothing."""

    def program(comm: Communicator) -> None:
        results([comm.finalize] * 4)
        assert "finalized" in repr(comm)

    for _ in range(10):
        run_ranks(program, 2)
