"""new_engine: makes a communicator's engine, with the executor and fast path that its backend needs."""

from __future__ import annotations

from unicomm.comms.backend import streams_of
from unicomm.comms.errors import CommError
from unicomm.comms.execution.device.executor import StreamExecutor
from unicomm.comms.execution.device.fast import StreamFast

from .engine import Engine
from .executor import MakesExecutor
from .hooks import Hooks
from .host import HostExecutor
from .member import Member
from .profiling import events as profiling


def new_engine(member: Member, hooks: Hooks | None = None, vacant: CommError | None = None) -> Engine:
    """Makes the engine of a communicator's epoch.

    `hooks`: those of the epoch before. `vacant`: the error that operations raise while there are no ranks.
    """
    engine = Engine(member, hooks, vacant)
    streams = streams_of(member.backend)
    if isinstance(member.backend, MakesExecutor):
        engine.executor = member.backend.executor(engine)
    elif streams is None:
        engine.executor = HostExecutor(engine)
    else:
        engine.executor = StreamExecutor(engine, streams)
        if not engine.has_native_path:
            engine.fast = StreamFast(engine)
    if engine.reads_hints or engine.checked:
        engine.fast.block()  # for good: only the general path reads hints
    if engine.checked:
        engine.single = None
    if vacant is None:
        profiling.register(engine)
    return engine
