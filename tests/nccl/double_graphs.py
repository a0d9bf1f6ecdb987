"""Graphs over the double's streams, followed as torch's are."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from typing import Any

from double_backend import HostStreams

from unicomm import Communicator
from unicomm.comms import graphs


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
        graph = HostGraph(comm._engine.queue.streams)
        self._barrier.wait(60)
        try:
            with graph.capture():
                body()
        finally:
            self._barrier.wait(60)
        return graph


graphs.follow(HostGraph)
