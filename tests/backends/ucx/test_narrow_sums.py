"""Small reductions of narrow floats on several hosts.

As on one host, values are reduced in the order of ranks, and the result is rounded once.
"""

import pytest
import torch

import unicomm
from tests.ucx_here import needs_ucx
from unicomm import _core
from unicomm.testing import run_ranks

pytestmark = needs_ucx
OPS = [unicomm.ReduceOp.SUM, unicomm.ReduceOp.AVG, unicomm.ReduceOp.PRODUCT]
DTYPES = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]


def values(rank, count, dtype):
    """Values whose sums have to be rounded. In the first half, the sum of one host alone may overflow."""
    x = torch.rand(count, generator=torch.Generator().manual_seed(rank)) + 0.5
    x[: count // 2] *= torch.finfo(dtype).max / 2 * (-1) ** rank
    return x.to(dtype)


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize(
    ("layout", "count"),
    [("a,a,b,b", 1), ("a,a,b,b", 16_384), ("a,b,b,c,a", 999), ("b,a,a,a", 4097), ("a,b,a,b", 16_384)],
)
def test_as_on_one_host(layout, count, async_op):
    size = layout.count(",") + 1

    def expected(dtype, op, count):
        total = torch.empty(count, dtype=dtype)
        _core.fold(total, [values(r, count, dtype) for r in range(size)], op.code, None, size)
        return total.view(torch.uint8)

    def program(comm):
        me = comm.get_rank()
        for dtype in DTYPES:
            for op in OPS:
                x = values(me, count, dtype)
                comm.all_reduce(x, op, async_op).wait()
                assert torch.equal(x.view(torch.uint8), expected(dtype, op, count))
                part = torch.empty(count, dtype=dtype)
                comm.reduce_scatter_single(part, values(me, size * count, dtype), op, async_op).wait()
                parts = expected(dtype, op, size * count).chunk(size)
                assert torch.equal(part.view(torch.uint8), parts[me])

    run_ranks(program, size, backend="auto", hints={"hosts": layout})
