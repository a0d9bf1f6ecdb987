"""The composites in the native core: beside Gloo, by chance, by both paths, and over a smaller library."""

import threading

import numpy as np
import pytest
import torch
from exchanges import FILL, check_collectives, check_experts, shared
from gloo_exchanges import check_against_gloo
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from matrices import check_tiles
from reference import combine, dispatch
from torch._C._distributed_c10d import HashStore

import unicomm
from unicomm import symm
from unicomm.comms.operations.table import OPERATIONS
from unicomm.flight_recorder.recording import writer
from unicomm.flight_recorder.ring.reader import read_ring
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
        backend = comm._engine.backend
        whole = type(backend).symmetric_table(backend)
        backend.symmetric_table = lambda *_: whole.limited(
            int(symm.Capability.HEAP | symm.Capability.PUT_GET)
        )
        symm.init(comm)
        check_experts(comm, 2, [8], seed=n)
        check_collectives(comm, torch.bfloat16, (5, 3), seed=n)
        check_tiles(comm, torch.float32, seed=n)

    run_ranks(program, n)


def test_ranks_on_different_paths():
    """Hooks keep a rank from the fast path, which must not change what it says to the others."""

    def program(comm):
        symm.init(comm)
        seen = []
        if comm.get_rank() == 1:
            comm.register_pre_hook(lambda name, op_id, args: seen.append(args.name))
        check_experts(comm, 1, [1, 16], seed=3)
        check_collectives(comm, torch.float32, (4, 2), seed=3)
        fast = comm._engine.symmetric.fast
        arguments = [shared(comm, torch.ones(6)), shared(comm, torch.ones(6)), [1, 1, 1], False, None]
        done = fast.all_to_all_v(77, *arguments) if comm.get_rank() != 1 else False
        if comm.get_rank() == 1:
            assert fast.all_to_all_v(77, *arguments) is False
            done = symm.all_to_all_v(*arguments[:3], comm)
        assert done == [1, 1, 1]
        return set(seen)

    seen = run_ranks(program, 3)
    assert {"all_to_all_vdev_2d", "all_to_all_vdev_2d_offset", "all_to_all_vdev"} <= seen[1]


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
    ring = read_ring(writer._recorder.path)
    fields = ("op", "state", "error", "in_numel", "out_numel", "n_in", "n_out", "peer", "seq", "in_dtype")
    exchanges = [op.code for op in OPERATIONS.values() if op.name in RECORDED]
    told = [tuple(int(r[f]) for f in fields) for r in ring.records if int(r["op"]) in exchanges]
    assert len(told) == 2 * 2 * 9
    assert len(set(told)) == 9


def test_which_calls_the_fast_path_takes():
    """Whole tensors of the communicator's memory, and nothing that is wrong."""

    def program(comm):
        symm.init(comm)
        fast = comm._engine.symmetric.fast
        code = {name: OPERATIONS[name].code for name in RECORDED}
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
