"""Operations that graphs capture, and their replays.

A replayed graph runs no Python, so its class is wrapped: `capture_begin`, `capture_end`, `reset` and `replay`
of `torch.cuda.CUDAGraph` and `torch.accelerator.Graph`, once, when the first communicator on a device is
created. The operations captured in between are kept with the graph, and each replay records them again, under
new sequence numbers, as if they were called anew. A graph without such operations pays one look into its
dictionary per replay.

A query of an event while a graph is captured invalidates the capture, on some GPUs from any thread. So the
watchdog pauses from `capture_begin` to `capture_end` of any graph in this process.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from unicomm import _core
from unicomm.comms.errors import UnsupportedError
from unicomm.comms.execution.profiling.session import Described
from unicomm.comms.operations import recording
from unicomm.comms.streams import Streams

_KEY = "_unicomm_operations"  # of a graph's dictionary
_FOLLOWED = "_unicomm_followed"  # of its class
_lock = threading.Lock()
_gate = threading.RLock()


class Replaying(Protocol):
    """The stream executor of a communicator, as graphs see it."""

    streams: Streams

    def replaying(
        self, operations: Sequence[Captured], count: int
    ) -> contextlib.AbstractContextManager[None]: ...


@dataclass(slots=True)
class Captured:
    """An operation that a graph has captured, or a batch of messages.

    Attributes:
        executor: of its communicator. name: as errors give it. timeout: in seconds.
        shapes: its records, without their numbers. seqs: the records' numbers at the capture, 0 for a record
            without one. described: the profiler's description of each record. messages: (send, peer) of each
            record of a send, receive or batch; empty for a collective.
    """

    executor: Replaying
    name: str
    timeout: float
    shapes: Sequence[bytes]
    seqs: Sequence[int]
    described: Sequence[Described]
    messages: Sequence[tuple[bool, int]] = ()


@dataclass(slots=True)
class Replayable:
    """The operations that a graph has captured, and how often it was replayed."""

    operations: list[Captured]
    replays: int = 0


class Begun(NamedTuple):
    """The records of a replay.

    Attributes:
        seqs: the numbers of each operation's records. collectives: the numbers of collectives among them.
        messages: (send, peer, number) of each message.
    """

    records: list[int]
    seqs: list[list[int]]
    collectives: list[int]
    messages: list[tuple[bool, int, int]]


@dataclass(eq=False)
class Capture:
    """A capture that is under way; `graph` is None for a graph whose class is not followed."""

    graph: weakref.ref[Any] | None = None
    thread: int = 0
    operations: list[Captured] = field(default_factory=list)


_open: list[Capture] = []
_made: weakref.WeakSet[Any] = weakref.WeakSet()  # graphs that captured operations of ours
_unknown = Capture()


def current() -> Capture:
    """The capture that an operation issued now belongs to. The current stream has to be capturing."""
    with _lock:
        # A backward pass runs in a thread of its own, and belongs to whichever capture is open.
        mine = [c for c in _open if c.thread == threading.get_ident()] or _open
        return mine[-1] if mine else _unknown


def alive(streams: Streams) -> int:
    """Returns the number of graphs that hold operations of the communicator with these streams."""
    with _lock:
        found = [graph.__dict__.get(_KEY) for graph in _made]
    return sum(
        any(operation.executor.streams is streams for operation in replayable.operations)
        for replayable in found
        if replayable is not None
    )


@contextlib.contextmanager
def events_may_be_asked_for() -> Iterator[bool]:
    """Yields whether no graph is being captured. No capture can begin within the block."""
    with _gate:
        with _lock:
            _open[:] = [c for c in _open if c.graph is not None and c.graph() is not None]
            free = not _open
        yield free


def refuse_capture(streams: Streams | None, op: str, comm: str, rank: int | None = None) -> None:
    """Raises `UnsupportedError` if the current stream is captured. For calls that connect, close or allocate.

    Such a call acts on the host, and once: no replay would repeat it, and much of it would end the capture.
    """
    if streams is not None and streams.is_capturing():
        raise UnsupportedError(
            "this call acts on the host, and once, which a graph cannot capture",
            op=op,
            comm=comm,
            rank=rank,
            hint="call it before the capture begins or after it ends; only abort() may be called within",
        )


def follow(graph_class: type) -> None:
    """Wraps the methods of a class of graphs, once, so that captures and replays are noticed."""
    with _lock:
        if _FOLLOWED in vars(graph_class):
            return
        for name, around in (
            ("capture_begin", _around_begin),
            ("capture_end", _around_end),
            ("reset", _around_reset),
            ("replay", _around_replay),
        ):
            setattr(graph_class, name, around(getattr(graph_class, name)))
        setattr(graph_class, _FOLLOWED, True)


def _around_begin(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def capture_begin(graph: Any, *arguments: Any, **more: Any) -> Any:
        graph.__dict__.pop(_KEY, None)
        capture = Capture(weakref.ref(graph), threading.get_ident())
        with _gate, _lock:
            _open.append(capture)
        try:
            return original(graph, *arguments, **more)
        except BaseException:
            _close(graph)
            raise

    return capture_begin


def _around_end(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def capture_end(graph: Any, *arguments: Any, **more: Any) -> Any:
        try:
            result = original(graph, *arguments, **more)
        except BaseException:
            _close(graph)
            raise
        capture = _close(graph)
        if capture is not None and capture.operations:
            graph.__dict__[_KEY] = Replayable(capture.operations)
            with _lock:
                _made.add(graph)
        return result

    return capture_end


def _around_reset(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def reset(graph: Any, *arguments: Any, **more: Any) -> Any:
        graph.__dict__.pop(_KEY, None)
        return original(graph, *arguments, **more)

    return reset


def _around_replay(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def replay(graph: Any, *arguments: Any, **more: Any) -> Any:
        found = graph.__dict__.get(_KEY)
        if found is None:
            return original(graph, *arguments, **more)
        with _recorded(found):
            return original(graph, *arguments, **more)

    return replay


def _close(graph: Any) -> Capture | None:
    with _lock:
        for capture in _open:
            if capture.graph is not None and capture.graph() is graph:
                _open.remove(capture)
                return capture
    return None


def begin_records(numbers: Any, recorder: Any, operations: Sequence[Captured]) -> Begun:
    """Begins the records of a replay. `numbers`: what counts the communicator's operations."""
    begun = Begun([], [], [], [])
    for operation in operations:
        seqs: list[int] = []
        op_id = _core.next_op_id()
        batch = recording.BATCH if len(operation.shapes) > 1 else 0
        for i, shape in enumerate(operation.shapes):
            flags = recording.REPLAYED | recording.ASYNC | (0 if begun.records else recording.REPLAY)
            if operation.messages:
                send, peer = operation.messages[i]
                seq = int(numbers.next_pair_seq(peer, send))
                begun.messages.append((send, peer, seq))
                flags |= recording.P2P | batch | (0 if send else recording.RECEIVE)
            elif operation.seqs[i]:
                seq = int(numbers.next_seq())
                begun.collectives.append(seq)
            else:  # one-sided: not all ranks have it
                seq = 0
            seqs.append(seq)
            begun.records.append(recorder.begin_again(shape, seq, op_id, flags))
        begun.seqs.append(seqs)
    return begun


@contextlib.contextmanager
def _recorded(found: Replayable) -> Iterator[None]:
    by_executor: dict[Replaying, list[Captured]] = {}
    for operation in found.operations:
        by_executor.setdefault(operation.executor, []).append(operation)
    if not next(iter(by_executor)).streams.is_capturing():  # a captured replay runs nothing
        found.replays += 1
    with contextlib.ExitStack() as stack:
        for executor, own in by_executor.items():
            stack.enter_context(executor.replaying(own, found.replays))
        yield
