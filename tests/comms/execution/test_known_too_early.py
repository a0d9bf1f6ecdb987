"""What a Work says of an operation that has just failed, by events that are over before anybody knows why."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.comms.inside import engine, executor, post
from tests.threads import results
from unicomm import AbortedError, CommError, Communicator, ReduceOp, new_comm
from unicomm.c10d.compat import HashStore
from unicomm.comms.execution import message_queue
from unicomm.comms.execution.device.executor import StreamExecutor
from unicomm.comms.execution.device.work import StreamWork
from unicomm.comms.work import WorkStatus
from unicomm.testing import run_ranks

ERROR = AbortedError("ended by another rank")


class Executor:
    """One whose device is done with everything. `look`: what the watchdog does while a thread asks."""

    def __init__(self, look: Any) -> None:
        self.guard, self.streams, self._look = threading.Lock(), SimpleNamespace(is_over=lambda _: True), look

    def error_of(self, work: StreamWork) -> BaseException | None:
        found: BaseException | None = self._look(work)
        return found


def work_of(look: Any) -> StreamWork:
    return StreamWork("all_reduce", 1, Executor(look), None)


def test_an_error_that_comes_while_a_thread_asks_is_raised():
    work = work_of(lambda work: work._over(ERROR))
    with pytest.raises(AbortedError):
        work.wait_blocking()
    assert work.exception() is ERROR
    assert work.status is WorkStatus.ERROR


def test_an_operation_that_an_abort_has_ended_has_not_succeeded():
    work = work_of(lambda work: ERROR)
    assert work.is_completed()
    assert work.exception() is ERROR
    assert work.status is WorkStatus.ERROR
    with pytest.raises(AbortedError):
        work.wait()


def test_a_wait_of_symmetric_memory_that_was_late_has_not_succeeded():
    memory = SimpleNamespace(late_error=lambda: ERROR)
    of = SimpleNamespace(_engine=SimpleNamespace(broken=None, symmetric=memory))
    of._of_symmetric_memory = lambda: StreamExecutor._of_symmetric_memory(of)
    work: Any = SimpleNamespace(_done=False)
    assert StreamExecutor.error_of(of, work) is ERROR
    work._done = True
    assert StreamExecutor.error_of(of, work) is None


@pytest.mark.parametrize("backend", ["shm", "gloo", "tcp", "auto"])
def test_a_message_behind_a_pending_collective_is_posted_at_once(backend):
    """Rank 1 comes to both when rank 0 has posted them: what it waits for before that needs rank 0."""
    posted = threading.Event()

    def program(comm: Communicator) -> None:
        me, x = comm.get_rank(), torch.ones(3)
        if me == 0:
            collective = comm.all_reduce(x, ReduceOp.SUM, async_op=True)
            message = post(comm, "send", torch.full((3,), 7.0), 1)
            posted.set()
            collective.wait()
            message.wait()
        else:
            assert posted.wait(20)
            comm.all_reduce(x, ReduceOp.SUM)
            if me == 1:
                got = torch.zeros(3)
                post(comm, "recv", got, 0).wait()
                assert got.tolist() == [7.0] * 3
        assert x.tolist() == [3.0] * 3

    hints = {"hosts": "a,b,a"} if backend == "auto" else None
    run_ranks(program, 3, backend=backend, hints=hints, timeout=60)


class Watched:
    """Wraps an engine. When the fast path is unblocked, notes in `broken` whether the engine is broken."""

    def __init__(self, engine: Any, broken: list[bool]) -> None:
        self._real, self._broken, self.fast = engine, broken, self

    def unblock(self) -> None:
        self._broken.append(self._real.broken is not None)
        self._real.fast.unblock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def test_nothing_overtakes_messages_that_fail(monkeypatch):
    """The queue keeps the fast path until the communicator is broken: else another thread's receive could
    take the message of one that is about to fail."""
    store, broken = HashStore(), []
    comms = results(
        [
            lambda r=r: new_comm("shm", "cpu", name="q", store=store, rank=r, size=2, timeout=20)
            for r in (0, 1)
        ]
    )
    work = post(comms[0], "recv", torch.zeros(3), 1)
    queue = executor(comms[0]).messages

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    queue._opened().run = interrupted
    monkeypatch.setattr(queue, "_engine", Watched(engine(comms[0]), broken))
    queue._worker = SimpleNamespace(driving=set(), submit=None)  # nobody else runs it
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    assert broken == [True]
    with pytest.raises(CommError):
        work.wait()
    for comm in comms:
        comm.abort()
        comm.finalize()


@pytest.mark.parametrize("backend", ["shm", "gloo", "tcp", "auto"])
def test_a_hook_finalizes_when_a_queued_message_has_failed(backend):
    """Its thread has moved the messages, and is not waited for."""
    ended: list[BaseException | None] = []

    def finalizes(comm: Communicator) -> None:
        try:
            comm.finalize()
            ended.append(None)
        except CommError as error:
            ended.append(error)

    posted = threading.Event()

    def program(comm: Communicator) -> None:
        if comm.get_rank() == 1:
            assert posted.wait(20)
            comm.abort()
        elif comm.get_rank() == 0:
            comm.register_abort_hook(lambda *_: finalizes(comm))
            message = post(comm, "recv", torch.zeros(3), 1)
            posted.set()
            with pytest.raises(CommError):
                message.wait()

    run_ranks(program, 3, backend=backend, hints={"hosts": "a,b,a"} if backend == "auto" else None)
    assert ended == [None]


@pytest.mark.parametrize("backend", ["shm", "gloo", "tcp"])
def test_an_interrupt_in_a_callback_ends_the_other_messages(backend):
    """The message whose callback was interrupted has succeeded, and stays so."""

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    def program(comm: Communicator) -> None:
        if comm.get_rank() == 1:
            with contextlib.suppress(CommError):  # rank 0 ends the communicator when it has come
                comm.send(torch.ones(3), 0)
            return
        first, second = (post(comm, "recv", torch.zeros(3), 1) for _ in range(2))
        first.add_done_callback(interrupt)
        with pytest.raises(KeyboardInterrupt):
            second.wait()
        first.wait()
        with pytest.raises(CommError):
            second.wait()
        with pytest.raises(CommError):
            comm.barrier()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(message_queue._hand_over, "watch", lambda queue: None)
        run_ranks(program, 2, backend=backend, timeout=20)
