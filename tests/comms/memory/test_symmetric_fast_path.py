"""The native fast path of operations on symmetric memory."""

import torch

from tests.comms import inside
from tests.symm.exchanges import check_collectives, check_experts, shared
from unicomm import symm
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
