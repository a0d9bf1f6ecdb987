"""Graphs over the double's streams, followed as torch's are."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable
from typing import Any

from double_backend import HostStreams

from unicomm import Communicator, UnsupportedError, new_comm, symm
from unicomm.comms.backend import RegistersMemory
from unicomm.comms.execution.device import graphs


class HostGraph:
    """A graph with the methods of torch.cuda.CUDAGraph."""

    def __init__(self, streams: HostStreams) -> None:
        self._streams, self._c = streams, streams._c
        self._graph: Any = None

    def _stream(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._streams.current())

    def capture_begin(self) -> None:
        self._streams._done(self._c.double_stream_begin_capture(self._stream()))

    def capture_end(self) -> None:
        graph = ctypes.c_void_p()
        result = self._c.double_stream_end_capture(self._stream(), ctypes.byref(graph))
        if result:
            raise RuntimeError(f"the capture failed with {result}")
        self._graph = graph

    def replay(self) -> None:
        self._streams._done(self._c.double_graph_launch(self._graph, self._stream()))

    def reset(self) -> None:
        graph, self._graph = self._graph, None
        if graph is not None:
            self._streams._done(self._c.double_graph_destroy(graph))

    def __del__(self) -> None:
        self.reset()

    @contextlib.contextmanager
    def capture(self) -> Any:
        """As `torch.cuda.graph` does: on a stream of its own."""
        with self._streams.use(self._streams.new()):
            self.capture_begin()
            try:
                yield
            finally:
                self.capture_end()


class Together:
    """Ranks are threads here, and one that asks for an event ends the captures of all: so none does."""

    def __init__(self, n: int) -> None:
        self._barrier = threading.Barrier(n)

    def capture(self, comm: Communicator, body) -> HostGraph:
        graph = HostGraph(comm._engine.executor.streams)
        self._barrier.wait(60)
        try:
            with graph.capture():
                body()
        finally:
            self._barrier.wait(60)
        return graph


def check_life(comm: Communicator, capture: Callable[[Callable[[], None]], HostGraph]) -> None:
    """Within a capture what happens once is refused, and leaves nothing there; abort never is."""
    child = comm.split(list(range(comm.get_size())), name="child")
    assert child is not None
    refused = [
        ("split", lambda: comm.split([comm.get_rank()])),
        ("finalize", comm.finalize),
        ("new_window", comm.new_window),
        ("new_comm", lambda: new_comm(comm.get_backend(), "cpu", name="main", rank=0, size=1)),
    ]
    window = None
    if comm._engine.symmetric is None:
        refused.append(("symm_init", lambda: symm.init(comm)))
    else:
        tensor = symm.empty(4, comm=comm)
        window = comm.new_window(tensor)
        refused += [
            ("symm_allocate", lambda: symm.empty(4, comm=comm)),
            ("symm_free", lambda: symm.free(tensor, comm)),
            ("new_window", window.tensor_deregister),
            ("symm_free", window.free),
        ]
    if isinstance(comm.unsafe_backend, RegistersMemory) and _allocates(comm):
        allocator = comm.mem_allocator
        refused.append(("tensor_register", lambda: allocator.tensor_register(allocator.empty(4))))
    seq, errors = comm._engine.fast.seq, []

    def body() -> None:
        errors.extend(_error_of(call) for _, call in refused)
        child.abort()

    capture(body)
    assert [error.op for error in errors] == [op for op, _ in refused]
    for error in errors:
        assert "before the capture begins or after it ends" in error.hint, error
    assert comm._engine.fast.seq == seq
    assert child.is_aborted()
    child.finalize()
    if window is not None:
        window.tensor_deregister()
        window.free()
        symm.free(tensor, comm)


def _allocates(comm: Communicator) -> bool:
    """Whether this version of the library has memory for tensors, and then registers it, too."""
    try:
        comm.mem_allocator  # noqa: B018
    except UnsupportedError:
        return False
    return True


def _error_of(call: Callable[[], object]) -> UnsupportedError:
    try:
        result = call()
    except UnsupportedError as error:
        return error
    raise AssertionError(f"nothing was raised; the call returned {result!r}")


graphs.follow(HostGraph)
