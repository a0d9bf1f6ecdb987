"""Operations as events of torch.profiler, and as a table in its trace.

While a profiler runs, the native fast paths are blocked, so that each operation takes the general path,
where it gives an event `unicomm::<operation>` and a row of a table. When none runs, nothing of this is
called: the fast path is not touched, and the general path compares one variable with None.

The event spans a synchronous operation. Of an asynchronous one it stands where it was issued, since torch
records only the threads in which the profiler was started; its row says when it ran. A graph's replay is an
event `unicomm::replay` around its launch, with its operations' events in it. torch writes an event's
arguments into the trace with `record_shapes=True` only; the table is always there, under the key `unicomm`
of the trace, and its k-th row that was recorded in a thread belongs to that thread's k-th event `unicomm::*`.

`hook_profiler` of c10d/compat.py has torch call this module at the beginning and the end of a recording.
"""

from __future__ import annotations

import contextlib
import json
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence

from unicomm.c10d.compat import add_trace_metadata, hook_profiler
from unicomm.comms.execution.device.graphs import Captured
from unicomm.comms.execution.engine import Engine
from unicomm.comms.execution.issued import IssuedOperation

from .session import KEY, REPLAY, Described, Session, Span

_KEPT = 4  # recordings whose tables are kept for `unicomm.profiler.events`

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


def issued(engine: Engine, op: IssuedOperation, here: bool) -> None:
    """Adds rows and events for an operation that is issued now. Called with a recording under way.

    `here`: it runs in this call, so that whoever runs it opens the events. Otherwise the events only mark
    where it was issued.
    """
    now = session
    if now is None:
        return
    batch = now.next_batch() if len(op.calls) > 1 else 0
    op.spans = [
        now.add(engine, Described.of(call), call.seq, op.async_op, batch, inputs=call.inputs or call.outputs)
        for call in op.calls
    ]
    if not here:
        for span in op.spans:
            span.enter()
            span.leave()


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
    whole = now.add(engine, Described(REPLAY, n_in, n_out, bytes=size), seq, True, 0, captured, count)
    spans = [whole]
    whole.enter()
    try:
        for operation, seqs in zip(operations, numbers, strict=True):
            batch = now.next_batch() if len(seqs) > 1 else 0
            for what, before, number in zip(operation.described, operation.seqs, seqs, strict=True):
                span = now.add(engine, what, number, True, batch, before, count)
                span.enter()
                span.leave()
                spans.append(span)
        yield spans
    except BaseException as error:
        for span in spans:
            span.finish(error)
        raise
    finally:
        whole.leave()


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
        engine.executor.catch_up()
    now.close([engine for engine in used if not engine.finalized])
    if now.table["rows"]:
        finished.append(now)
    if now.table["groups"]:
        add_trace_metadata(KEY, json.dumps(now.table, separators=(",", ":")))


#: False when this torch has no hooks: then there are no events.
supported = hook_profiler(_begin, _end)
