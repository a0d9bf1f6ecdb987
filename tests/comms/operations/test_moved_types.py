"""Element types that can be moved and not reduced, such as those of microscaling formats."""

import pytest
import torch

from unicomm import MismatchError, ReduceOp, UnsupportedError
from unicomm.testing import run_ranks

NAMES = ("float8_e8m0fnu", "float4_e2m1fn_x2", "float8_e4m3fnuz", "float8_e5m2fnuz")
TYPES = [getattr(torch, name) for name in NAMES if hasattr(torch, name)]


def values(dtype, n=4):
    return torch.arange(n, dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_they_move(dtype):
    def program(comm):
        x = values(dtype) if comm.get_rank() == 0 else torch.zeros(4, dtype=torch.uint8).view(dtype)
        comm.broadcast(x, 0, async_op=False)
        assert x.view(torch.uint8).tolist() == [0, 1, 2, 3]
        with pytest.raises((UnsupportedError, ValueError), match="moved but not reduced"):
            comm.all_reduce(x, ReduceOp.SUM, async_op=False)

    run_ranks(program, 2)


@pytest.mark.parametrize("other", [t for t in (*TYPES, torch.uint8) if t is not TYPES[0]], ids=str)
def test_a_mismatch_between_them_is_found(other):
    def program(comm):
        dtype = (TYPES[0], other)[comm.get_rank()]
        with pytest.raises(MismatchError) as raised:
            comm.broadcast(values(dtype), 0, async_op=False)
        for name in (TYPES[0], other):
            assert str(name).removeprefix("torch.") in str(raised.value)

    run_ranks(program, 2)


@pytest.mark.parametrize("other", [torch.bits16, torch.quint8], ids=str)
def test_types_without_a_number_of_their_own_are_compared_too(other):
    """Their elements have different sizes, by which each rank would cut the data."""

    def program(comm):
        dtype = (torch.complex32, other)[comm.get_rank()]
        x = torch.ones(20 * dtype.itemsize, dtype=torch.uint8)
        with pytest.raises(MismatchError, match="other type #") as raised:
            comm.broadcast(x.view(dtype), 0, async_op=False)
        assert raised.value.culprits == (0, 1)
        assert x.tolist() == [1] * len(x)

    run_ranks(program, 2)


def test_parts_of_types_that_dlpack_lacks():
    def program(comm):
        me = comm.get_rank()
        send, take = (([1, 3], [1, 1]), ([1, 1], [3, 1]))[me]
        x = (torch.arange(sum(send) * 4, dtype=torch.int16) + 100 * me).view(-1, 4)
        y = torch.zeros(sum(take), 4, dtype=torch.int16)
        comm.all_to_all_v_single(y.view(torch.bits16), x.view(torch.bits16), take, send, async_op=False)
        rows = [[4 * k + c for c in range(4)] for k in range(4)]
        theirs = [[100 + n for n in row] for row in rows]
        assert y.tolist() == ([rows[0], theirs[0]], [*rows[1:], theirs[1]])[me]

    run_ranks(program, 2)
