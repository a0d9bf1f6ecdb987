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
