"""The end of communicators whose operations graphs hold: the library waits for these, nobody else."""

from __future__ import annotations

import contextlib
import ctypes
import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import unicomm
from tests import recorded
from tests.mocks.device import backend as device_mock
from tests.mocks.nccl.graphs import Together
from tests.mocks.nccl.kinds import of, streams_of
from unicomm import Communicator
from unicomm.backends.nccl.library import NCCL, Library
from unicomm.backends.nccl.result_codes import SUCCESS
from unicomm.backends.vendor import device_runtime
from unicomm.comms.errors import AbortedError, CommTimeoutError
from unicomm.comms.execution.device import graphs
from unicomm.comms.failures.daemon_pool import call_within
from unicomm.testing import drain, run_ranks

SUM = unicomm.ReduceOp.SUM


def captured(together: Together, comm: Communicator):
    x = torch.ones(4)
    graph = together.capture(comm, lambda: comm.all_reduce(x, SUM, False))
    graph.replay()
    drain(comm)
    assert x.tolist() == [2.0] * 4
    return graph


def is_there(native, handle: int) -> bool:
    return native.count(handle)[0] == 0


def test_finalize_does_not_wait_for_graphs(mock_nccl, eventually):
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

    run_ranks(program, 2, backend=mock_nccl)


def test_finalize_waits_for_the_library_when_graphs_are_gone(mock_nccl):
    together = Together(2)

    def program(comm: Communicator) -> None:
        graph = captured(together, comm)
        backend = comm.unsafe_backend
        native, handle = backend._handle.native, backend._handle.comm
        del graph
        comm.finalize()
        assert not is_there(native, handle)

    run_ranks(program, 2, backend=mock_nccl)


def test_an_abort_does_not_wait_for_graphs(mock_nccl):
    """Else the watchdog would, and no other communicator would be looked after."""
    together = Together(2)

    def program(comm: Communicator) -> None:
        graph = captured(together, comm)
        comm.abort()
        assert comm.is_aborted()
        comm.finalize()
        del graph

    began = time.monotonic()
    run_ranks(program, 2, backend=mock_nccl)
    assert time.monotonic() - began < 60


def test_a_call_that_does_not_return_is_left_alone(mock_nccl, monkeypatch):
    """Whatever keeps an abort, such as the device's work for other communicators."""
    from unicomm.backends.nccl import backend as module

    together = Together(2)
    monkeypatch.setattr(module, "ABORT_SECONDS", 0.05)
    monkeypatch.setattr(graphs, "alive", lambda streams: 0)

    def program(comm: Communicator) -> None:
        graph = captured(together, comm)
        comm.abort()
        del graph

    run_ranks(program, 2, backend=mock_nccl)


WAYS = {
    "short": lambda comm, x: comm.all_reduce(x, SUM, True),
    "general": lambda comm, x: comm.all_reduce(x, SUM, True, timeout=60),
    "several calls": lambda comm, x: comm.reduce_scatter(x[:2], [x[2:4], x[4:]], SUM, True, timeout=60),
    "messages": lambda comm, x: comm.send(x, 1 - comm.get_rank(), True, timeout=60),
    "barrier": lambda comm, x: comm.barrier(True),
}


@pytest.mark.parametrize("way", WAYS)
def test_an_abort_frees_no_communicator_that_a_call_is_about_to_use(
    mock_nccl, monkeypatch, tmp_path, raised, way
):
    from unicomm.backends.nccl import handle as module

    monkeypatch.setattr(module, "_LEAVE_SECONDS", 60.0)
    log = tmp_path / "calls"
    monkeypatch.setenv("NCCL_MOCK_LOG", str(log))

    def program(comm: Communicator) -> None:
        handle = comm.unsafe_backend._handle
        aborting = threading.Thread(target=comm.abort)
        native_stream = handle.streams.handle

        def stream(of: Any) -> int:
            """The call knows its communicator by now, and is not in the library yet."""
            if aborting.ident is None:
                aborting.start()
                aborting.join(0.5)  # time for a wrong end
            return native_stream(of)

        monkeypatch.setattr(handle.streams, "handle", stream)
        with contextlib.suppress(AbortedError):
            WAYS[way](comm, torch.ones(6))
        aborting.join(60)
        assert type(raised(comm.barrier, False)) is AbortedError

    run_ranks(program, 2, backend=mock_nccl)
    calls = [json.loads(line) for line in log.read_text().splitlines()]
    assert "ncclCommAbort" in {call["function"] for call in calls}
    assert [call for call in calls if "no live communicator" in call.get("error", "")] == []


@pytest.mark.parametrize("how", ["end", "abort", "revoke"])
def test_the_thread_of_an_end_is_on_the_communicators_device(how):
    """Elsewhere the library would create a context on device 0 for each process of a host."""
    library, device = of("nccl-new").opened, 5
    set_device = ctypes.CDLL(of("nccl-new").path).mock_set_device

    def in_thread() -> int:  # whose device is its own
        set_device(device)
        result, comm = library.native.init(1, library.native.unique_id()[1], 0, [], 60.0)
        assert result == SUCCESS
        return getattr(library, how)(comm, torch.device("cuda", device), 60.0)

    assert call_within(60, "rank", in_thread) == SUCCESS


def test_the_devices_function_is_that_of_the_runtime_which_the_process_has_loaded():
    try:
        runtime = ctypes.CDLL(str(device_mock.runtime()))
    except device_mock.NoCompiler as error:
        pytest.skip(str(error))
    name = Path(runtime._name).name
    kind = device_runtime.Runtime("mock", "cuda", name, (name,))
    expected = ctypes.cast(runtime.cudaSetDevice, ctypes.c_void_p).value
    assert device_runtime.device_setter(kind) == expected
    library = Library(replace(NCCL, runtime=kind), of("nccl-new").opened.native)
    assert library._current(torch.device("cuda", 3)) == (expected, 3)
    missing = replace(kind, file="libnothing", sonames=("libnothing.so",))
    library = Library(replace(NCCL, runtime=missing), of("nccl-new").opened.native)
    assert library._current(torch.device("cuda", 3)) == (0, 0)


def test_a_revoke_that_does_not_return_is_left_alone(monkeypatch, eventually):
    """The watchdog has others to end. What is not revoked is not used again, but aborted later."""
    from unicomm.backends.nccl import backend as module

    monkeypatch.setattr(module, "_REVOKE_SECONDS", 0.05)
    hold = ctypes.CDLL(of("nccl-new").path).mock_hold_revokes
    comm = unicomm.new_comm("nccl-new", "cpu", rank=0, size=1, enable_reconfigure=True)
    comm.reconfigure(1, [comm.get_init_handle()])
    backend = comm.unsafe_backend
    native, handle = backend._handle.native, backend._handle.comm
    hold(1)
    try:
        aborting = threading.Thread(target=comm.abort)
        aborting.start()
        aborting.join(30)
        assert not aborting.is_alive()
        assert is_there(native, handle)
        assert backend.take_epoch() is None
        comm.finalize()
        assert is_there(native, handle)
    finally:
        hold(0)
    eventually(lambda: not is_there(native, handle))


def test_a_split_waits_for_what_is_under_way(mock_nccl):
    """The library splits a communicator without operations only, and else may wait for ever."""

    def program(comm: Communicator) -> list[float]:
        streams = streams_of(comm)
        x = torch.ones(4)
        streams.sleep(200)
        comm.all_reduce(x, SUM, True)
        half = comm.split([0, 1] if comm.get_rank() < 2 else [], "half")
        assert {int(record["state"]) for record in recorded.of(comm)} == {3}
        if half is not None:
            half.all_reduce(x, SUM, True).wait_blocking()
            half.finalize()
        return x.tolist()

    assert run_ranks(program, 3, backend=mock_nccl) == [[6.0] * 4, [6.0] * 4, [3.0] * 4]


def test_a_split_beside_what_does_not_end(mock_nccl, raised):
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

    error = run_ranks(program, 2, backend=mock_nccl)[0]
    assert type(error) is CommTimeoutError
    assert "all_reduce #1" in error.message


def test_one_thread_at_a_time_asks_how_far_a_call_is(mock_nccl, monkeypatch):
    """With blocking=0 the question finishes the call, and the watchdog asks it too."""
    monkeypatch.setenv("NCCL_MOCK_SLOW_ENQUEUE", "1")
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

    run_ranks(program, 1, backend=mock_nccl, hints={"blocking": "0"})
