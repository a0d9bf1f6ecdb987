"""Calls in a signal handler that has interrupted an operation of the same communicator.

Such a call could never end, since the operation cannot go on before the handler returns. It raises
`NotReadyError` at once; if the handler catches that, the operation goes on.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.comms.execution.finalizing import BACKENDS, ranks, until_on_fast_path, until_on_general_path
from tests.comms.inside import engine, executor, post
from tests.eventually import eventually
from tests.threads import results
from unicomm import CommError, Communicator, NotReadyError, ReduceOp
from unicomm.comms.execution import message_queue

CALLS = {
    "all_reduce": lambda comm: comm.all_reduce(torch.ones(5), ReduceOp.SUM),
    "all_reduce_in_time": lambda comm: comm.all_reduce(torch.ones(5), ReduceOp.SUM, timeout=5),
    "barrier": lambda comm: comm.barrier(),
    "later": lambda comm: comm.barrier(async_op=True),
    "send": lambda comm: comm.send(torch.ones(5), 1),
    "queued_send": lambda comm: post(comm, "send", torch.ones(5), 1),
}


@pytest.fixture
def no_hand_over(monkeypatch):
    """Keeps queued messages for the thread that waits for them: a slow one would find the worker at them."""
    monkeypatch.setattr(message_queue._hand_over, "watch", lambda queue: None)


def until_moving(comm: Communicator) -> None:
    """Returns when the main thread moves queued messages."""
    eventually(lambda: threading.main_thread().ident in executor(comm).driving)


def interrupted(
    operation: Callable[[], object],
    others: list[Callable[[], object]],
    until_running: Callable[[], object],
    call: Callable[[], object],
    caught: bool = True,
) -> BaseException | None:
    """Returns what `call` raises in a handler that interrupts `operation` of the main thread.

    The other ranks come when the handler has returned. `caught`: the handler lets nothing out; else they come
    when the operation has ended, which would succeed if they came just while the handler raises.
    """
    raised: list[BaseException | None] = []

    def handler(*_: object) -> None:
        try:
            call()
            raised.append(None)
        except BaseException as error:
            raised.append(error)
            if not caught:
                raise

    def interrupts() -> None:
        until_running()
        time.sleep(0.1)  # it waits by now
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
        eventually(lambda: raised)

    interrupted_once = threading.Event()

    def interrupts_once() -> None:
        try:
            interrupts()
        finally:
            if caught:
                interrupted_once.set()

    def comes(other: Callable[[], object]) -> None:
        assert interrupted_once.wait(60)
        other()

    # The calls of the others run in another thread, as signals are for the main one.
    calls = [interrupts_once, *(lambda other=other: comes(other) for other in others)]
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(results, calls)
            try:
                operation()
            finally:
                interrupted_once.set()
            done.result()
    finally:
        signal.signal(signal.SIGUSR1, before)
    (error,) = raised
    return error


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(("backend", "n", "hints"), BACKENDS)
def test_a_call_amid_a_collective_is_refused(backend, n, hints, native, call):
    comms = ranks(n, backend, hints)
    if not native:
        comms[0].register_pre_hook(lambda *_: None)
    native = native and engine(comms[0]).has_native_path
    until = until_on_fast_path if native else until_on_general_path
    tensors = [torch.ones(5) for _ in comms]
    jobs = [lambda c=c, t=t: c.all_reduce(t, ReduceOp.SUM) for c, t in zip(comms, tensors, strict=True)]
    error = interrupted(jobs[0], jobs[1:], lambda: until(comms[0]), lambda: CALLS[call](comms[0]))
    assert isinstance(error, NotReadyError), repr(error)
    assert "in the midst of all_reduce #1" in str(error)
    assert all(bool((t == n).all()) for t in tensors)
    results([comm.barrier for comm in comms])  # nothing was counted
    for comm in comms:
        comm.finalize()


@pytest.mark.usefixtures("no_hand_over")
@pytest.mark.parametrize("sender", [0, 1, -1])
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(("backend", "n", "hints"), BACKENDS)
def test_an_error_that_a_handler_lets_out_ends_the_operation(backend, n, hints, native, sender):
    """As any other exception of a handler: the communicator is broken, and the others are told.

    `sender`: of a message that rank 0 waits for; 0 for a collective.
    """
    comms = ranks(n, backend, hints)
    if not native:
        comms[0].register_pre_hook(lambda *_: None)
    got: list[BaseException] = []

    def other(comm: Communicator) -> None:
        try:
            comm.barrier()  # which rank 0 may have come to before
            comm.barrier()
        except CommError as error:
            got.append(error)

    if sender:
        operation = post(comms[0], "recv", torch.zeros(5), sender % n).wait
        until = until_moving
    else:
        operation = comms[0].barrier
        until = until_on_fast_path if native and engine(comms[0]).has_native_path else until_on_general_path

    def fails() -> None:
        with pytest.raises(NotReadyError):
            operation()

    error = interrupted(
        fails,
        [lambda c=c: other(c) for c in comms[1:]],
        lambda: until(comms[0]),
        comms[0].barrier if sender else comms[0].finalize,
        caught=False,
    )
    assert isinstance(error, NotReadyError)
    with pytest.raises(CommError):
        comms[0].barrier()
    assert [type(e).__name__ for e in got] == ["AbortedError"] * (n - 1), got
    assert all(e.culprits == (0,) for e in got)
    for comm in comms:
        comm.finalize()


@pytest.mark.usefixtures("no_hand_over")
@pytest.mark.parametrize(("backend", "n", "hints"), BACKENDS)
def test_a_work_that_this_thread_has_to_move_cannot_be_waited_for(backend, n, hints):
    """A later operation may be issued while the thread moves messages: it runs when they are over."""
    comms = ranks(n, backend, hints)
    works: list[Any] = []

    def issues() -> None:
        works.append(comms[0].barrier(async_op=True))
        works[0].wait()

    def sends() -> None:
        post(comms[1], "send", torch.ones(5), 0).wait()
        comms[1].barrier()

    work = post(comms[0], "recv", torch.zeros(5), 1)
    others = [sends, *(comm.barrier for comm in comms[2:])]
    error = interrupted(work.wait, others, lambda: until_moving(comms[0]), issues)
    assert isinstance(error, NotReadyError), repr(error)
    works[0].wait()
    for comm in comms:
        comm.finalize()


@pytest.mark.usefixtures("no_hand_over")
@pytest.mark.parametrize("call", ["all_reduce", "barrier"])
@pytest.mark.parametrize(("backend", "n", "hints"), BACKENDS)
def test_a_call_while_the_thread_moves_messages_is_refused(backend, n, hints, call):
    comms = ranks(n, backend, hints)
    got = torch.zeros(5)
    work = post(comms[0], "recv", got, 1)

    error = interrupted(
        work.wait,
        [lambda: post(comms[1], "send", torch.ones(5), 0).wait()],
        lambda: until_moving(comms[0]),
        lambda: CALLS[call](comms[0]),
    )
    assert isinstance(error, NotReadyError), repr(error)
    assert "in the midst of its messages" in str(error)
    assert got.tolist() == [1] * 5
    for comm in comms:
        comm.finalize()
