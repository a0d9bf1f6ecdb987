"""Asynchronous operations: in the background, in order, and what a Work promises."""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref

import pytest
import torch

import unicomm
from tests.comms import inside
from tests.comms.calls import check_sum
from unicomm import (
    AbortedError,
    CommTimeoutError,
    Communicator,
    InvalidArgumentError,
    MismatchError,
    NotReadyError,
    ReduceOp,
    Work,
    WorkStatus,
)
from unicomm.testing import run_ranks

SUM = ReduceOp.SUM
both_backends = pytest.mark.parametrize("backend", ["shm", "gloo", "tcp"])


@both_backends
def test_in_the_background_and_in_order(backend, raised, eventually):
    """The call returns while the other rank has not even come; later operations wait for earlier ones."""
    come = threading.Event()

    def program(comm: Communicator) -> None:
        x, y = torch.ones(4), torch.full((4,), float(comm.get_rank()))
        if comm.get_rank() == 1:
            assert come.wait(20)
        first = comm.all_reduce(x, SUM, True)
        second = comm.broadcast(y, 0, True)
        third = comm.all_reduce(x, SUM, True)
        if comm.get_rank() == 0:
            eventually(lambda: first.status is WorkStatus.INPROGRESS)
            assert [w.is_completed() for w in (first, second, third)] == [False] * 3
            assert second.status is third.status is WorkStatus.NOT_STARTED
            assert first.exception() is None
            error = raised(third.wait, 0.01)
            assert type(error) is CommTimeoutError
            assert (error.op, error.seq) == ("all_reduce", 3)
            assert type(raised(first.wait_blocking, timeout=0.01)) is CommTimeoutError
            assert not come.is_set()
            assert third.status is WorkStatus.NOT_STARTED  # the wait ended, the operation did not
            come.set()
        third.wait(20)
        assert [w.status for w in (first, second, third)] == [WorkStatus.COMPLETED] * 3
        assert [w.seq for w in (first, second, third)] == [1, 2, 3]
        assert x.tolist() == [4.0] * 4
        assert y.tolist() == [0.0] * 4
        third.wait()
        third.wait_blocking()

    run_ranks(program, 2, backend=backend)


@both_backends
def test_a_synchronous_operation_waits_for_those_before_it(backend):
    come = threading.Event()

    def program(comm: Communicator) -> list[float]:
        x = torch.ones(3)
        if comm.get_rank() == 1:
            assert come.wait(20)
        work = comm.all_reduce(x, SUM, True)
        if comm.get_rank() == 0:
            come.set()
        again = comm.all_reduce(x, SUM, False)
        assert work.is_completed()
        assert again.status is WorkStatus.COMPLETED
        assert (work.seq, again.seq) == (1, 2)
        last = comm.all_reduce(x, SUM, False)  # nothing is pending any more: the direct way again
        assert last.seq == 3
        return x.tolist()

    assert run_ranks(program, 2, backend=backend) == [[8.0] * 3] * 2


@both_backends
def test_many_outstanding(backend):
    count = 300 if backend == "shm" else 60

    def program(comm: Communicator) -> None:
        tensors = [torch.full((50,), float(i)) for i in range(count)]
        works = [comm.all_reduce(x, SUM, True) for x in tensors]
        for work in reversed(works):
            work.wait()
        assert [w.seq for w in works] == list(range(1, count + 1))
        assert all(bool((x == 3 * i).all()) for i, x in enumerate(tensors))

    run_ranks(program, 3, backend=backend)


@both_backends
def test_messages(backend):
    def program(comm: Communicator) -> None:
        me, other = comm.get_rank(), 1 - comm.get_rank()
        x, y = torch.full((1000,), me + 1.0), torch.zeros(1000)
        if me == 0:
            works = [comm.send(x, other, True), comm.recv(y, other, True)]
        else:
            works = [comm.recv(y, other, True), comm.send(x, other, True)]
        check_sum(comm)
        assert all(w.is_completed() for w in works)
        assert bool((y == other + 1).all())

    run_ranks(program, 2, backend=backend)


@both_backends
def test_a_dropped_work(backend, eventually):
    """Dropping it blocks nobody and loses nothing: its tensors live until it has run, and no longer."""
    come = threading.Event()

    def program(comm: Communicator) -> float:
        if comm.get_rank() == 1:
            assert come.wait(20)
            x = torch.zeros(5)
            comm.all_reduce(x, SUM, False)
            comm.barrier(False)
            return x[0].item()
        x = torch.full((5,), 3.0)
        alive = weakref.ref(x)
        comm.all_reduce(x, SUM, True)
        del x
        gc.collect()
        assert alive() is not None
        come.set()
        comm.barrier(False)
        eventually(lambda: alive() is None)  # the worker may be about to let go
        return 3.0

    assert run_ranks(program, 2, backend=backend) == [3.0, 3.0]


def test_a_dropped_work_that_failed(eventually):
    """Nor does an error keep the tensors of its operation until the next one."""

    def program(comm: Communicator) -> None:
        x = torch.ones(5 + comm.get_rank())
        alive = weakref.ref(x)
        failed = threading.Event()
        comm.all_reduce(x, SUM, True).add_done_callback(lambda _: failed.set())
        del x
        assert failed.wait(20)
        eventually(lambda: gc.collect() >= 0 and alive() is None)
        check_sum(comm)

    run_ranks(program, 2)


def test_an_error_stays_an_error(raised):
    def program(comm: Communicator) -> None:
        work = comm.all_reduce(torch.ones(5 + comm.get_rank()), SUM, True)
        fine = comm.barrier(True)
        first = raised(work.wait)
        assert type(first) is MismatchError
        assert raised(work.wait) is first
        assert raised(work.wait_blocking, 1.0) is first
        assert work.exception() is first
        assert work.is_completed()
        assert work.status is WorkStatus.ERROR
        fine.wait()
        assert fine.exception() is None

    run_ranks(program, 2)


def test_the_status_of_a_timeout(raised):
    over = threading.Event()

    def program(comm: Communicator) -> None:
        if comm.get_rank() == 1:
            assert over.wait(20)
            return
        work = comm.barrier(True, timeout=0.05)
        assert type(raised(work.wait)) is CommTimeoutError
        assert work.status is WorkStatus.TIMEDOUT
        over.set()

    run_ranks(program, 2)


def test_a_synchronous_work_has_completed():
    def program(comm: Communicator) -> None:
        for work in (comm.barrier(False), comm.broadcast(torch.ones(2, dtype=torch.complex64), 0, False)):
            assert type(work) is Work is unicomm.TorchWork
            assert work.is_completed()
            assert work.status is WorkStatus.COMPLETED
            work.wait()
            work.wait(timeout=0.001)
            assert work.exception() is None
        assert repr(work) == "<Work broadcast #2: completed>"

    run_ranks(program, 2)


def test_waiting_for_a_time_that_is_none(raised):
    come = threading.Event()

    def program(comm: Communicator) -> None:
        if comm.get_rank() == 1:
            assert come.wait(20)
        work = comm.barrier(True)
        if comm.get_rank() == 0:
            assert type(raised(work.wait, -1)) is InvalidArgumentError
            assert type(raised(work.wait, "1")) is InvalidArgumentError
            come.set()
        work.wait(float("inf"))

    run_ranks(program, 2)


# --- finalize -------------------------------------------------------------------------------------------


@both_backends
def test_finalize_waits_for_its_thread_however_short_its_timeout(backend, eventually):
    """Nothing is pending then: a callback still runs, or the machine is busy with something else."""
    come, timeout = threading.Event(), 0.05

    def program(comm: Communicator) -> None:
        x = torch.ones(3)
        if comm.get_rank() == 1:
            assert come.wait(60)
            comm.all_reduce(x, SUM, False)
            return

        def linger(_: Work) -> None:
            eventually(lambda: inside.engine(comm).finalized)
            end = time.monotonic() + 4 * timeout
            eventually(lambda: time.monotonic() > end)
            lingered.append(True)

        lingered: list[bool] = []
        work = comm.all_reduce(x, SUM, True)
        work.add_done_callback(linger)
        come.set()
        work.wait()
        comm.finalize(timeout)
        assert lingered

    run_ranks(program, 2, backend=backend)


@both_backends
def test_finalize_runs_what_is_pending(backend):
    come = threading.Event()

    def program(comm: Communicator) -> None:
        if comm.get_rank() == 1:
            assert come.wait(20)
        x = torch.ones(1000)
        works = [comm.all_reduce(x, SUM, True) for _ in range(5)]
        come.set()
        comm.finalize()
        assert [w.status for w in works] == [WorkStatus.COMPLETED] * 5
        assert bool((x == 32).all())

    run_ranks(program, 2, backend=backend)


def test_finalize_names_what_is_still_pending(raised):
    gone = threading.Event()

    def program(comm: Communicator) -> None:
        if comm.get_rank() == 1:
            assert gone.wait(20)
            error = raised(comm.barrier, False)
            assert type(error) is AbortedError
            assert error.culprits == (0,)
            return
        works = [
            comm.all_reduce(torch.ones(2), SUM, True),
            comm.barrier(True),
            comm.recv(torch.ones(1), 1, True),
        ]
        error = raised(comm.finalize, 0.05)
        assert type(error) is CommTimeoutError
        assert (error.op, error.comm, error.rank) == ("finalize", "ranks", 0)
        assert error.message == "still pending after 0.05 s, and aborted: all_reduce #1, barrier #2, recv #1"
        for work in works:
            assert type(raised(work.wait)) is AbortedError
        assert type(raised(comm.barrier, False)) is NotReadyError
        comm.finalize()
        gone.set()

    run_ranks(program, 2)


def test_leaving_the_block_by_an_error_does_not_wait(raised):
    over = threading.Event()

    def program(comm: Communicator) -> None:
        if comm.get_rank() == 1:
            assert over.wait(20)
            return
        works = []

        def block() -> None:
            with comm:
                works.append(comm.barrier(True))
                raise ZeroDivisionError

        assert type(raised(block)) is ZeroDivisionError
        assert type(raised(works[0].wait)) is AbortedError
        assert type(raised(comm.barrier, False)) is NotReadyError
        over.set()

    run_ranks(program, 2, timeout=300)


# --- callbacks --------------------------------------------------------------------------------------------


def test_callbacks():
    come = threading.Event()

    def program(comm: Communicator) -> None:
        if comm.get_rank() == 1:
            assert come.wait(20)
        work = comm.barrier(True)
        seen: list[tuple[str, bool, str]] = []
        done = threading.Event()

        def note(name: str) -> None:
            thread = "own" if threading.current_thread() is here else "worker"
            seen.append((name, work.is_completed(), thread))

        here = threading.current_thread()
        if comm.get_rank() == 0:
            work.add_done_callback(lambda w: note("a"))
            work.add_done_callback(lambda w: note("b"))
            work.add_done_callback(lambda w: done.set())
            assert seen == []
            come.set()
            assert done.wait(20)
            assert seen == [("a", True, "worker"), ("b", True, "worker")]
        work.wait()
        seen.clear()
        work.add_done_callback(lambda w: note("late"))
        assert seen == [("late", True, "own")]
        comm.barrier(False).add_done_callback(lambda w: note("sync"))
        assert seen[1] == ("sync", True, "own")

    run_ranks(program, 2)


def test_a_callback_that_raises_changes_nothing(caplog):
    def program(comm: Communicator) -> None:
        def fail(_: Work) -> None:
            raise ValueError("a bug of the user")

        work = comm.barrier(True)
        work.add_done_callback(fail)
        comm.barrier(True).wait(20)
        work.wait()
        work.add_done_callback(fail)
        check_sum(comm)

    with caplog.at_level(logging.ERROR, "unicomm"):
        run_ranks(program, 2)
    assert (
        sum("a callback of <Work barrier #1: completed> failed" in r.getMessage() for r in caplog.records)
        == 4
    )


def test_a_callback_sees_the_error():
    def program(comm: Communicator) -> None:
        seen: list[BaseException | None] = []
        done = threading.Event()
        work = comm.all_reduce(torch.ones(5 + comm.get_rank()), SUM, True)
        work.add_done_callback(lambda w: (seen.append(w.exception()), done.set()))
        assert done.wait(20)
        assert isinstance(seen[0], MismatchError)

    run_ranks(program, 2)


def test_operations_from_callbacks(raised):
    """Asynchronous ones may be issued; waiting for what this very thread has to run is an error, no hang."""
    added = threading.Barrier(3, timeout=20)

    def program(comm: Communicator) -> None:
        results: list[object] = []
        done = threading.Event()
        x = torch.ones(2)
        if comm.get_rank() == 2:
            added.wait()
        first = comm.barrier(True)
        second = comm.all_reduce(x, SUM, True)

        def go_on(_: Work) -> None:
            results.append(raised(second.wait))
            results.append(raised(comm.barrier, False))
            results.append(raised(comm.send, x, 2, False))
            results.append(comm.all_reduce(x, SUM, True))
            done.set()

        if comm.get_rank() == 2:
            last = comm.all_reduce(x, SUM, True)
        else:
            first.add_done_callback(go_on)  # before the last rank comes: it will run in the worker's thread
            added.wait()
            assert done.wait(20)
            assert [type(r) for r in results[:3]] == [NotReadyError] * 3
            assert all("this very thread" in str(r) for r in results[:3])
            last = results[3]
        last.wait()
        assert last.seq == 3  # what was refused was not numbered
        assert x.tolist() == [9.0] * 2
        check_sum(comm)

    run_ranks(program, 3)
