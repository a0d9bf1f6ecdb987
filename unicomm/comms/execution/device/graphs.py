"""Operations that graphs capture, and their replays.

A graph runs no Python when it is replayed, so its class is followed: `capture_begin`, `capture_end`, `reset`
and `replay` of `torch.cuda.CUDAGraph` and `torch.accelerator.Graph` are wrapped once, when the first
communicator on a device is made. What is captured in between is noted with the graph, and each replay
records it again, under new sequence numbers, as if it were called anew. Graphs without operations of ours
pay one look into their dictionary for each replay.

Nobody may ask for events while a graph is captured: that invalidates the capture, on some GPUs from any
thread. So the watchdog stands still from `capture_begin` to `capture_end` of any graph in this process.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from unicomm import _core
from unicomm.comms.errors import UnsupportedError
from unicomm.comms.operations import recording

if TYPE_CHECKING:
    from unicomm.comms.backend import Streams
    from unicomm.comms.execution.profiling.session import Described

    from .queue import StreamQueue

_KEY = "_unicomm_operations"  # of a graph's dictionary
_FOLLOWED = "_unicomm_followed"  # of its class
_lock = threading.Lock()
_gate = threading.RLock()


@dataclass(slots=True)
class Captured:
    """An operation of a graph, or several that go together.

    Attributes:
        name: as errors say it. timeout: seconds.
        shapes: its records, without their numbers. seqs: the numbers they had at the capture, 0 for what has
            none. described: what the profiler says of each. messages: (send, peer) of each, of a send,
            receive or batch; empty for a collective.
    """

    queue: StreamQueue
    name: str
    timeout: float
    shapes: Sequence[bytes]
    seqs: Sequence[int]
    described: Sequence[Described]
    messages: Sequence[tuple[bool, int]] = ()


@dataclass(slots=True)
class Replayable:
    """What a graph has taken down, and how often it was replayed."""

    operations: list[Captured]
    replays: int = 0


class Begun(NamedTuple):
    """The records of a replay.

    Attributes:
        seqs: the numbers of each operation's records. collectives: those of collectives among them.
        messages: (send, peer, number) of each message.
    """

    records: list[int]
    seqs: list[list[int]]
    collectives: list[int]
    messages: list[tuple[bool, int, int]]


@dataclass(eq=False)
class Capture:
    """A capture that is under way; `graph` is None for one that nobody follows."""

    graph: weakref.ref[Any] | None = None
    thread: int = 0
    operations: list[Captured] = field(default_factory=list)


_open: list[Capture] = []
_made: weakref.WeakSet[Any] = weakref.WeakSet()  # graphs that took down operations of ours
_unknown = Capture()


def current() -> Capture:
    """The capture that an operation issued now is part of. The current stream has to be capturing."""
    with _lock:
        # Backward passes run in threads of their own: there the one that is open is meant.
        mine = [c for c in _open if c.thread == threading.get_ident()] or _open
        return mine[-1] if mine else _unknown


def alive(streams: Streams) -> int:
    """How many graphs hold operations of the communicator with these streams."""
    with _lock:
        found = [graph.__dict__.get(_KEY) for graph in _made]
    return sum(
        any(operation.queue.streams is streams for operation in replayable.operations)
        for replayable in found
        if replayable is not None
    )


@contextlib.contextmanager
def events_may_be_asked_for() -> Iterator[bool]:
    """Whether no graph is captured, and none will be begun within."""
    with _gate:
        with _lock:
            _open[:] = [c for c in _open if c.graph is not None and c.graph() is not None]
            free = not _open
        yield free


def refuse_capture(streams: Streams | None, op: str, comm: str, rank: int | None = None) -> None:
    """Of a call that connects, closes or allocates: `UnsupportedError` where the current stream is captured.

    What it does, and waits for, happens on the host and once, which no replay repeats; much of it would end
    the capture as well.
    """
    if streams is not None and streams.is_capturing():
        raise UnsupportedError(
            "it would happen once, on the host, which a graph cannot capture",
            op=op,
            comm=comm,
            rank=rank,
            hint="call it before the capture begins or after its end; of a communicator's life only abort()"
            " may be called within",
        )


def follow(graph_class: type) -> None:
    """Notes what graphs of that class capture, and their replays. Once for each class."""
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
    by_queue: dict[StreamQueue, list[Captured]] = {}
    for operation in found.operations:
        by_queue.setdefault(operation.queue, []).append(operation)
    if not next(iter(by_queue)).streams.is_capturing():  # else it runs nothing now
        found.replays += 1
    with contextlib.ExitStack() as stack:
        for queue, own in by_queue.items():
            stack.enter_context(queue.replaying(own, found.replays))
        yield
