"""The composites in the native core: beside Gloo, by chance, by both paths, and over a smaller library."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore

import unicomm
from tests import recorded
from tests.symm.exchanges import FILL, check_collectives, check_experts, shared
from tests.symm.gloo_exchanges import check_against_gloo
from tests.symm.matrices import check_tiles
from tests.symm.reference import combine, dispatch
from unicomm import symm
from unicomm.comms.operations.table import OPERATIONS
from unicomm.testing import run_ranks

RECORDED = [
    "all_to_all_vdev",
    "symm_all_to_all_v",
    "symm_broadcast",
    "symm_all_to_all",
    "one_shot_all_reduce",
    "two_shot_all_reduce_",
    "symm_reduce_scatter",
]


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_beside_gloo(n):
    store = HashStore()

    def program(comm):
        symm.init(comm)
        with unicomm.new_comm("gloo", "cpu", name="gloo", store=store, rank=comm.get_rank(), size=n) as gloo:
            check_against_gloo(comm, gloo, seed=n)

    run_ranks(program, n, timeout=60)


def test_eight_ranks():
    def program(comm):
        symm.init(comm)
        check_experts(comm, 2, [8, 128], seed=8, width=1)
        check_collectives(comm, torch.float32, (3, 2), seed=8)

    run_ranks(program, 8, timeout=60)


@st.composite
def exchanges(draw):
    n, experts = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    row = st.lists(st.integers(0, 9) | st.just(0), min_size=n * experts, max_size=n * experts)
    plan = draw(st.lists(row, min_size=n, max_size=n))
    return plan, draw(st.sampled_from([1, 2, 3, 8, 16, 128])), draw(st.integers(1, 5)), draw(st.booleans())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(exchanges())
def test_any_exchange(exchange):
    """With an out of just the size that is needed: one row less is refused."""
    plan, align, width, relaxed = exchange
    n, k = len(plan), len(plan[0])
    splits = np.array(plan, np.int64)
    most = max(int(splits.sum(1).max()), 1)
    data = np.arange(n * most * width, dtype=np.float32).reshape(n, most, width)
    capacity = int(splits.sum()) + align * k
    outs = np.full((n, capacity, width), FILL, np.float32)
    wanted = dispatch(data, plan, outs, align)
    filled = [int((w[0] > 0).any() and (w.sum(0) * (w[0] > 0)).max()) for w in wanted]
    need = max(*filled, 1)
    backs = np.full((n, most, width), FILL, np.float32)
    wanted_back = combine(outs, wanted, backs)

    def program(comm):
        me = comm.get_rank()
        symm.init(comm)
        x, s = shared(comm, data[me]), shared(comm, splits[me])
        sent, back = (
            shared(comm, np.full((need, width), FILL, np.float32)),
            shared(comm, backs[me] * 0 + FILL),
        )
        there, again = shared(comm, np.zeros((2, k), np.int64)), shared(comm, np.zeros((2, k), np.int64))
        if need > 1:
            with pytest.raises(
                unicomm.InvalidArgumentError, match=f"into row {need} of an out of {need - 1}"
            ):
                symm.all_to_all_vdev_2d(x, sent[:-1], s, there, comm, align, relaxed=relaxed)
            assert not there.any()
        symm.all_to_all_vdev_2d(x, sent, s, there, comm, align, relaxed=relaxed)
        assert (there.numpy() == wanted[me]).all()
        assert (sent.numpy() == outs[me][:need]).all()
        symm.all_to_all_vdev_2d_offset(sent, back, there, again, comm, relaxed=relaxed)
        assert (again.numpy() == wanted_back[me]).all()
        assert (back.numpy() == backs[me]).all()
        comm.barrier(False)  # before it is unmapped under a rank that reads

    run_ranks(program, n)


@pytest.mark.parametrize("n", [2, 3])
def test_without_pointers(n):
    """A library that can put and get only: what others say and have is fetched."""

    def program(comm):
        backend = comm.unsafe_backend
        whole = type(backend).symmetric_table(backend)
        backend.symmetric_table = lambda *_: whole.limited(
            int(symm.Capability.HEAP | symm.Capability.PUT_GET)
        )
        symm.init(comm)
        check_experts(comm, 2, [8], seed=n)
        check_collectives(comm, torch.bfloat16, (5, 3), seed=n)
        check_tiles(comm, torch.float32, seed=n)

    run_ranks(program, n)


def test_splits_that_cannot_be():
    """One rank's mistake is the same error on all, with nothing written, and all go on."""

    def program(comm):
        symm.init(comm)
        n, me = comm.get_size(), comm.get_rank()
        x, out = shared(comm, torch.ones(6)), shared(comm, torch.zeros(60))
        there, again = (
            shared(comm, torch.full((2, n), -1)),
            shared(comm, torch.zeros(2, n, dtype=torch.int64)),
        )
        for numbers in ([3, 3, 1], [-1, 3, 3], [1 << 62, 1 << 62, 1 << 62]):
            splits = shared(comm, numbers if me == 2 else [1, 1, 1])
            with pytest.raises(
                unicomm.InvalidArgumentError, match="in_splits of rank 2 goes beyond the 6 rows"
            ) as error:
                symm.all_to_all_vdev(x, out, splits, there, comm, relaxed=True)
            assert error.value.culprits == (2,)
            assert error.value.op == "all_to_all_vdev"
        for offsets in ([0, 2, 5], [-1, 2, 4], [0, 2, 1 << 62]):
            splits = shared(comm, [[2, 2, 2], offsets if me == 1 else [0, 2, 4]])
            with pytest.raises(unicomm.InvalidArgumentError, match="in_splits_offsets of rank 1 goes beyond"):
                symm.all_to_all_vdev_2d_offset(x, out, splits, again, comm)
        assert not out.any()
        assert (there == -1).all()
        splits = shared(comm, [[2, 0, 2], [0, -99, 4]])  # the offset of nothing may be anywhere
        symm.all_to_all_vdev_2d_offset(x, out, splits, again, comm)
        assert int(out.sum()) == 0 if me == 1 else 6

    run_ranks(program, 3)


def test_nothing_at_all():
    """No rows on any rank."""

    def program(comm):
        symm.init(comm)
        n = comm.get_size()
        x, out = shared(comm, torch.ones(4, 2)), shared(comm, torch.zeros(4, 2))
        assert symm.all_to_all_v(x[:0], out[:0], [0] * n, comm) == [0] * n
        assert symm.all_to_all_v(x[:0], out, [0] * n, comm) == [0] * n
        assert symm.one_shot_all_reduce(x[:0], comm).shape == (0, 2)
        for call in (symm.two_shot_all_reduce_, lambda t, c: symm.broadcast(t, 0, c)):
            assert call(x[:0], comm).numel() == 0
        assert symm.all_to_all(x[:0], out[:0], comm).numel() == 0
        assert not out.any()

    run_ranks(program, 2)


def test_more_than_the_caches_hold():
    """Large exchanges write past the caches; ends of rows lie anywhere."""
    rows, width = 70_001, 33  # 9 MB a rank, with lines of the caches shared between the parts

    def program(comm):
        symm.init(comm)
        me = comm.get_rank()
        x = shared(comm, torch.arange(rows * width, dtype=torch.float32).view(rows, width) + me)
        out = shared(comm, torch.zeros(2 * rows, width))
        first = 30_000 + me
        came = symm.all_to_all_v(x, out, [first, rows - first], comm)
        begin = [0, 0] if me == 0 else [30_000, 30_001]
        for p in range(2):
            at = sum(came[:p])
            wanted = torch.arange(begin[p] * width, (begin[p] + came[p]) * width, dtype=torch.float32) + p
            assert torch.equal(out[at : at + came[p]].view(-1), wanted)
        assert not out[sum(came) :].any()

    run_ranks(program, 2)


@pytest.mark.usefixtures("fresh_recorder")
def test_records_of_the_fast_path():
    """They are those of the general path: sizes, file and line, and what failed."""

    def program(comm):
        symm.init(comm)
        n = comm.get_size()
        x, out = shared(comm, torch.ones(6, 2)), shared(comm, torch.zeros(6, 2))
        splits, there = shared(comm, [1] * n), symm.empty(2, n, dtype=torch.int64, comm=comm)
        hook = None
        for _ in range(2):
            symm.all_to_all_vdev(x, out, splits, there, comm)
            with pytest.raises(unicomm.InvalidArgumentError):
                symm.all_to_all_vdev(x, out[:1], splits, there, comm)
            assert symm.all_to_all_v(x, out, [1] * n, comm) == [1] * n
            symm.broadcast(x, 1, comm)
            symm.all_to_all(x, out, comm)
            symm.one_shot_all_reduce(x, comm, out=out)
            symm.two_shot_all_reduce_(x, comm)
            symm.reduce_scatter(x, torch.empty(3, 2), comm)
            with pytest.raises(unicomm.MismatchError, match="broadcast of root 1"):
                symm.broadcast(x, comm.get_rank(), comm)
            comm.barrier(False)
            hook = comm.register_pre_hook(lambda *_: None)  # the second time by the general path
        assert hook is not None

    run_ranks(program, 2)
    ring = recorded.ring()
    fields = ("op", "state", "error", "in_numel", "out_numel", "n_in", "n_out", "peer", "seq", "in_dtype")
    exchanges = [op.code for op in OPERATIONS.values() if op.name in RECORDED]
    told = [tuple(int(r[f]) for f in fields) for r in ring.records if int(r["op"]) in exchanges]
    assert len(told) == 2 * 2 * 9
    assert len(set(told)) == 9


def test_threads_of_a_rank():
    """Their operations run one at a time, by whatever path; which thread's comes first does not matter."""

    def program(comm):
        symm.init(comm)
        n, me = comm.get_size(), comm.get_rank()
        x, out = shared(comm, torch.full((n,), me)), shared(comm, torch.zeros(n, dtype=torch.int64))
        errors = []

        def work():
            try:
                for _ in range(100):
                    assert symm.all_to_all_v(x, out, [1] * n, comm) == [1] * n
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert out.tolist() == list(range(n))

    run_ranks(program, 2)


@pytest.mark.parametrize("name", ["all_to_all_v", "all_to_all_vdev_2d"])
def test_ranks_that_see_other_rows_in_memory_of_one_size(name):
    """4 rows of 2 on rank 0, 8 of 1 on rank 1: with splits that fit both, nothing else would tell."""

    def program(comm):
        symm.init(comm)
        me = comm.get_rank()
        memory = [symm.empty(8, dtype=torch.float32, comm=comm) for _ in range(2)]
        sent, out = (m.view(4, 2) if me == 0 else m.view(8, 1) for m in memory)
        splits = symm.empty(2, dtype=torch.int64, comm=comm)
        splits.fill_(1 + me)
        there = symm.empty(2, 2, dtype=torch.int64, comm=comm)
        calls = {
            "all_to_all_v": lambda: symm.all_to_all_v(sent, out, [1 + me] * 2, comm),
            "all_to_all_vdev_2d": lambda: symm.all_to_all_vdev_2d(sent, out, splits, there, comm),
        }
        with pytest.raises(unicomm.MismatchError):
            calls[name]()

    run_ranks(program, 2)
