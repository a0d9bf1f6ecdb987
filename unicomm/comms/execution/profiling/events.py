"""Operations as events of torch.profiler, and as a table in its trace.

While a profiler runs, the native fast paths are blocked, so that each operation takes the general path,
where it gives an event `unicomm::<operation>` and a row of a table. When none runs, nothing of this is
called: the fast path is not touched, and the general path compares one variable with None.

The event spans a synchronous operation. Of an asynchronous one it stands where it was issued, since torch
records only the threads in which the profiler was started; its row says when it ran. A graph's replay is an
event `unicomm::replay` around its launch, with its operations' events in it. torch writes an event's
arguments into the trace with `record_shapes=True` only; the table is always there, under the key `unicomm`
of the trace, and its k-th row that was recorded in a thread belongs to that thread's k-th event `unicomm::*`.

torch 2.13 calls `torch.autograd.profiler._run_on_profiler_start` before a recording and
`_disable_profiler` at its end, both through the module's namespace, which is where this hooks in. Where a
torch has them no longer, `supported` is False and there are no events.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch.autograd.profiler as torch_profiler
from torch._C._autograd import _add_metadata_json

from .session import KEY, REPLAY, Described, Session, Span, described

if TYPE_CHECKING:
    import torch

    from unicomm.comms.execution.device.graphs import Captured
    from unicomm.comms.execution.engine import Engine
    from unicomm.comms.operations.call import Call, Message

_KEPT = 4  # recordings whose tables are kept for `unicomm.profiler.events`

supported = hasattr(torch_profiler, "_run_on_profiler_start") and hasattr(torch_profiler, "_disable_profiler")

#: The recording that is under way, or None. The one thing that the general path looks at.
session: Session | None = None
#: Tables of the last recordings, the newest last.
finished: deque[Session] = deque(maxlen=_KEPT)

_lock = threading.Lock()
_engines: weakref.WeakSet[Engine] = weakref.WeakSet()
_blocked: weakref.WeakSet[Engine] = weakref.WeakSet()


def register(engine: Engine) -> None:
    """A new communicator: if a profiler runs, its fast path stays out until that ends."""
    with _lock:
        _engines.add(engine)
        if session is not None:
            engine.fast.block()
            _blocked.add(engine)


Job = tuple[Callable[[], None], Sequence[Span]]


def collective(engine: Engine, call: Call, later: bool, run: Callable[[], None]) -> Job:
    """`run` with the event and the row of its operation around it; `later`: it runs in the worker.

    With it, for an operation that only is issued here, the rows that have to be told when it has run.
    """
    now = session
    if now is None:
        return run, ()
    pair = now.add(engine, of_call(call), call.seq, call.async_op)
    return _around(engine, [pair], later, run)


def messages(
    engine: Engine, found: Sequence[tuple[Message, int]], later: bool, async_op: bool, run: Callable[[], None]
) -> Job:
    """The same for sends and receives that run together; `found` has each with its number."""
    now = session
    if now is None:
        return run, ()
    batch = now.next_batch() if len(found) > 1 else 0
    pairs = [_message(now, engine, one, seq, async_op, batch) for one, seq in found]
    return _around(engine, pairs, later, run)


def one_sided(
    engine: Engine,
    op: str,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    peer: int,
    later: bool,
    async_op: bool,
    run: Callable[[], None],
) -> Job:
    """The same for an operation on symmetric memory, which has no number."""
    now = session
    if now is None:
        return run, ()
    pair = now.add(engine, described(op, inputs, outputs, peer=peer), 0, async_op)
    return _around(engine, [pair], later, run)


def message(engine: Engine, found: Message, seq: int) -> Span | None:
    """The issue of a message of a lane, which tells the span when it starts and ends."""
    now = session
    if now is None:
        return None
    span, event = _message(now, engine, found, seq, True, 0)
    span.enter(event)
    span.leave()
    return span


def _message(
    now: Session, engine: Engine, found: Message, seq: int, async_op: bool, batch: int
) -> tuple[Span, Any]:
    return now.add(engine, of_message(found), seq, async_op, batch)


def of_call(call: Call) -> Described:
    """What rows say of a collective."""
    splits = call.in_splits, call.out_splits
    return described(call.name, call.inputs, call.outputs, call.root, -1, *splits)


def of_message(found: Message) -> Described:
    """What rows say of a message."""
    tensors = (found.tensor,)
    op, ins, outs = ("send", tensors, ()) if found.send else ("recv", (), tensors)
    return described(op, ins, outs, peer=found.peer)


@contextlib.contextmanager
def replay(
    engine: Engine, operations: Sequence[Captured], numbers: Sequence[Sequence[int]], count: int
) -> Iterator[Sequence[Span]]:
    """Around the launch of a graph for the `count`-th time: one event of it, and one of each operation.

    `numbers`: those that the operations have this time. Yields the rows that are to be told when it ran.
    """
    now = session
    if now is None:
        yield ()
        return
    whats = [what for operation in operations for what in operation.described]
    sums = (sum(column) for column in zip(*((w.n_in, w.n_out, w.bytes) for w in whats), strict=True))
    n_in, n_out, size = sums if whats else (0, 0, 0)
    # By the first collective the ranks' rows are compared: messages have numbers of their pairs.
    firsts = ((o.seqs[0], n[0]) for o, n in zip(operations, numbers, strict=True) if not o.messages)
    captured, seq = next((pair for pair in firsts if pair[1]), (0, 0))
    whole, event = now.add(engine, Described(REPLAY, n_in, n_out, bytes=size), seq, True, 0, captured, count)
    spans = [whole]
    whole.enter(event)
    try:
        for operation, seqs in zip(operations, numbers, strict=True):
            batch = now.next_batch() if len(seqs) > 1 else 0
            for what, before, number in zip(operation.described, operation.seqs, seqs, strict=True):
                span, event = now.add(engine, what, number, True, batch, before, count)
                span.enter(event)
                span.leave()
                spans.append(span)
        yield spans
    except BaseException as error:
        for span in spans:
            span.finish(error)
        raise
    finally:
        whole.leave()


def _around(engine: Engine, pairs: Sequence[tuple[Span, Any]], later: bool, run: Callable[[], None]) -> Job:
    if engine.queue is not None:  # the events say where it is put on its stream
        return _issuing(pairs, run), [span for span, _ in pairs]
    if later:  # the events say where it was issued; those of the worker show when all threads are recorded
        for span, event in pairs:
            span.enter(event)
            span.leave()

    def observed() -> None:
        for span, _ in pairs:
            span.start()
        for span, event in pairs:
            if later:
                span.enter_run()
            else:
                span.enter(event)
        error: BaseException | None = None
        try:
            run()
        except BaseException as caught:
            error = caught
            raise
        finally:
            for span, _ in reversed(pairs):
                span.leave()
            for span, _ in pairs:
                span.finish(error)

    return observed, ()


def _issuing(pairs: Sequence[tuple[Span, Any]], run: Callable[[], None]) -> Callable[[], None]:
    def observed() -> None:
        for span, event in pairs:
            span.enter(event)
        try:
            run()
        except BaseException as error:
            for span, _ in pairs:
                span.finish(error)
            raise
        finally:
            for span, _ in reversed(pairs):
                span.leave()

    return observed


def _begin() -> None:
    global session
    with _lock:
        if session is not None:  # the one before ended without a word, e.g. by an error of torch's
            return
        for engine in _engines:
            engine.fast.block()
            _blocked.add(engine)
        session = Session()


def _end() -> None:
    global session
    with _lock:
        now, session = session, None
        used = list(_engines)
        for engine in _blocked:
            engine.fast.unblock()
        _blocked.clear()
    if now is None:
        return
    for engine in used:
        if engine.queue is not None:  # what the device has done by now
            engine.queue.look(time.monotonic())
    now.close([engine for engine in used if not engine.finalized])
    if now.table["rows"]:
        finished.append(now)
    if now.table["groups"]:
        _add_metadata_json(KEY, json.dumps(now.table, separators=(",", ":")))


def _install() -> None:
    begin: Callable[[], None] = torch_profiler._run_on_profiler_start
    disable: Callable[[], Any] = torch_profiler._disable_profiler  # type: ignore[attr-defined]

    def on_start() -> None:
        _begin()
        begin()

    def on_disable() -> Any:
        try:
            _end()
        finally:  # whatever happens, torch's recording has to end
            results = disable()
        return results

    torch_profiler._run_on_profiler_start = on_start
    torch_profiler._disable_profiler = on_disable  # type: ignore[attr-defined]
    if torch_profiler._is_profiler_enabled:  # it runs already
        _begin()


if supported:
    _install()
