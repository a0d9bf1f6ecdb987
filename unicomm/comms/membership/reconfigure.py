"""reconfigure: the same communicator with other ranks, as a new epoch.

An epoch is a communicator of its own for everything below: a backend's connection, a uid, sequence numbers
from 1, an entry in the recorder. What stays is the object that the user holds, with its name and its hooks.
How the new ranks meet is attempt.py's.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from unicomm.comms.backend import Backend, PreviousEpoch, Reconfigures, ReusesEpochs
from unicomm.comms.errors import (
    AbortedError,
    BackendError,
    CommError,
    InvalidArgumentError,
    NotReadyError,
)
from unicomm.comms.execution.assembly import new_engine
from unicomm.comms.execution.fast_path import NoFastPath
from unicomm.comms.execution.hooks import next_op_id
from unicomm.comms.operations.call import Message, OpArgs
from unicomm.comms.options import Hints, Timeout, copy_hints, read_hints
from unicomm.comms.work import Work

from .endpoint import Endpoint
from .handles import Handle
from .reconfigure_session import Attempt
from .remote_store import RemoteStore
from .rendezvous import Rendezvous

if TYPE_CHECKING:
    from unicomm.comms.communicator import Communicator
    from unicomm.comms.execution.member import Member

_UNRECORDED = (1 << 16) - 1  # the number of no communicator in the recorder
_LABELS = "the ranks' numbers in the job"
_MOST_LABEL = 1 << 31
_PATIENCE = 10.0  # seconds that aborted operations may take to end


class Vacant(Backend):
    """Stands where a backend will be when the communicator has ranks. Nothing reaches it."""

    def __init__(self, meant: type[Backend]) -> None:
        self.name = meant.name  # type: ignore[misc]
        self.capabilities = meant.capabilities

    @classmethod
    def connect(cls, setup: object) -> NoReturn:
        raise AssertionError("no backend")

    def exchange(self, messages: Sequence[Message], timeout: float) -> NoReturn:
        raise AssertionError("no backend")

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass
class Dynamic:
    """What a communicator that can be reconfigured has besides its epoch.

    Attributes:
        label: this process's number in the job, for good; None until it has one.
        top: the highest such number that this rank has heard of.
        used: uuids of all attempts.
        attempt: the one under way.
    """

    endpoint: Endpoint
    label: int | None
    top: int
    used: set[int] = field(default_factory=set)
    busy: threading.Lock = field(default_factory=threading.Lock)
    attempt: Attempt | None = None

    def cancel(self) -> None:
        if (attempt := self.attempt) is not None:
            attempt.cancel()

    def forget(self) -> None:
        self.busy = threading.Lock()
        self.attempt = None
        self.endpoint.forget()


@dataclass(frozen=True)
class _Plan:
    """The arguments of a call, checked."""

    uuid: int
    handles: list[Handle]
    rank: int
    timeout: float
    hints: dict[str, str]


def vacant_member(member: Member) -> Member:
    """The same without ranks."""
    return dataclasses.replace(
        member, backend=Vacant(member.asked_for), recorder_index=_UNRECORDED, store=None
    )


def no_ranks_yet(name: str) -> NotReadyError:
    return NotReadyError(
        "the communicator has no ranks yet",
        comm=name,
        hint="call reconfigure with the init handles of all of them; or pass rank= and size= to new_comm to"
        " connect at once",
    )


def get_init_handle(comm: Communicator) -> str:
    """See `Communicator.get_init_handle`."""
    return _dynamic(comm, "get_init_handle").endpoint.handle.text


def _dynamic(comm: Communicator, op: str) -> Dynamic:
    engine = comm._engine
    if comm._dynamic is None:
        reason = (
            "was connected without enable_reconfigure"
            if issubclass(engine.member.asked_for, Reconfigures)
            else "cannot change its ranks"
        )
        engine.refuse(
            "reconfigure",
            f"backend '{engine.backend.name}' {reason}",
            "pass enable_reconfigure=True to new_comm",
        )
    if engine.finalized:
        engine.check_open(op)
    return comm._dynamic


def reconfigure(comm: Communicator, uuid: int, init_handles: Any, timeout: Timeout, hints: Hints) -> Work:
    """See `Communicator.reconfigure`."""
    dynamic, engine = _dynamic(comm, "reconfigure"), comm._engine
    engine.executor.check_can_wait("reconfigure")
    engine.refuse_capture("reconfigure")
    if not dynamic.busy.acquire(blocking=False):
        raise NotReadyError(
            "another thread reconfigures this communicator",
            op="reconfigure",
            comm=engine.name,
            rank=engine.rank,
            hint="one call at a time; abort() ends the other one",
        )
    try:
        with engine.located("reconfigure"):
            plan = _read(comm, dynamic, uuid, init_handles, timeout, hints)
        args = OpArgs("reconfigure", next_op_id(), timeout=plan.timeout, hints=hints)
        engine.control(args, lambda: _run(comm, dynamic, plan))
    finally:
        dynamic.busy.release()
    return Work("reconfigure", 0, False)


def _read(
    comm: Communicator, dynamic: Dynamic, uuid: int, init_handles: Any, timeout: Timeout, hints: Hints
) -> _Plan:
    """Raises `InvalidArgumentError`, before anything has happened."""
    member = comm._member
    if type(uuid) is not int:
        raise InvalidArgumentError(f"uuid={uuid!r} is no whole number", hint="a new one for each attempt")
    if uuid in dynamic.used:
        raise InvalidArgumentError(
            f"uuid={uuid} was used before on this communicator",
            hint="a new one for each attempt, the same on all ranks; also after one that failed",
        )
    unordered = isinstance(init_handles, (set, frozenset))
    if not unordered and not isinstance(init_handles, (list, tuple)):
        raise InvalidArgumentError(
            f"init_handles is a {type(init_handles).__name__}",
            hint="pass a list, whose order gives the ranks, or a set",
        )
    handles = [Handle.read(text) for text in init_handles]
    if unordered:
        handles.sort(key=lambda handle: handle.id)
    own = dynamic.endpoint.handle
    for position, handle in enumerate(handles):
        if handle.backend != own.backend:
            raise InvalidArgumentError(
                f"init_handles[{position}] is of backend '{handle.backend}', not '{own.backend}'",
                hint="all ranks create the communicator with the same backend",
            )
    ids = [handle.id for handle in handles]
    if twice := sorted({i for i in ids if ids.count(i) > 1}):
        raise InvalidArgumentError(
            f"init_handles holds {len(twice)} more than once: that of rank {ids.index(twice[0])}",
            hint="name each rank once",
        )
    if own not in handles:
        raise InvalidArgumentError(
            "init_handles does not hold this rank's own handle",
            hint="a rank that is left out calls finalize() instead; else add its get_init_handle()",
        )
    merged = {**member.options.hints, **copy_hints(hints)}
    read_hints(merged, member.asked_for.capabilities.hints, member.asked_for.name)
    limit = comm._engine.read_timeout("reconfigure", timeout)
    return _Plan(uuid, handles, handles.index(own), limit, merged)


def _run(comm: Communicator, dynamic: Dynamic, plan: _Plan) -> None:
    from .lifecycle import connect

    before = comm._member
    dynamic.used.add(plan.uuid)
    size = len(plan.handles)
    meets = size > 1 and before.asked_for.capabilities.moves_data
    # From here on who asks hears that this rank is in the attempt, and abort() ends it.
    attempt = Attempt(dynamic.endpoint, plan.uuid, plan.handles, plan.rank, plan.timeout)
    dynamic.attempt = attempt
    left: PreviousEpoch | None = None
    try:
        left = end_epoch(comm, plan.uuid)
        after = connect(
            before.asked_for,
            before.device,
            name=before.name,
            store=attempt.open() if meets else None,
            rank=plan.rank,
            size=size,
            options=dataclasses.replace(before.options, hints=plan.hints),
            world=before.world,
            timeout=attempt.remaining(),
            check_peers=attempt.check if meets else None,
            meeting=f"reconfigure {plan.uuid}",
            number=lambda rendezvous: _number(rendezvous, dynamic, plan.rank, size),
            previous=left,
        )
        comm._engine, comm._member = new_engine(after, comm._engine.hooks), after
    except CommError as caught:
        error = attempt.explained(caught)
        attempt.fail(error)
        error.op, error.comm, error.rank = "reconfigure", before.name, plan.rank
        _vacate(comm, _failure(error, before.name))
        caught.with_traceback(None)  # its frames hold the store of the attempt
        try:
            raise error.with_traceback(None) from None
        finally:
            del error
    except BaseException as caught:
        attempt.fail(AbortedError(f"rank {plan.rank} was interrupted", culprits=[plan.rank]))
        _vacate(comm, _failure(caught, before.name))
        raise
    else:
        attempt.settle()
    finally:
        if left is not None:
            left.close()
        attempt.close()
        dynamic.attempt = None
    if attempt.cancelled:
        comm.abort()


def _vacate(comm: Communicator, reason: CommError) -> None:
    """Without ranks, until an attempt succeeds: operations raise `reason`."""
    member = vacant_member(comm._member)
    comm._engine, comm._member = new_engine(member, comm._engine.hooks, reason), member
    comm._engine.broken = reason


def _failure(error: BaseException, name: str) -> CommError:
    if isinstance(error, CommError):
        known = error.again(f"the last reconfiguration failed: {error.message}")
    else:
        text = f"the last reconfiguration was interrupted: {type(error).__name__}"
        known = AbortedError(text, comm=name)
    known.hint = "reconfigure again, with a new uuid"
    return known


def _number(rendezvous: Rendezvous, dynamic: Dynamic, rank: int, size: int) -> list[int]:
    """The ranks' numbers in the job, which processes keep; who has none yet gets the next free one."""
    if rendezvous.size < size:  # ranks that do not meet
        return list(range(size))
    if size == 1:
        return [0 if dynamic.label is None else dynamic.label]
    mine = {"label": dynamic.label, "top": dynamic.top}
    told = [json.loads(text) for text in rendezvous.exchange(_LABELS, json.dumps(mine).encode())]
    labels: list[int] = []
    top = max(int(one["top"]) for one in told)
    known = [one["label"] for one in told]
    for at, label in enumerate(known):
        if label is None or label in known[:at] or not 0 <= int(label) < _MOST_LABEL:
            top += 1
            labels.append(top)
        else:
            labels.append(int(label))
    dynamic.label, dynamic.top = labels[rank], max(top, *labels)
    return labels


def end_epoch(comm: Communicator, uuid: int) -> PreviousEpoch | None:
    """Gives the connection up, and returns what the next one may be made from.

    What is pending ends with `AbortedError`, on all ranks that it had.
    """
    engine, member = comm._engine, comm._member
    error = AbortedError(
        f"ended by reconfigure (uuid {uuid}) of this rank",
        comm=engine.name,
        rank=engine.rank,
        culprits=[engine.rank],
        hint="issue it again when reconfigure has returned",
    )
    executor = engine.executor
    executor.seal()
    reusable = engine.backend if isinstance(engine.backend, ReusesEpochs) else None
    if executor.busy and not executor.drain(0.0):
        engine.break_(error, engine.backend.abort)
    elif engine.broken is None and member.size > 1 and not (reusable and reusable.can_reuse_epoch):
        engine.backend.abort()  # who waits for this rank need not do so any longer
    engine.retire(error)
    ended = executor.close(_PATIENCE) and executor.drain(_PATIENCE)
    left = None
    with engine.quiet(_PATIENCE) as free:
        if ended := ended and free:
            engine.fast = NoFastPath()  # the other one holds the backend's memory
            left = None if reusable is None else reusable.take_epoch()
            engine.backend.close()
            if isinstance(member.store, RemoteStore):
                member.store.close()
            engine.let_go(Vacant(member.asked_for))
    member.recorder.set_comm_state(member.recorder_index, 2 if engine.broken is None else 3)
    _vacate(comm, error)
    if not ended:
        raise BackendError(
            "an operation did not end when it was aborted; its resources are kept",
            hint="end the process; please report this with the recorder's rings",
        )
    return left
