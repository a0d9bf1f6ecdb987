"""`finalize` while an operation runs: from another thread, from a hook, from a signal handler."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

import unicomm
from tests.comms.execution.finalizing import (
    BACKENDS,
    finalize_in_a_signal_handler,
    ranks,
    until_on_fast_path,
    until_on_general_path,
)
from tests.comms.inside import engine, executor, post
from tests.eventually import eventually
from tests.threads import outcomes
from unicomm import CommError, Communicator, ReduceOp

SUM = ReduceOp.SUM


@pytest.mark.parametrize(("backend", "n", "hints"), BACKENDS)
def test_an_operation_of_another_thread_ends_first(backend, n, hints):
    """The others come while finalize waits: all get the sum."""
    comms = ranks(n, backend, hints)
    tensors = [torch.ones(5) for _ in comms]
    for comm in comms:
        comm.register_pre_hook(lambda *_: None)  # off the native path

    def first() -> None:
        comms[0].all_reduce(tensors[0], SUM)

    def ends() -> None:
        until_on_general_path(comms[0])
        comms[0].finalize(20)

    def other(rank: int) -> None:
        until_on_general_path(comms[0])
        time.sleep(0.2)
        comms[rank].all_reduce(tensors[rank], SUM)

    got = outcomes([first, ends, *(lambda r=r: other(r) for r in range(1, n))])
    assert got == [None] * len(got)
    assert all(bool((t == n).all()) for t in tensors)
    for comm in comms:
        comm.finalize()


@pytest.mark.parametrize(("backend", "n", "hints"), BACKENDS)
@pytest.mark.parametrize("native", [True, False])
def test_an_operation_that_cannot_end_is_aborted(backend, n, hints, native):
    comms = ranks(n, backend, hints)
    if not native:
        comms[0].register_pre_hook(lambda *_: None)

    def ends() -> None:
        if native and engine(comms[0]).has_native_path:
            until_on_fast_path(comms[0])
        else:
            until_on_general_path(comms[0])
        comms[0].finalize(0.3)

    runs, ended = outcomes([lambda: comms[0].all_reduce(torch.ones(5), SUM), ends])
    assert isinstance(runs, CommError), repr(runs)
    assert isinstance(ended, unicomm.CommTimeoutError), repr(ended)
    assert "all_reduce #1" in str(ended)
    with pytest.raises(CommError):
        comms[0].barrier()
    for comm in comms[1:]:
        comm.finalize()


def post_when_drained(comm: Communicator, post: Any) -> None:
    """Has another thread call `post` between two waits of finalize for what is pending."""
    drain = executor(comm).drain

    def drain_and_post(timeout: float) -> bool:
        executor(comm).drain = drain
        drained = bool(drain(timeout))
        thread = threading.Thread(target=post)
        thread.start()
        thread.join(20)
        return drained

    executor(comm).drain = drain_and_post


@pytest.mark.parametrize(("backend", "n", "hints"), BACKENDS)
@pytest.mark.parametrize("worked", [False, True])
def test_messages_that_another_thread_posts_at_the_last_moment_end_first(backend, n, hints, worked):
    comms = ranks(n, backend, hints)
    if worked:  # the worker's thread runs already
        outcomes([lambda c=c: c.barrier(async_op=True).wait() for c in comms])
    got, works = torch.zeros(3), []
    post_when_drained(comms[0], lambda: works.append(post(comms[0], "recv", got, 1)))

    def sends() -> None:
        eventually(lambda: works)
        post(comms[1], "send", torch.ones(3), 0).wait()

    assert outcomes([lambda: comms[0].finalize(20), sends]) == [None, None]
    works[0].wait()
    assert got.tolist() == [1, 1, 1]
    for comm in comms:
        comm.finalize()


@pytest.mark.parametrize(("backend", "n", "hints"), BACKENDS)
def test_messages_posted_at_the_last_moment_are_aborted_if_they_cannot_end(backend, n, hints):
    comms = ranks(n, backend, hints)
    outcomes([lambda c=c: c.barrier(async_op=True).wait() for c in comms])
    works: list[Any] = []
    post_when_drained(comms[0], lambda: works.append(post(comms[0], "recv", torch.zeros(3), 1)))
    with pytest.raises(unicomm.CommTimeoutError, match="still pending"):
        comms[0].finalize(0.3)
    with pytest.raises(CommError):
        works[0].wait()
    for comm in comms[1:]:
        comm.finalize()


@pytest.mark.parametrize(("backend", "n", "hints"), BACKENDS)
@pytest.mark.parametrize("kind", ["pre", "post", "abort"])
@pytest.mark.parametrize("async_op", [False, True])
def test_from_a_hook(backend, n, hints, kind, async_op):
    """A hook of rank 0 finalizes; every call returns or raises a CommError."""
    comms = ranks(n, backend, hints)
    getattr(comms[0], f"register_{kind}_hook")(lambda *_: comms[0].finalize(5))

    def job(comm: Communicator) -> None:
        work = comm.all_reduce(torch.ones(5), SUM, async_op=async_op, timeout=3)
        if kind == "abort" and comm is comms[0]:
            comm.abort()
        work.wait()
        comm.barrier(timeout=3)

    got = outcomes([lambda c=c: job(c) for c in comms])
    assert all(isinstance(error, CommError) for error in got), got
    if kind == "pre":
        assert isinstance(got[0], unicomm.NotReadyError)
    for comm in comms:
        comm.finalize()


def test_a_hook_while_another_thread_finalizes():
    """Neither waits for the other: the thread in the hook holds the order that finalize waits for."""
    (comm,) = ranks(1, "shm", None)
    waiting = threading.Event()

    def hook(*_: object) -> None:
        waiting.set()
        time.sleep(0.5)  # the other thread is in finalize now
        comm.finalize(5)

    comm.register_pre_hook(hook)

    def ends() -> None:
        waiting.wait(10)
        comm.finalize(10)

    start = time.monotonic()
    assert outcomes([lambda: comm.barrier() and None, ends]) == [None, None]
    assert time.monotonic() - start < 4
    with pytest.raises(unicomm.NotReadyError):
        comm.barrier()


@pytest.mark.parametrize(("backend", "n", "hints"), BACKENDS)
def test_from_a_signal_handler(backend, n, hints):
    """In the midst of an operation of the main thread: refused at once, and abort is what helps."""
    comms = ranks(n, backend, hints)
    comms[0].register_pre_hook(lambda *_: None)
    assert "very thread" in finalize_in_a_signal_handler(comms[0], until_on_general_path)
    for comm in comms:
        comm.finalize()
