"""Every composite on symmetric memory against numpy."""

import pytest
import torch

import unicomm
from tests.symm.exchanges import check_collectives, check_experts, shared
from unicomm import symm
from unicomm.testing import run_ranks


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("experts", [1, 3])
def test_dispatch_and_combine(n, experts):
    def program(comm):
        symm.init(comm)
        check_experts(comm, experts, [1, 8, 16, 128], seed=n * 10 + experts)

    run_ranks(program, n)


def test_more_experts_than_upstream_takes():
    def program(comm):
        symm.init(comm)
        check_experts(comm, 40, [16], seed=1, width=1, dtype=torch.bfloat16)

    run_ranks(program, 2)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_collectives(n, dtype):
    def program(comm):
        symm.init(comm)
        check_collectives(comm, dtype, (5, 3), seed=n)

    run_ranks(program, n)


def test_the_example_of_the_definition():
    """Two ranks, two experts each: worked out by hand."""

    def program(comm):
        symm.init(comm)
        splits = shared(comm, [[5, 3, 2, 4], [7, 1, 0, 6]][comm.get_rank()])
        x, out = shared(comm, torch.zeros(14)), shared(comm, torch.zeros(40))
        there = symm.empty(2, 4, dtype=torch.int64, comm=comm)
        results = []
        for align in (16, None):
            symm.all_to_all_vdev_2d(x, out, splits, there, comm, align)
            results.append(there.tolist())
        splits.zero_()
        symm.all_to_all_vdev_2d(x, out, splits, there, comm)
        return [*results, there[1].tolist()]

    assert run_ranks(program, 2) == [
        [[[5, 7, 3, 1], [0, 5, 16, 19]], [[5, 7, 3, 1], [0, 5, 12, 15]], [0, 0, 1, 1]],
        [[[2, 0, 4, 6], [0, 2, 16, 20]], [[2, 0, 4, 6], [0, 2, 2, 6]], [0, 0, 1, 1]],
    ]


def test_an_output_that_is_too_small():
    """The same error on all ranks, nothing written, and the communicator goes on."""

    def program(comm):
        symm.init(comm)
        n, me = comm.get_size(), comm.get_rank()
        x, out = shared(comm, torch.ones(6)), shared(comm, torch.zeros(6))
        there = shared(comm, torch.full((2, n), -1))
        splits = shared(comm, [0, 3, 1])  # rank 1 gets 9 rows
        for call in (
            lambda: symm.all_to_all_vdev(x, out, splits, there, comm),
            lambda: symm.all_to_all_vdev_2d(x, out, splits, there, comm),
            lambda: symm.all_to_all_v(x, out, [0, 3, 1], comm, relaxed=True),
        ):
            with pytest.raises(
                unicomm.InvalidArgumentError, match="rank 1 would receive into row 9"
            ) as error:
                call()
            assert error.value.culprits == (1,)
        assert not out.any()
        assert (there == -1).all()
        assert symm.all_to_all_v(x, out, [1, 1, 1], comm) == [1, 1, 1]
        return me

    assert run_ranks(program, 3) == [0, 1, 2]


def test_ranks_that_do_not_agree():
    def program(comm):
        symm.init(comm)
        me = comm.get_rank()
        a, b = shared(comm, torch.ones(4)), shared(comm, torch.ones(4))
        with pytest.raises(unicomm.MismatchError) as error:
            symm.one_shot_all_reduce(b if me == 2 else a, comm)
        assert error.value.culprits == (2,)
        with pytest.raises(unicomm.MismatchError):
            symm.broadcast(a, me, comm)
        with pytest.raises(unicomm.MismatchError, match="allocate 4 bytes; rank 1: allocate 8 bytes"):
            symm.empty(1 + (me == 1), comm=comm)
        assert symm.one_shot_all_reduce(a, comm).tolist() == [3] * 4

    run_ranks(program, 3)


def test_ranks_in_different_operations():
    """All hear of it, whatever they called, and all go on in step."""

    def program(comm):
        symm.init(comm)
        a = shared(comm, torch.ones(4))
        window = comm.new_window(a)
        calls = [
            lambda: symm.one_shot_all_reduce(a, comm),
            window.barrier,
            lambda: symm.empty(4, comm=comm),
            lambda: symm.broadcast(a, 0, comm),
            lambda: symm.free(a, comm),
        ]
        for shift in range(1, len(calls)):
            for i in range(len(calls)):
                with pytest.raises(unicomm.MismatchError):
                    calls[(i + shift * comm.get_rank()) % len(calls)]()
                assert symm.one_shot_all_reduce(a, comm).tolist() == [2] * 4
        window.barrier()

    run_ranks(program, 2)


def test_bad_arguments():
    """Refused on this rank before anything happens."""

    def program(comm):
        plain = torch.ones(4)
        with pytest.raises(unicomm.NotReadyError, match="no symmetric memory yet"):
            symm.empty(3, comm=comm)
        symm.init(comm)
        symm.init(comm)
        x, out, splits = shared(comm, plain), shared(comm, plain), shared(comm, [1])
        there = symm.empty(2, 1, dtype=torch.int64, comm=comm)
        half = shared(comm, torch.ones(4, dtype=torch.float16))
        waves = shared(comm, torch.ones(4, dtype=torch.complex64))
        nine, other = shared(comm, [9]), shared(comm, [[1]])
        cases = [
            ("not in the symmetric memory", lambda: symm.broadcast(plain, 0, comm)),
            ("root must be in range", lambda: symm.broadcast(x, 1, comm)),
            ("is unknown", lambda: symm.one_shot_all_reduce(x, comm, "mean")),
            ("input is of torch.float32, out of torch.float16", lambda: symm.all_to_all(x, half, comm)),
            ("share memory", lambda: symm.all_to_all(x, x, comm)),
            ("input has 4 elements, out 2", lambda: symm.all_to_all(x, out[:2], comm)),
            ("is not contiguous", lambda: symm.broadcast(x[::2], 0, comm)),
            ("in_splits=[5] for 1 ranks and 4 rows", lambda: symm.all_to_all_v(x, out, [5], comm)),
            ("pass whole", lambda: symm.all_to_all_v(x, out, ["a"], comm)),
            ("goes beyond", lambda: symm.all_to_all_vdev(x, out, nine, there, comm)),
            ("major_align=0", lambda: symm.all_to_all_vdev_2d(x, out, splits, there, comm, 0)),
            ("splits_offsets is", lambda: symm.all_to_all_vdev_2d_offset(x, out, splits, there, comm)),
            ("make it (2, 1)", lambda: symm.all_to_all_vdev(x, out, splits, other, comm)),
            ("not torch.int64", lambda: symm.all_to_all_vdev(x, out, half, there, comm)),
            ("at least one element", lambda: symm.empty(0, comm=comm)),
            ("does not begin an allocation", lambda: symm.free(x[1:], comm)),
        ]
        for message, call in cases:
            with pytest.raises(unicomm.InvalidArgumentError) as error:
                call()
            assert message in str(error.value)
            assert error.value.hint
        with pytest.raises(unicomm.UnsupportedError, match="is not defined"):
            symm.one_shot_all_reduce(waves, comm, "max")
        symm.free(x, comm)
        with pytest.raises(unicomm.InvalidArgumentError, match="or was freed"):
            symm.broadcast(x, 0, comm)

    run_ranks(program, 1)
