"""Reductions of parts of matrices."""

import pytest
import torch

import unicomm
from tests.symm.exchanges import shared
from tests.symm.matrices import check_tiles
from unicomm import symm
from unicomm.testing import run_ranks


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_tiles(n, dtype):
    def program(comm):
        symm.init(comm)
        check_tiles(comm, dtype, seed=n)

    run_ranks(program, n)


def test_the_example_of_torchs_description():
    """A gradient of one column block for each expert, whose expert i belongs to rank i % n."""
    n, height, width = 2, 3, 4

    def program(comm):
        symm.init(comm)
        me = comm.get_rank()
        blocks = 2 * n
        x = shared(comm, torch.arange(height * blocks * width).view(height, -1) * (me + 1.0))
        ends = [width * (i + 1) for i in range(blocks)]
        outs = [torch.empty(height, width) for _ in range(blocks // n)]
        symm.reduce_scatter_offset(
            x, outs, comm, dim=1, offsets=ends, dst_ranks=[i % n for i in range(blocks)]
        )
        total = x / (me + 1) * 3
        for got, block in zip(outs, range(me, blocks, n), strict=True):
            assert torch.equal(got, total[:, width * block : width * (block + 1)])

    run_ranks(program, n)


def test_bad_tiles():
    """Refused on this rank before anything happens."""

    def program(comm):
        symm.init(comm)
        x, y = shared(comm, torch.ones(4, 6)), shared(comm, torch.zeros(4, 6))
        wide = shared(comm, torch.ones(4, 6, dtype=torch.float64))
        two = torch.zeros(2, 6)
        rso = symm.reduce_scatter_offset
        cases = [
            ("root must be in range", lambda: symm.tile_reduce(x, y, 1, comm)),
            ("not in the symmetric memory", lambda: symm.tile_reduce(torch.ones(4, 6), y, 0, comm)),
            ("not in the symmetric memory", lambda: symm.tile_reduce(x[:2], two, 0, comm)),
            ("in_tile has 1 dimensions", lambda: symm.tile_reduce(x[0], y[0], 0, comm)),
            ("same sizes, strides", lambda: symm.tile_reduce(x[:, :2], y[:, :3], 0, comm)),
            ("same sizes, strides", lambda: symm.tile_reduce(x[:3, :3], y[:3, :3].T, 0, comm)),
            ("torch.float64 with strides", lambda: symm.tile_reduce(x, wide, 0, comm)),
            ("share memory", lambda: symm.tile_reduce(x, x, 0, comm)),
            ("share memory", lambda: symm.tile_reduce(x[:, :3], x[:, 2:5], 0, comm)),
            ("elements overlap", lambda: symm.tile_reduce(*[t[:, :1].expand(4, 3) for t in (x, y)], 0, comm)),
            ("is unknown", lambda: symm.tile_reduce(x, y, 0, comm, "avg of all")),
            ("0 in_tiles for 0 roots", lambda: symm.multi_root_tile_reduce([], y, [], comm)),
            ("1 in_tiles for 2 roots", lambda: symm.multi_root_tile_reduce([x], y, [0, 0], comm)),
            ("has a rank twice", lambda: symm.multi_root_tile_reduce([x, x], y, [0, 0], comm)),
            ("roots[0] must be", lambda: symm.multi_root_tile_reduce([x], y, [4], comm)),
            ("rows are contiguous", lambda: rso(x.T, [two], comm, dim=0)),
            ("dim=2", lambda: rso(x, [two], comm, dim=2)),
            ("offsets=[5, 4]", lambda: rso(x, [two], comm, dim=1, offsets=[5, 4])),
            ("offsets=[2, 5]", lambda: rso(x, [two], comm, dim=0, offsets=[2, 5])),
            ("offsets=[1.5]", lambda: rso(x, [two], comm, dim=0, offsets=[1.5])),
            ("2 dst_ranks for 1 blocks", lambda: rso(x, [two], comm, dim=0, offsets=[4], dst_ranks=[0, 0])),
            ("dst_ranks[0] must be", lambda: rso(x, [two], comm, dim=0, offsets=[4], dst_ranks=[1])),
            ("2 outs for 1 blocks", lambda: rso(x, [two, two], comm, dim=0, offsets=[4])),
            ("its block is (4, 6)", lambda: rso(x, [two], comm, dim=0)),
            ("out[0] is of torch.float64", lambda: rso(x, [two.double()], comm, dim=0, offsets=[2])),
            ("input and out[0] share", lambda: rso(x, [x[2:]], comm, dim=0, offsets=[2])),
            ("out[0] and out[1] share", lambda: rso(x, [two, two], comm, dim=0, offsets=[2, 4])),
        ]
        for message, call in cases:
            with pytest.raises(unicomm.InvalidArgumentError) as error:
                call()
            assert message in str(error.value)
            assert error.value.hint
        assert not y.any()
        # Tiles between each other's columns share no memory.
        symm.tile_reduce(x[:, :3], x[:, 3:], 0, comm, "sum")
        symm.tile_reduce(x[:, ::2], x[:, 1::2], 0, comm, "max")

    run_ranks(program, 1)


def test_ranks_with_other_tiles():
    """All hear of it, nothing is written, and they go on."""

    def program(comm):
        symm.init(comm)
        me = comm.get_rank()
        x, y = shared(comm, torch.ones(4, 6)), shared(comm, torch.zeros(4, 6))
        part = torch.zeros(4, 6)
        for call in (
            lambda: symm.tile_reduce(x, y, me, comm),
            lambda: symm.tile_reduce(x[:, me : me + 2], y[:, :2], 0, comm),
            lambda: symm.tile_reduce(x, y, 0, comm, "max" if me else "sum"),
            lambda: symm.multi_root_tile_reduce([x], y, [me], comm),
            lambda: symm.reduce_scatter_offset(x, [part], comm, dim=0, offsets=[4], dst_ranks=[me]),
        ):
            with pytest.raises(unicomm.MismatchError, match="at other places or of other sizes") as error:
                call()
            assert error.value.culprits == (0, 1)
        assert not y.any()
        assert not part.any()
        symm.tile_reduce(x, y, 1, comm)
        assert y.eq(2 if me else 0).all()

    run_ranks(program, 2)
