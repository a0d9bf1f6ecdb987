"""The end of communicators whose operations graphs hold: the library waits for these, nobody else."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
from double_graphs import Together

import unicomm
from unicomm import Communicator
from unicomm.comms.errors import CommTimeoutError
from unicomm.comms.execution.device import graphs
from unicomm.testing import run_ranks

SUM = unicomm.ReduceOp.SUM


def captured(together: Together, comm: Communicator):
    x = torch.ones(4)
    graph = together.capture(comm, lambda: comm.all_reduce(x, SUM, False))
    graph.replay()
    assert comm._engine.executor.drain(30)
    assert x.tolist() == [2.0] * 4
    return graph


def is_there(native, handle: int) -> bool:
    return native.count(handle)[0] == 0


def test_finalize_does_not_wait_for_graphs(double, eventually):
    together = Together(2)

    def program(comm: Communicator) -> None:
        graph = captured(together, comm)
        backend = comm.unsafe_backend
        native, handle, streams = backend._handle.native, backend._handle.comm, backend.streams()
        assert graphs.alive(streams) == 1
        comm.finalize()
        assert is_there(native, handle)  # the library's, for as long as the graph
        graph.reset()
        assert graphs.alive(streams) == 0
        eventually(lambda: not is_there(native, handle))

    run_ranks(program, 2, backend=double)


def test_finalize_waits_for_the_library_when_graphs_are_gone(double):
    together = Together(2)

    def program(comm: Communicator) -> None:
        graph = captured(together, comm)
        backend = comm.unsafe_backend
        native, handle = backend._handle.native, backend._handle.comm
        del graph
        comm.finalize()
        assert not is_there(native, handle)

    run_ranks(program, 2, backend=double)


def test_an_abort_does_not_wait_for_graphs(double):
    """Else the watchdog would, and no other communicator would be looked after."""
    together = Together(2)

    def program(comm: Communicator) -> None:
        graph = captured(together, comm)
        comm.abort()
        assert comm.is_aborted()
        comm.finalize()
        del graph

    began = time.monotonic()
    run_ranks(program, 2, backend=double)
    assert time.monotonic() - began < 60


def test_a_call_that_does_not_return_is_left_alone(double, monkeypatch):
    """Whatever keeps an abort, such as the device's work for other communicators."""
    from unicomm.backends.nccl import backend as module

    together = Together(2)
    monkeypatch.setattr(module, "ABORT_SECONDS", 0.05)
    monkeypatch.setattr(graphs, "alive", lambda streams: 0)

    def program(comm: Communicator) -> None:
        graph = captured(together, comm)
        comm.abort()
        del graph

    run_ranks(program, 2, backend=double)


def test_a_split_waits_for_what_is_under_way(double):
    """The library splits a communicator without operations only, and else may wait for ever."""

    def program(comm: Communicator) -> list[float]:
        streams = comm._engine.executor.streams
        x = torch.ones(4)
        streams.sleep(200)
        comm.all_reduce(x, SUM, True)
        half = comm.split([0, 1] if comm.get_rank() < 2 else [], "half")
        assert not comm._engine.executor.busy
        if half is not None:
            half.all_reduce(x, SUM, True).wait_blocking()
            half.finalize()
        return x.tolist()

    assert run_ranks(program, 3, backend=double) == [[6.0] * 4, [6.0] * 4, [3.0] * 4]


def test_a_split_beside_what_does_not_end(double, raised):
    over = threading.Event()

    def program(comm: Communicator) -> BaseException | None:
        if comm.get_rank() == 1:
            assert over.wait(60)
            return None
        comm.all_reduce(torch.ones(4), SUM, True)
        error = raised(comm.split, [0], "one", timeout=0.2)
        over.set()
        comm.abort()
        return error

    error = run_ranks(program, 2, backend=double)[0]
    assert type(error) is CommTimeoutError
    assert "all_reduce #1" in error.message


def test_one_thread_at_a_time_asks_how_far_a_call_is(double, monkeypatch):
    """With blocking=0 the question finishes the call, and the watchdog asks it too."""
    monkeypatch.setenv("NCCL_DOUBLE_SLOW_ENQUEUE", "1")
    asked = threading.Event()

    class Watched:
        def __init__(self, native: Any, free: threading.Event) -> None:
            self._native, self._free = native, free

        def __getattr__(self, name: str) -> Any:
            return getattr(self._native, name)

        def async_error(self, comm: int) -> Any:
            assert self._free.is_set()
            return self._native.async_error(comm)

    def program(comm: Communicator) -> None:
        handle, free = comm.unsafe_backend._handle, threading.Event()
        monkeypatch.setattr(handle.library, "native", Watched(handle.native, free))
        x = torch.ones(4)
        with handle.lock:
            caller = threading.Thread(target=comm.all_reduce, args=(x, SUM, True, None, 60))
            caller.start()
            asked.wait(0.1)  # time for a wrong question
            free.set()
        caller.join(60)
        comm.all_reduce(x, SUM, True).wait_blocking()
        assert x.tolist() == [1.0] * 4

    run_ranks(program, 1, backend=double, hints={"blocking": "0"})
