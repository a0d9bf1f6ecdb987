"""Ranks that call different things: one MismatchError on all of them, nothing written, and on it goes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.comms.calls import COLLECTIVES, call, check_sum
from tests.comms.inside import post
from unicomm import Communicator, MismatchError, ReduceOp, WorkStatus
from unicomm.comms.execution.message_queue import ANY_RANK
from unicomm.comms.operations.table import OPERATIONS
from unicomm.testing import run_ranks

LARGE = 70001  # elements, which take several rounds


@pytest.fixture(params=["shm", "gloo", "tcp"])
def backend(request):
    return request.param


def mismatch(
    n: int, of_rank: list[dict[str, Any]], raised, async_op: bool = False, backend: str = "shm"
) -> list[MismatchError]:
    """Rank i calls what `of_rank[i]` says, between two good operations. Returns the ranks' errors."""

    def program(comm: Communicator) -> MismatchError:
        assert check_sum(comm).seq == 1
        issue, tensors = call(comm, **of_rank[comm.get_rank()])
        before = [t.clone() for t in tensors]
        if async_op:
            work = issue(True)
            error = raised(work.wait)
            assert raised(work.wait) is error
            assert work.status is WorkStatus.ERROR
        else:
            error = raised(issue, False)
        assert type(error) is MismatchError, repr(error)
        assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True)), "a tensor was written"
        assert not comm.is_aborted()
        assert check_sum(comm).seq == 3
        mine = of_rank[comm.get_rank()]["name"]
        assert (error.op, error.comm, error.seq, error.rank) == (mine, "ranks", 2, comm.get_rank())
        assert "nothing was written" in error.hint
        return error

    errors = run_ranks(program, n, backend=backend)
    assert len({(e.message, e.culprits, e.hint) for e in errors}) == 1, "the ranks differ in what they say"
    return errors


DIFFERENCES: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "operation": (
        {"name": "all_reduce"},
        {"name": "broadcast"},
        "all_reduce(float32[6], SUM)",
        "broadcast(float32[6], root 0)",
    ),
    "no operand": (
        {"name": "all_reduce", "count": LARGE},
        {"name": "barrier"},
        f"all_reduce(float32[{LARGE}], SUM)",
        "barrier()",
    ),
    "count": (
        {"name": "all_reduce"},
        {"name": "all_reduce", "count": 7},
        "all_reduce(float32[6], SUM)",
        "all_reduce(float32[7], SUM)",
    ),
    "much larger count": (
        {"name": "all_reduce"},
        {"name": "all_reduce", "count": LARGE},
        "float32[6]",
        f"float32[{LARGE}]",
    ),
    "zero count": ({"name": "broadcast"}, {"name": "broadcast", "count": 0}, "float32[6]", "float32[0]"),
    "dtype": (
        {"name": "all_gather_single"},
        {"name": "all_gather_single", "dtype": torch.int32},
        "float32[6]",
        "int32[6]",
    ),
    "dtype of one size": (
        {"name": "all_reduce", "dtype": torch.float16},
        {"name": "all_reduce", "dtype": torch.bfloat16},
        "float16[6]",
        "bfloat16[6]",
    ),
    "root": ({"name": "broadcast", "root": 0}, {"name": "broadcast", "root": 1}, "root 0", "root 1"),
    "root of a gather": (
        {"name": "gather", "root": 0},
        {"name": "gather", "root": 1},
        "gather(float32[6], root 0)",
        "gather(float32[6], root 1)",
    ),
    "reduction": ({"name": "all_reduce"}, {"name": "all_reduce", "op": ReduceOp.MAX}, "SUM", "MAX"),
    "reduction with a factor": (
        {"name": "reduce", "op": ReduceOp.PREMUL_SUM(2)},
        {"name": "reduce"},
        "PREMUL_SUM, root 0",
        "SUM, root 0",
    ),
}


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_the_minority_is_named(difference, n, backend, raised):
    most, one, text, odd_text = DIFFERENCES[difference]
    odd = n - 1
    error = mismatch(n, [most] * odd + [one], raised, backend=backend)[0]
    assert error.culprits == ((0, 1) if n == 2 else (odd,))
    assert text in error.message
    assert odd_text in error.message
    others = {2: "rank 0", 3: "ranks 0, 1", 4: "ranks 0, 1, 2"}[n]
    assert error.message.startswith(f"the ranks called different things; {others}: ")
    assert f"; rank {odd}: " in error.message


@pytest.mark.parametrize("name", COLLECTIVES)
def test_every_collective_against_another(name, backend, raised):
    other = {"name": "all_reduce" if name == "barrier" else "barrier"}
    error = mismatch(3, [other, {"name": name}, other], raised, backend=backend)[0]
    assert error.culprits == (1,)
    assert f"rank 1: {name}(" in error.message


@pytest.mark.parametrize("name", [n for n in COLLECTIVES if OPERATIONS[n].same_count and n != "barrier"])
@pytest.mark.parametrize("counts", [(6, 8), (6, LARGE), (LARGE, LARGE + 4)])
def test_every_count_is_compared(name, counts, raised):
    most, one = ({"name": name, "count": count} for count in counts)
    assert mismatch(3, [most, most, one], raised)[0].culprits == (2,)


def test_a_tie_blames_everybody(backend, raised):
    a, b, c = ({"name": "all_reduce", "count": k} for k in (1, 2, 3))
    assert mismatch(4, [a, b, a, b], raised, backend=backend)[0].culprits == (0, 1, 2, 3)
    error = mismatch(4, [a, b, a, c], raised, backend=backend)[0]
    assert error.culprits == (1, 3)
    assert "ranks 0, 2: all_reduce(float32[1], SUM)" in error.message
    assert mismatch(3, [a, b, c], raised, backend=backend)[0].culprits == (0, 1, 2)


def test_async(backend, raised):
    most, one = {"name": "all_reduce"}, {"name": "all_reduce", "count": LARGE}
    assert mismatch(3, [one, most, most], raised, True, backend)[0].culprits == (0,)


def test_alike_but_for_what_may_differ(backend):
    """Timeouts, factors, layouts and whether a call is asynchronous are each rank's own business."""

    def program(comm: Communicator) -> list[float]:
        me = comm.get_rank()
        x = torch.ones(4) if me else torch.ones(2, 2)
        comm.all_reduce(x, ReduceOp.PREMUL_SUM(me + 1), me == 0, timeout=10 + me).wait()
        return x.flatten().tolist()

    assert run_ranks(program, 3, backend=backend) == [[6.0] * 4] * 3


def test_mismatches_one_after_another(backend, raised):
    """The ranks stay in step through any number of them, also mixed with operations of many rounds."""

    def program(comm: Communicator) -> None:
        me = comm.get_rank()
        for i, name in enumerate(COLLECTIVES * 2):
            other = "all_reduce" if name == "barrier" else "barrier"
            error = raised(call(comm, name if i % 3 == me else other).issue, False)
            assert type(error) is MismatchError, repr(error)
            x = torch.full((LARGE,), 1.0)
            comm.all_reduce(x, ReduceOp.SUM, False)
            assert bool((x == 3).all())

    run_ranks(program, 3, backend=backend)


# --- sizes that only pairs share --------------------------------------------------------------------------


def pairwise(n: int, raised, issue, backend: str) -> list[MismatchError]:
    def program(comm: Communicator) -> MismatchError:
        out = [torch.full((12,), -1.0) for _ in range(n)]
        error = raised(issue, comm, out)
        assert type(error) is MismatchError, repr(error)
        assert all(bool((t == -1).all()) for t in out)
        check_sum(comm)
        return error

    return run_ranks(program, n, backend=backend)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_splits_of_a_pair(n, backend, raised):
    def issue(comm: Communicator, out: list[torch.Tensor]) -> None:
        sends, takes = [2] * n, [2] * n
        if comm.get_rank() == 0:
            sends[n - 1] = 3  # the last rank expects 2
        comm.all_to_all_v_single(out[0][: sum(takes)], torch.ones(sum(sends)), takes, sends, False)

    for error in pairwise(n, raised, issue, backend):
        assert error.culprits == (0, n - 1)
        assert error.message == f"rank {n - 1} expects 2 elements from rank 0, which sends 3"
        assert error.op == "all_to_all_v_single"


def test_the_one_that_fits_nobody_is_blamed(backend, raised):
    def issue(comm: Communicator, out: list[torch.Tensor]) -> None:
        sizes = [2] * 4
        if comm.get_rank() == 1:
            sizes = [2, 2, 3, 3]
        comm.all_to_all([o[:2] for o in out], [torch.ones(s) for s in sizes], False)

    for error in pairwise(4, raised, issue, backend):
        assert error.culprits == (1,)
        assert error.message.count("which sends 3") == 2


def test_missing_rows(backend, raised):
    def issue(comm: Communicator, out: list[torch.Tensor]) -> None:
        sends, takes = [0, 2, 0], [0, 2, 0] if comm.get_rank() == 1 else [0, 0, 0]
        if comm.get_rank() != 1:
            sends, takes = [0, 2, 0], [0, 2, 0]  # these expect rows of rank 1, which sends none
        comm.all_to_all_v_single(out[0][:2], torch.ones(2), takes, sends, False)

    for error in pairwise(3, raised, issue, backend):
        assert 1 in error.culprits
        assert "expects 0 elements" in error.message
        assert "expects 2 elements from rank 1, which sends 0" in error.message


@pytest.mark.parametrize("name", ["all_gather_v", "reduce_scatter_v"])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_size_lists(name, n, backend, raised):
    def issue(comm: Communicator, out: list[torch.Tensor]) -> None:
        me = comm.get_rank()
        sizes = [r + 1 for r in range(n)]
        if me == n - 1:
            sizes[0] += 1
        parts, own = [o[:s] for o, s in zip(out, sizes, strict=True)], torch.ones(sizes[me])
        if name == "all_gather_v":
            comm.all_gather_v(parts, own, False)
        else:
            comm.reduce_scatter_v(out[me][: sizes[me]], [torch.ones(s) for s in sizes], ReduceOp.SUM, False)

    errors = pairwise(n, raised, issue, backend)
    assert all(error.culprits == ((0, 1) if n == 2 else (n - 1,)) for error in errors)
    assert f"{name}(float32, sizes #" in errors[0].message


# --- messages --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "taken"),
    [
        (torch.ones(8), torch.zeros(4)),
        (torch.ones(4), torch.zeros(8)),
        (torch.ones(0), torch.zeros(1)),
        (torch.ones(1), torch.zeros(0)),
        (torch.ones(4), torch.zeros(4, dtype=torch.int32)),
        (torch.ones(4, dtype=torch.float16), torch.zeros(4, dtype=torch.bfloat16)),
        (torch.ones(2_000_000), torch.zeros(1)),
        (torch.ones(2_000_000), torch.zeros(2_000_001)),
    ],
    ids=["shorter", "longer", "not empty", "empty", "dtype", "dtype of one size", "large sent", "both large"],
)
def test_message(sent, taken, raised):
    """The receiver refuses it; a sender that still waits for room hears of that; the next message arrives."""

    def program(comm: Communicator) -> None:
        if comm.get_rank() == 0:
            if sent.numel() > 1_000_000:
                error = raised(comm.send, sent, 1, False)
                assert type(error) is MismatchError
                assert error.culprits == (0, 1)
            else:
                comm.send(sent, 1, False)
            comm.send(torch.full((3,), 5.0), 1, False)
        else:
            error = raised(comm.recv, taken, 0, False)
            assert type(error) is MismatchError
            assert error.culprits == (0, 1)
            kind = [str(t.dtype).removeprefix("torch.") for t in (sent, taken)]
            assert f"rank 0: send({kind[0]}[{sent.numel()}], to rank 1)" in error.message
            assert f"rank 1: recv({kind[1]}[{taken.numel()}], from rank 0)" in error.message
            assert not taken.any()
            after = torch.zeros(3)
            comm.recv(after, 0, False)
            assert after.tolist() == [5.0] * 3
        check_sum(comm)

    run_ranks(program, 2)


def test_a_batch_goes_through_but_for_the_wrong_message(raised):
    def program(comm: Communicator) -> None:
        me, n = comm.get_rank(), comm.get_size()
        taken = [torch.zeros(4 if (me, r) != (1, 0) else 5) for r in range(n)]
        batch = comm.batch_op_create()
        for other in {0, 1, 2} - {me}:
            batch.send(torch.full((4,), me + 1.0), other).recv(taken[other], other)
        if me == 1:
            error = raised(batch.issue, False)
            assert type(error) is MismatchError
            assert error.culprits == (0, 1)
            assert error.op == "batch"
        else:
            batch.issue(False)
        for other in {0, 1, 2} - {me}:
            value = 0.0 if (me, other) == (1, 0) else other + 1.0
            assert set(taken[other].tolist()) == {value}
        check_sum(comm)

    run_ranks(program, 3)


def test_a_refused_message_is_not_taken_for_another(raised):
    """A receive from any rank that comes after it waits for a message that nobody has refused."""

    def program(comm: Communicator) -> None:
        if comm.get_rank() == 0:
            comm.send(torch.ones(8), 2, False)
            comm.barrier(False)
        elif comm.get_rank() == 1:
            comm.barrier(False)
            comm.send(torch.full((3,), 5.0), 2, False)
        else:
            assert type(raised(comm.recv, torch.zeros(4), 0, False)) is MismatchError
            comm.barrier(False)
            after = torch.zeros(3)
            work = post(comm, "recv", after, ANY_RANK, None)
            work.wait()
            assert work.peer == 1
            assert after.tolist() == [5.0] * 3
        check_sum(comm)

    run_ranks(program, 3)
