"""Methods of a process group that try a native call first: barriers, and messages that need no queue.

A send that fits into the channel completes in the call. So does a receive whose message has arrived. If the
caller is `dist.recv`, which waits at once, a receive also waits for its message for a moment, in the core.
Any other receive is begun in the core and posted to the queue. Every other message goes the general way,
those with an error among them.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import torch.distributed as dist

from unicomm.c10d.compat import dispatch_modes
from unicomm.c10d.process_group_work import DONE, NO_TIMEOUT, MessageWork
from unicomm.comms.execution.point_to_point import post_begun
from unicomm.comms.execution.profiling import events as profiling
from unicomm.comms.work import Work

Method = TypeVar("Method", bound=Callable[..., Any])

# dist.send calls dist.isend, which calls the method, and then waits for what that returned.
_STARTS = {inspect.unwrap(f).__code__ for f in (dist.isend, dist.irecv)}
_WAITS = {code for f in (dist.send, dist.recv) if "wait" in (code := inspect.unwrap(f).__code__).co_names}


def _engine_of(group: Any) -> Any:
    """Returns the engine of a group whose calls the native paths may take, or None."""
    only = group._only
    if only is None or profiling.session is not None or dispatch_modes():
        return None
    return only._engine


def run_single(group: Any, kind: str, tensors: Any, peer: Any, tag: Any) -> dist.Work | None:
    """Sends or receives a message for the caller's caller. Returns None if the general way has to run it."""
    engine = _engine_of(group)
    if engine is None or (single := engine.single) is None:
        return None
    waits = _waits(sys._getframe(2))
    done = single.post(kind == "send", tensors, peer, tag, waits)
    if done is None:
        return None
    if done.__class__ is int:
        if waits:
            return DONE
        work = Work(kind, done, False)
        work.peer = peer
    else:
        work = post_begun(engine, kind, tensors[0], peer, tag, done)
    return MessageWork(work, tensors)


def _waits(caller: FrameType) -> bool:
    """Whether the frame belongs to a call of `dist.send` or `dist.recv`."""
    if caller.f_code not in _STARTS:
        return False
    outer = caller.f_back  # between the two stands a wrapper that logs exceptions
    for _ in range(2):
        if outer is None:
            return False
        if outer.f_code in _WAITS:
            return True
        outer = outer.f_back
    return False


def short_message(kind: str) -> Callable[[Method], Method]:
    """Has a "send" or "recv" of a process group try `run_single` first."""

    def decorate(general: Method) -> Method:
        @functools.wraps(general)
        def called(self: Any, tensors: Any, peer: Any, tag: Any) -> Any:
            done = run_single(self, kind, tensors, peer, tag)
            return general(self, tensors, peer, tag) if done is None else done

        return called  # type: ignore[return-value]

    return decorate


def short_barrier(general: Method) -> Method:
    """Has the barrier of a process group try the fast path first."""

    @functools.wraps(general)
    def called(self: Any, *arguments: Any, **named: Any) -> Any:
        opts = named.get("opts") if not arguments else arguments[0] if len(arguments) == 1 else None
        if opts.__class__ is dist.BarrierOptions and len(arguments) + len(named) == 1:
            engine = _engine_of(self)
            native = engine is not None and engine.has_native_path
            if native and not opts.asyncOp and opts.timeout == NO_TIMEOUT:
                done = engine.fast.barrier(False, None, None)
                if done:
                    return DONE if isinstance(done, Work) else engine.fast_failed("barrier", done)
        return general(self, *arguments, **named)

    return called  # type: ignore[return-value]
