"""Hooks: what they see of every operation, in which order, and that they can stop it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from tests import recorded
from tests.comms import inside
from tests.comms.calls import COLLECTIVES, call, check_sum
from unicomm import CommError, Communicator, InvalidArgumentError, MismatchError, OpName, ReduceOp
from unicomm.comms.operations.table import OPERATIONS, Role
from unicomm.hooks import NanCheckHook, OpArgs
from unicomm.testing import run_ranks

SUM = ReduceOp.SUM
Seen = tuple[str, OpName, int, OpArgs]


def watch(comm: Communicator) -> list[Seen]:
    seen: list[Seen] = []
    comm.register_pre_hook(lambda name, op_id, args: seen.append(("pre", name, op_id, args)))
    comm.register_post_hook(lambda name, op_id, args: seen.append(("post", name, op_id, args)))
    return seen


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_what_is_seen_of_a_collective(name, async_op):
    """One and the same OpArgs before and after, which says what the operation's row of the table says."""
    row = OPERATIONS[name]

    def program(comm: Communicator) -> int:
        me, n = comm.get_rank(), comm.get_size()
        check_sum(comm)
        seen = watch(comm)
        issue, _ = call(comm, name, root=1)
        work = issue(async_op, timeout=17)
        assert [s[0] for s in seen] == ["pre", "post"]
        (_, op, op_id, args), after = seen
        assert after[1:] == (op, op_id, args)
        assert after[3] is args
        work.wait()
        assert isinstance(args, OpArgs)
        assert op is OpName[name]
        assert (args.name, args.op_id, args.seq) == (name, op_id, work.seq) == (name, op_id, 2)
        assert args.async_op is async_op
        assert args.timeout == 17
        assert args.root == (1 if row.rooted else -1)
        assert args.peer == -1
        assert args.op == (SUM if row.reduces else None)
        assert args.in_splits == args.out_splits == ([6] * n if row.splits else None)
        assert (tuple(args.messages), tuple(args.ranks), args.hints) == ((), (), None)
        here = [a for a in row.tensors if me == 1 or not a.root_only]
        for side, other in ((args.inputs, Role.OUT), (args.outputs, Role.IN)):
            expected = [a for a in here if a.role is not other]
            assert len(side) == sum(n if a.many else 1 for a in expected)
            assert all(isinstance(t, torch.Tensor) for t in side)
        return op_id

    assert len(set(run_ranks(program, 3))) == 3  # the ranks are threads of one process


def test_the_tensors_are_the_users_own():
    def program(comm: Communicator) -> None:
        seen = watch(comm)
        x, outs = torch.ones(3), [torch.zeros(3), torch.zeros(3)]
        comm.all_gather(outs, x, False)
        comm.all_reduce(x, SUM, True).wait()
        gathered, reduced = seen[0][3], seen[2][3]
        assert gathered.inputs[0] is x
        assert all(a is b for a, b in zip(gathered.outputs, outs, strict=True))
        assert reduced.inputs[0] is reduced.outputs[0] is x

    run_ranks(program, 2)


def test_what_is_seen_of_messages():
    def program(comm: Communicator) -> None:
        me, other = comm.get_rank(), 1 - comm.get_rank()
        seen = watch(comm)
        x, y = torch.ones(3), torch.zeros(3)
        for seq in (1, 2):
            (comm.send if me == 0 else comm.recv)(x, other, False)
            args = seen[-1][3]
            name = "send" if me == 0 else "recv"
            assert seen[-1][:2] == ("post", OpName[name])
            assert (args.name, args.peer, args.root, args.seq) == (name, other, -1, seq)
            assert [t is x for t in args.inputs] == ([True] if me == 0 else [])
            assert [t is x for t in args.outputs] == ([] if me == 0 else [True])
        batch = comm.batch_op_create().send(x, other).recv(y, other)
        batch.issue(True).wait()
        kind, name, _, args = seen[-1]
        assert (kind, name, args.name, args.peer) == ("post", OpName.batch, "batch", -1)
        assert [(m.send, m.peer, m.tensor is x) for m in args.messages] == [
            (True, other, True),
            (False, other, False),
        ]
        assert args.async_op

    run_ranks(program, 2)


def test_what_is_seen_of_a_split():
    def program(comm: Communicator) -> None:
        seen = watch(comm)
        ranks = [2, 0] if comm.get_rank() != 1 else []
        child = comm.split(ranks, "child", timeout=9, hints={"slot_bytes": "64K"} if ranks else None)
        (before, name, op_id, args), after = seen
        assert (before, after[0]) == ("pre", "post")
        assert (name, args.name, args.op_id) == (OpName.split, "split", op_id)
        assert list(args.ranks) == ranks
        assert args.timeout == 9
        assert args.hints == ({"slot_bytes": "64K"} if ranks else None)
        if child is not None:
            child.barrier(False)
            child.finalize()
        assert len(seen) == 2  # children do not inherit hooks

    run_ranks(program, 3)


def test_order_and_removal():
    def program(comm: Communicator) -> None:
        said: list[str] = []

        def hook(text: str) -> Any:
            return lambda *_: said.append(text)

        first = comm.register_pre_hook(hook("a"))
        comm.register_pre_hook(hook("b"))
        comm.register_post_hook(hook("A"))
        comm.register_post_hook(hook("B"))
        comm.barrier(False)
        assert said == ["a", "b", "A", "B"]
        said.clear()
        first.remove()
        first.remove()
        with comm.register_pre_hook(hook("c")) as inner, comm.register_post_hook(hook("C")):
            comm.barrier(True).wait()
            assert said == ["b", "c", "A", "B", "C"]
        said.clear()
        inner.remove()
        comm.barrier(False)
        assert said == ["b", "A", "B"]

    run_ranks(program, 2)


def test_without_hooks_the_direct_way_is_taken_again():
    def program(comm: Communicator) -> None:
        counted: list[int] = []
        handles = [comm.register_pre_hook(lambda *_: counted.append(1)) for _ in range(3)]
        for handle in handles:
            check_sum(comm)
            handle.remove()
        check_sum(comm)
        with comm.register_post_hook(lambda *_: counted.append(1)):
            assert check_sum(comm).seq == 5
        assert len(counted) == 3 + 2 + 1 + 1
        assert not inside.engine(comm).hooks.active

    run_ranks(program, 2)


def test_hooks_must_be_callable():
    def program(comm: Communicator) -> None:
        for register in (comm.register_pre_hook, comm.register_post_hook, comm.register_abort_hook):
            with pytest.raises(TypeError, match="must be callable, not a str"):
                register("hook")
        check_sum(comm)

    run_ranks(program, 1)


def test_op_ids_are_of_the_process():
    """They count all operations of all communicators, with or without hooks; argument errors take none."""

    def program(comm: Communicator) -> None:
        other = comm.split([0], "other")
        one, two = watch(comm), watch(other)
        for _ in range(2):
            comm.barrier(False)
            other.barrier(True).wait()
            with pytest.raises(InvalidArgumentError):
                comm.broadcast(torch.ones(1), 5, False)
        ids = [s[2] for s in (one[0], two[0], one[2], two[2])]
        assert ids == list(range(ids[0], ids[0] + 4))

    run_ranks(program, 1)


@pytest.mark.parametrize("kind", ["sync", "async", "send", "batch", "split"])
def test_a_pre_hook_that_raises_stops_the_operation(kind, raised):
    """Its own error comes out, nothing is recorded or sent, and the numbers go on without a gap."""
    meeting = threading.Barrier(2, timeout=30)

    def program(comm: Communicator) -> None:
        me = comm.get_rank()
        check_sum(comm)
        seen: list[str] = []

        def refuse(name: OpName, op_id: int, args: OpArgs) -> None:
            raise LookupError(f"not now: {name.value}")

        meeting.wait()
        if me == 0:
            comm.register_post_hook(lambda name, *_: seen.append(name.value))
            x = torch.ones(3)
            forbidden = {
                "sync": lambda: comm.all_reduce(x, SUM, False),
                "async": lambda: comm.all_reduce(x, SUM, True),
                "send": lambda: comm.send(x, 1, False),
                "batch": lambda: comm.batch_op_create().send(x, 1).issue(False),
                "split": lambda: comm.split([0]),
            }[kind]
            total = recorded.total()
            with comm.register_pre_hook(refuse):
                error = raised(forbidden)
            assert type(error) is LookupError
            assert str(error).startswith("not now")
            assert seen == []
            assert recorded.total() == total
        meeting.wait()
        assert check_sum(comm).seq == 2
        message = torch.tensor([8.0 * (1 - me)])
        assert (comm.send if me == 0 else comm.recv)(message, 1 - me, False).seq == 1
        assert message.item() == 8

    run_ranks(program, 2)


def test_an_operation_that_fails_has_no_post_hook(raised):
    def program(comm: Communicator) -> None:
        seen = watch(comm)
        assert type(raised(comm.all_reduce, torch.ones(comm.get_rank() + 1), SUM, False)) is MismatchError
        assert [s[0] for s in seen] == ["pre"]
        work = comm.all_reduce(torch.ones(comm.get_rank() + 1), SUM, True)
        assert [s[0] for s in seen] == ["pre", "pre", "post"]  # the call returned
        assert type(raised(work.wait)) is MismatchError

    run_ranks(program, 2)


def test_a_hook_may_communicate():
    """Operations that a hook issues come before its own, and all are numbered in the order they run."""

    def program(comm: Communicator) -> None:
        inner: list[int] = []

        def agree(name: OpName, op_id: int, args: OpArgs) -> None:
            if name is OpName.all_reduce:
                inner.append(comm.barrier(False).seq)
                inner.append(comm.barrier(True).seq)

        with comm.register_pre_hook(agree):
            assert check_sum(comm).seq == 3
            assert inner == [1, 2]
        assert check_sum(comm).seq == 4

    run_ranks(program, 2)


# --- NanCheckHook ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.complex64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ],
)
def test_nan_is_not_sent(dtype, raised):
    def program(comm: Communicator) -> None:
        hook = NanCheckHook()
        hook.register_with_comm(comm)
        x = torch.ones(9).to(dtype)
        comm.broadcast(x, 0, False)
        with_nan = torch.ones(9)
        with_nan[7] = float("nan")
        error = raised(comm.all_gather_single, torch.zeros(18).to(dtype), with_nan.to(dtype), False)
        assert isinstance(error, CommError)
        assert (error.op, error.comm, error.rank) == ("all_gather_single", "ranks", comm.get_rank())
        assert "NaN detected in input tensor 0 for 'all_gather_single'" in str(error)
        assert not comm.is_aborted()
        assert check_sum(comm).seq == 2
        hook.remove()
        comm.all_gather_single(torch.zeros(18).to(dtype), with_nan.to(dtype), False)

    run_ranks(program, 2)


def test_what_the_nan_check_looks_at(raised):
    """Only what this rank sends: no outputs, no other rank's part, no types that have no NaN."""
    nan = torch.full((2,), float("nan"))

    def program(comm: Communicator) -> None:
        me, other = comm.get_rank(), 1 - comm.get_rank()
        hook = NanCheckHook()
        hook.register_with_comm(comm)
        own = nan.clone() if me else torch.ones(2)
        comm.broadcast(own, 0, False)  # where not the root, it is an output
        assert own.tolist() == [1.0, 1.0]
        comm.all_gather([nan.clone(), nan.clone()], torch.ones(2), False)
        comm.all_reduce(torch.full((2,), 1 << 60), SUM, False)
        if me == 0:
            assert isinstance(raised(comm.broadcast, nan.clone(), 0, False), CommError)
            assert isinstance(raised(comm.reduce, nan.clone(), 1, SUM, False), CommError)
            assert isinstance(raised(comm.send, nan.clone(), 1, False), CommError)
            second = raised(comm.all_to_all, [torch.ones(2), torch.ones(2)], [torch.ones(2), nan], True)
            assert "input tensor 1" in str(second)
            batch = comm.batch_op_create().recv(nan.clone(), 1).send(nan.clone(), 1)
            assert isinstance(raised(batch.issue, False), CommError)
        batch = comm.batch_op_create().recv(nan.clone(), other).send(torch.ones(2), other)
        batch.issue(False)
        check_sum(comm)

    run_ranks(program, 2)
