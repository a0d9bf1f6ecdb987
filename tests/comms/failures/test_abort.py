"""abort: from any thread, for all ranks, at once."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests import recorded
from tests.comms.calls import check_sum
from unicomm import (
    AbortedError,
    BackendError,
    CommError,
    Communicator,
    NotReadyError,
    ReduceOp,
    WorkStatus,
)
from unicomm.testing import run_ranks

SUM = ReduceOp.SUM
AT_ONCE = 1.0  # seconds


def pending_operations(comm: Communicator) -> dict[str, Callable[[], object]]:
    """What ranks 0 and 1 of 3 may be waiting in: rank 2 takes part in none of them."""
    x = torch.ones(70001)
    return {
        "all_reduce": lambda: comm.all_reduce(x, SUM, False),
        "barrier": lambda: comm.barrier(False),
        "async": lambda: comm.all_reduce(x, SUM, True).wait(),
        "third in a row": lambda: [comm.barrier(True) for _ in range(3)][2].wait(30),
        "synchronous behind asynchronous": lambda: (comm.barrier(True), comm.barrier(False)),
        # No ranks wait for each other in these. After half a second they would get a DeadlockError, which is
        # before rank 2 aborts if the machine is busy.
        "recv in a chain": lambda: comm.recv(x, comm.get_rank() + 1, False),
        "recv": lambda: comm.recv(x, 2, False),
        "send": lambda: comm.send(torch.ones(2_000_000), 2, False),
        "batch": lambda: comm.batch_op_create().recv(x, 2).send(torch.ones(2_000_000), 2).issue(False),
    }


both_backends = pytest.mark.parametrize("backend", ["shm", "gloo", "tcp", "ucx"])


@both_backends
@pytest.mark.parametrize(
    "kind", ["all_reduce", "barrier", "async", "third in a row", "synchronous behind asynchronous"]
)
def test_collectives_of_all_ranks_end(kind, backend, raised):
    ends_at_once(kind, backend, raised)


@both_backends
@pytest.mark.parametrize("kind", ["recv in a chain", "recv", "send", "batch"])
def test_messages_of_all_ranks_end(kind, backend, raised):
    ends_at_once(kind, backend, raised)


def ends_at_once(kind: str, backend: str, raised: Callable[..., BaseException]) -> None:
    took = [pending_ends(kind, backend, raised)]
    while took[-1] >= AT_ONCE and len(took) < 3:  # the machine may have been busy with something else
        took.append(pending_ends(kind, backend, raised))
    assert took[-1] < AT_ONCE, took


def pending_ends(kind: str, backend: str, raised: Callable[..., BaseException]) -> float:
    """Rank 2 aborts while the others wait. Returns how many seconds later the last of them has its error."""
    entering = threading.Barrier(3, timeout=60)
    aborted_at = [0.0]

    def program(comm: Communicator) -> float:
        check_sum(comm)
        hooked: list[CommError] = []
        comm.register_abort_hook(hooked.append)
        if comm.get_rank() == 2:
            entering.wait()
            before = -1
            while (now := recorded.total()) != before:  # the others have issued what they want
                before = now
                time.sleep(0.005)
            took, aborted_at[0] = 0.0, time.monotonic()
            comm.abort()
            comm.abort()
        else:
            entering.wait()
            error = raised(pending_operations(comm)[kind])
            took = time.monotonic() - aborted_at[0]
            assert type(error) is AbortedError, repr(error)
            assert error.culprits == (2,)
            assert error.comm == "ranks"
            assert "rank 2 aborted the communicator" in error.message
        assert comm.is_aborted()
        for later in (comm.barrier, lambda a: comm.all_reduce(torch.ones(2), SUM, a, timeout=9)):
            assert type(raised(later, False)) is AbortedError
            assert type(raised(later, True)) is AbortedError
        assert type(raised(comm.split, [comm.get_rank()])) is AbortedError
        assert [type(e) for e in hooked] == [AbortedError]
        assert hooked[0].culprits == (2,)
        comm.finalize()
        assert type(raised(comm.barrier, False)) is NotReadyError
        assert comm.is_aborted()
        comm.abort()
        return took

    return max(run_ranks(program, 3, backend=backend, timeout=60))


@both_backends
def test_a_rank_that_comes_later_is_told(backend, raised):
    """Also when the one that aborted had published its part of the operation already."""
    aborted, told = threading.Event(), threading.Event()

    def program(comm: Communicator) -> None:
        if comm.get_rank() == 2:
            assert aborted.wait(60)  # before that, rank 0 may not have told this rank yet
            assert told.wait(60)
            assert not comm.is_aborted()
            error = raised(comm.barrier, False)
            assert type(error) is AbortedError
            assert error.culprits == (0,)
            assert comm.is_aborted()
            return
        work = comm.barrier(True)
        if comm.get_rank() == 0:
            while work.status is not WorkStatus.INPROGRESS:
                time.sleep(0.001)
            comm.abort()
            aborted.set()
        assert type(raised(work.wait, 30)) is AbortedError
        if comm.get_rank() == 1:
            told.set()

    run_ranks(program, 3, backend=backend, timeout=60)


def test_messages_do_not_outlive_an_abort(raised):
    """What was sent before, and not taken yet, is gone with the communicator."""
    aborted = threading.Event()

    def program(comm: Communicator) -> None:
        if comm.get_rank() == 0:
            comm.send(torch.ones(1), 1, False)
            comm.abort()
            aborted.set()
        else:
            assert aborted.wait(60)
            assert type(raised(comm.recv, torch.zeros(1), 0, False)) is AbortedError

    run_ranks(program, 2)


@pytest.mark.parametrize("backend", ["shm", "gloo", "tcp"])
def test_from_another_thread_of_the_rank(backend, raised):
    """What the rank itself waits in ends as well."""
    over = threading.Event()

    def program(comm: Communicator) -> None:
        check_sum(comm)
        if comm.get_rank() == 1:
            assert over.wait(60)
            return
        waiting = [comm.barrier(True, timeout=60), comm.all_reduce(torch.ones(3), SUM, True)]
        assert not waiting[0].is_completed()
        thread = threading.Thread(target=comm.abort)
        thread.start()
        errors = [raised(work.wait, 30) for work in waiting]
        thread.join(30)
        assert [type(e) for e in errors] == [AbortedError] * 2
        assert (errors[0].op, errors[0].rank) == ("barrier", 0)
        assert type(raised(comm.barrier, False)) is AbortedError
        comm.finalize()
        over.set()

    run_ranks(program, 2, backend=backend, timeout=60)


def test_hooks_run_when_the_pending_has_been_told(raised):
    """A hook may wait for what is pending. One that fails hides neither the error nor the other hooks."""
    over = threading.Event()

    def program(comm: Communicator) -> None:
        if comm.get_rank() == 1:
            assert over.wait(60)
            return
        work = comm.barrier(True)
        seen: list[object] = []
        comm.register_abort_hook(lambda error: 1 / 0)
        comm.register_abort_hook(lambda error: seen.append(raised(work.wait, 30)))
        removed = comm.register_abort_hook(lambda error: seen.append("removed"))
        removed.remove()
        comm.abort()
        assert [type(s) for s in seen] == [AbortedError]
        over.set()

    run_ranks(program, 2, timeout=60)


def test_a_hook_that_fails_is_logged(caplog):
    def program(comm: Communicator) -> None:
        comm.register_abort_hook(lambda error: 1 / 0)
        comm.abort()

    with caplog.at_level(logging.ERROR, "unicomm"):
        run_ranks(program, 1)
    assert [r.getMessage() for r in caplog.records] == ["an abort hook failed"]


def test_hooks_run_for_any_error_that_breaks(raised):
    left = threading.Event()

    def program(comm: Communicator) -> None:
        hooked: list[CommError] = []
        comm.register_abort_hook(hooked.append)
        if comm.get_rank() == 1:
            comm.finalize()
            left.set()
            return
        assert left.wait(60)
        assert raised(comm.all_reduce, torch.ones(1), "no op", False)
        assert hooked == []
        error = raised(comm.barrier, False)
        assert hooked == [error]
        assert raised(comm.barrier, False) is not error
        assert len(hooked) == 1

    run_ranks(program, 2, timeout=60)


@pytest.mark.parametrize("backend", ["shm", "gloo", "tcp", "fake"])
def test_an_idle_communicator(backend, raised):
    def program(comm: Communicator) -> None:
        assert not comm.is_aborted()
        comm.abort()
        assert comm.is_aborted()
        error = raised(comm.barrier, False)
        assert type(error) is AbortedError
        assert error.message.startswith("broken earlier: aborted by this rank")
        assert error.culprits == (comm.get_rank(),)
        assert "broken" in repr(comm)

    run_ranks(program, 1, backend=backend)


@both_backends
def test_children_are_communicators_of_their_own(backend, raised):
    summed = threading.Barrier(3, timeout=30)  # an abort takes the others out of what they have not ended yet

    def program(comm: Communicator) -> None:
        child = comm.split([0, 1, 2], "child")
        sibling = comm.split([2, 1, 0], "sibling")
        comm.abort()
        check_sum(child)
        summed.wait()
        if child.get_rank() == 0:
            child.abort()
        assert type(raised(child.barrier, False)) is AbortedError
        check_sum(sibling)
        child.finalize()
        sibling.finalize()

    run_ranks(program, 3, backend=backend)


@pytest.mark.parametrize("kind", ["sync", "async", "two pending", "finalize", "abort"])
def test_a_hook_may_finalize(kind, raised):
    """Whichever thread it runs in, it neither hangs nor closes anything twice."""
    over = threading.Event()

    def program(comm: Communicator) -> None:
        if comm.get_rank() == 1:
            assert over.wait(60)
            return
        comm.register_abort_hook(lambda error: comm.finalize())
        if kind == "sync":
            error = raised(comm.barrier, False, timeout=0.05)
        elif kind == "finalize":
            work = comm.barrier(True)
            error = raised(comm.finalize, 0.05)
            assert type(raised(work.wait, 30)) is AbortedError
        elif kind == "abort":
            work = comm.barrier(True)
            comm.abort()
            error = raised(work.wait, 30)
        else:
            works = [comm.barrier(True, timeout=0.05) for _ in range(1 if kind == "async" else 2)]
            error = [raised(work.wait, 30) for work in works][-1]
        assert isinstance(error, CommError)
        assert "not finished" not in str(error)
        assert type(raised(comm.barrier, False)) is NotReadyError
        comm.finalize()
        over.set()

    run_ranks(program, 2, timeout=60)


def test_a_callback_may_finalize(raised):
    """When nothing is left that its thread has to run; else it is told so."""
    added = threading.Event()

    def program(comm: Communicator) -> None:
        if comm.get_rank() == 1:
            assert added.wait(60)
        results: list[object] = []
        done = threading.Event()
        first, second = comm.barrier(True), comm.barrier(True)
        if comm.get_rank() == 0:
            first.add_done_callback(lambda _: results.append(raised(comm.finalize)))
            second.add_done_callback(lambda _: (results.append(comm.finalize()), done.set()))
            added.set()
            assert done.wait(60)
            assert type(results[0]) is NotReadyError
            assert results[1] is None
            assert type(raised(comm.barrier, False)) is NotReadyError
        second.wait(30)

    run_ranks(program, 2, timeout=60)


def test_an_unexpected_error_in_an_operation_breaks_the_communicator(monkeypatch):
    """A rank that fails in the middle must not go on out of step with the others."""

    def program(comm):
        backend = comm.unsafe_backend
        if comm.get_rank() == 0:
            monkeypatch.setattr(backend, "run", lambda call: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                comm.all_gather([torch.empty(2), torch.empty(2)], torch.ones(2), False)
        else:
            with pytest.raises(AbortedError) as caught:
                comm.all_gather([torch.empty(2), torch.empty(2)], torch.ones(2), False)
            assert caught.value.culprits == (0,)
        with pytest.raises((BackendError, AbortedError)):
            comm.barrier(False)
        return comm.is_aborted()

    assert run_ranks(program, 2) == [True, True]


def test_who_finalizes_while_another_thread_aborts_has_not_left(raised: Callable[..., BaseException]) -> None:
    """The others hear the abort first, however long it takes."""
    order: list[str] = []
    begun, refused = threading.Event(), threading.Event()

    def program(comm: Communicator) -> None:
        backend: Any = comm.unsafe_backend
        abort, close = backend.abort, backend.close

        def slow_abort() -> None:
            begun.set()
            assert refused.wait(30)
            threading.Event().wait(0.05)  # so that whoever does not wait for it comes first
            order.append("abort")
            abort()

        def noted_close() -> None:
            order.append("close")
            close()

        backend.abort, backend.close = slow_abort, noted_close
        thread = threading.Thread(target=comm.abort)
        thread.start()
        assert begun.wait(30)
        assert type(raised(comm.barrier, False)) is AbortedError
        refused.set()
        comm.finalize()
        thread.join()

    run_ranks(program, 1, backend="shm")
    assert order == ["abort", "close"]
