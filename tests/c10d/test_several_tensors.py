"""Methods of a process group that take several tensors, and those that take a list of one."""

import pytest
import torch
import torch.distributed as dist

from unicomm import InvalidArgumentError
from unicomm.c10d.compat import AllreduceCoalescedOptions
from unicomm.c10d.process_group import UnicommProcessGroup
from unicomm.testing import run_ranks


def in_groups(check):
    """Runs `check(group, rank)` on two ranks, and then a collective: the ranks have to be in step."""

    def program(comm):
        group = UnicommProcessGroup(comm)
        check(group, comm.get_rank())
        x = torch.full((2,), 1.0 + comm.get_rank())
        group.allreduce([x]).wait()
        assert x.tolist() == [3.0, 3.0]

    run_ranks(program, 2)


def transposed():
    return torch.arange(6.0).reshape(2, 3).t()


@pytest.mark.parametrize("kind", [list, tuple])
def test_permuted_tensors_among_several_are_reduced_once(kind):
    def check(group, rank):
        a, b = torch.ones(3), transposed()
        group.allreduce_coalesced(kind((a, b))).wait()
        assert a.tolist() == [2.0] * 3
        assert torch.equal(b, 2 * transposed())
        # Also if the layout differs between the ranks.
        a, b = torch.ones(3), transposed() if rank else transposed().contiguous()
        group.allreduce_coalesced(kind((a, b))).wait()
        assert a.tolist() == [2.0] * 3
        assert torch.equal(b, 2 * transposed())

    in_groups(check)


@pytest.mark.parametrize("method", ["allreduce_coalesced", "all_gather", "gather_each", "reduce_scatter"])
def test_refused_tensor_among_several_leaves_the_others_as_they_are(method):
    """The ranks stay in step, although one of them alone is refused."""

    def check(group, rank):
        if rank:
            return
        good, bad = torch.ones(2), torch.ones(2, 4)[:, ::2]
        wide, wide_bad = torch.full((4,), -1.0), torch.full((4, 2), -1.0)[:, 0]
        scatter = dist.ReduceScatterOptions()
        with pytest.raises(InvalidArgumentError):  # noqa: PT012
            if method == "allreduce_coalesced":
                group.allreduce_coalesced([good, bad])
            elif method == "all_gather":
                group.allgather_into_tensor_coalesced([wide, wide_bad], [good, good])
            elif method == "gather_each":
                outs = [[torch.full((2,), -1.0), torch.full((2,), -1.0)] for _ in range(2)]
                group.allgather_coalesced(outs, [good, bad[0]])
            else:
                group.reduce_scatter_tensor_coalesced([good, torch.ones(3)], [wide, wide_bad], scatter)
        assert good.tolist() == [1.0, 1.0]
        assert wide.tolist() == [-1.0] * 4

    in_groups(check)


def test_lists_of_outputs_have_to_fit():
    def check(group, rank):
        x = torch.ones(2)
        outs = [[torch.full((2,), -1.0) for _ in range(2)] for _ in range(2)]
        for outputs, inputs in (
            (outs, [x]),
            (outs, []),
            (outs[:1], [x, x]),
            ([outs[0], outs[1][:1]], [x, x]),
        ):
            with pytest.raises(InvalidArgumentError, match="are needed"):
                group.allgather_coalesced(outputs, inputs)
        with pytest.raises(InvalidArgumentError, match="do not fit"):
            group.allgather_into_tensor_coalesced([torch.ones(4)], [x, x])
        with pytest.raises(InvalidArgumentError, match="do not fit"):
            group.reduce_scatter_tensor_coalesced([x, x], [torch.ones(4)], dist.ReduceScatterOptions())
        for empty in (
            lambda: group.allreduce_coalesced([]),
            lambda: group.allgather_coalesced([[], []], []),
            lambda: group.allgather_into_tensor_coalesced([], []),
        ):
            with pytest.raises(InvalidArgumentError, match="empty"):
                empty()
        assert all(out.tolist() == [-1.0, -1.0] for of_rank in outs for out in of_rank)

    in_groups(check)


CALLS = {
    "allreduce": lambda g, a: g.allreduce(a),
    "broadcast": lambda g, a: g.broadcast(a, dist.BroadcastOptions()),
    "reduce": lambda g, a: g.reduce(a, dist.ReduceOptions()),
    "send": lambda g, a: g.send(a, 1 - g.rank(), 0),
    "recv": lambda g, a: g.recv(a, 1 - g.rank(), 0),
    "recv_anysource": lambda g, a: g.recv_anysource(a, 0),
    "allgather": lambda g, a: g.allgather([[x, x] for x in a], a),
    "reduce_scatter": lambda g, a: g.reduce_scatter(a, [[x, x] for x in a], dist.ReduceScatterOptions()),
    "gather": lambda g, a: g.gather([[x, x] for x in a], a, dist.GatherOptions()),
    "scatter": lambda g, a: g.scatter(a, [[x, x] for x in a], dist.ScatterOptions()),
}


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize("name", CALLS)
def test_methods_of_one_tensor_take_no_other_number(name, count):
    def check(group, rank):
        with pytest.raises(InvalidArgumentError, match=f"{name} takes one element in .*, not {count}"):
            CALLS[name](group, [torch.ones(2) for _ in range(count)])

    in_groups(check)


def test_the_future_of_several_gathers_has_a_list_for_each_rank():
    def check(group, rank):
        for second in (torch.ones(3), transposed()):
            outs = [[torch.empty(2), torch.empty_like(second)] for _ in range(2)]
            inputs = [torch.full((2,), float(rank)), second + rank]
            value = group.allgather_coalesced(outs, inputs).get_future().wait()
            assert [[t.shape for t in of_rank] for of_rank in value] == [[(2,), second.shape]] * 2
            for r in range(2):
                assert value[r][0].tolist() == [float(r)] * 2
                assert torch.equal(value[r][1], second + r)

    in_groups(check)


def test_several_reductions_that_torch_calls_coalesced():
    def check(group, rank):
        options = AllreduceCoalescedOptions()
        options.reduceOp = dist.ReduceOp.MAX
        a, b = torch.full((2,), float(rank)), torch.full((3,), 7 - rank)
        group.allreduce_coalesced([a, b], options).wait()
        assert (a.tolist(), b.tolist()) == ([1.0, 1.0], [7, 7, 7])

    in_groups(check)
