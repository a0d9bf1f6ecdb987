"""reconfigure: connects a communicator with other ranks, as a new epoch (epoch.py).

Backends, recorder and analyzer see each epoch as a communicator of its own. What stays is the object that the
user holds, with its name and its hooks. reconfigure_session.py has the way in which the new ranks meet.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

from unicomm.comms.backend import PreviousEpoch, Reconfigures, ReusesEpochs
from unicomm.comms.errors import (
    AbortedError,
    BackendError,
    CommError,
    InvalidArgumentError,
    NotReadyError,
)
from unicomm.comms.execution.assembly import new_engine
from unicomm.comms.execution.hooks import next_op_id
from unicomm.comms.failures.store_requests import StoreHost, set_host
from unicomm.comms.operations.call import OpArgs
from unicomm.comms.options import Hints, Timeout, copy_hints, read_hints
from unicomm.comms.work import Work

from .create import Request, connect
from .epoch import EpochHolder, ReconfigureState, Vacant, vacant_member
from .handles import Handle
from .reconfigure_session import ReconfigureSession
from .remote_store import RemoteStore
from .rendezvous import Rendezvous
from .store_users import await_users

_LABELS = "the ranks' numbers in the job"
_MOST_LABEL = 1 << 31
_PATIENCE = 10.0  # seconds that aborted operations may take to end


@dataclass(frozen=True)
class _Plan:
    """The checked arguments of a call."""

    uuid: int
    handles: list[Handle]
    rank: int
    timeout: float
    hints: dict[str, str]


def get_init_handle(comm: EpochHolder) -> str:
    """See `Communicator.get_init_handle`."""
    return _dynamic(comm, "get_init_handle").endpoint.handle.text


def _dynamic(comm: EpochHolder, op: str) -> ReconfigureState:
    """Raises if the communicator cannot be reconfigured."""
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


def reconfigure(comm: EpochHolder, uuid: int, init_handles: Any, timeout: Timeout, hints: Hints) -> Work:
    """See `Communicator.reconfigure`."""
    dynamic, engine = _dynamic(comm, "reconfigure"), comm._engine
    engine.executor.check_can_wait("reconfigure")
    engine.refuse_capture("reconfigure")
    if not dynamic.busy.acquire(blocking=False):
        raise engine.error(
            NotReadyError,
            "reconfigure",
            "another thread reconfigures this communicator",
            "reconfigure in one thread at a time; abort() ends the call of the other thread",
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
    comm: EpochHolder, dynamic: ReconfigureState, uuid: int, init_handles: Any, timeout: Timeout, hints: Hints
) -> _Plan:
    """Checks the arguments. Raises `InvalidArgumentError` before anything has changed."""
    member = comm._member
    if type(uuid) is not int:
        raise InvalidArgumentError(
            f"uuid={uuid!r} is no whole number", hint="pass a new int for each attempt"
        )
    if uuid in dynamic.used:
        raise InvalidArgumentError(
            f"uuid={uuid} was used before on this communicator",
            hint="pass a new one for each attempt, the same on all ranks, also after a failed attempt",
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
    if twice := sorted(i for i, times in Counter(ids).items() if times > 1):
        raise InvalidArgumentError(
            f"init_handles holds {len(twice)} more than once: that of rank {ids.index(twice[0])}",
            hint="name each rank once",
        )
    if own not in handles:
        raise InvalidArgumentError(
            "init_handles does not hold this rank's own handle",
            hint="add this rank's get_init_handle(); a rank that is left out calls finalize() instead",
        )
    merged = {**member.options.hints, **copy_hints(hints)}
    read_hints(merged, member.asked_for.capabilities.hints, member.asked_for.name)
    limit = comm._engine.read_timeout("reconfigure", timeout)
    return _Plan(uuid, handles, handles.index(own), limit, merged)


def _run(comm: EpochHolder, dynamic: ReconfigureState, plan: _Plan) -> None:
    before = comm._member
    dynamic.used.add(plan.uuid)
    size = len(plan.handles)
    meets = size > 1 and before.asked_for.capabilities.moves_data
    # From here on ranks that ask hear that this rank takes part in the attempt, and abort() ends it.
    session = ReconfigureSession(dynamic.endpoint, plan.uuid, plan.handles, plan.rank, plan.timeout)
    dynamic.session = session
    left: PreviousEpoch | None = None
    try:
        if comm._engine.broken is None:
            await_users(before.store, plan.timeout / 4, dynamic.endpoint.answered)
        left = end_epoch(comm, plan.uuid)
        asked = Request(
            before.asked_for,
            before.device,
            before.name,
            store=session.open() if meets else None,
            rank=plan.rank,
            size=size,
            options=dataclasses.replace(before.options, hints=plan.hints),
            world=before.world,
            timeout=session.remaining(),
            check_peers=session.check if meets else None,
            meeting=f"reconfigure {plan.uuid}",
            number=lambda rendezvous: _number(rendezvous, dynamic, plan.rank, size),
            previous=left,
        )
        after = connect(asked)
        if after.store is not None:  # splits name global ranks
            holder = after.labels[0]
            words = f"global rank {holder}, which holds the store of the epoch"
            set_host(after.store, StoreHost(words, holder), replace=True)
        dynamic.recorded.add(comm._member.recorder_index)
        comm._engine, comm._member = new_engine(after, comm._engine.hooks), after
    except CommError as caught:
        error = session.explained(caught)
        session.fail(error)
        error.op, error.comm, error.rank = "reconfigure", before.name, plan.rank
        _vacate(comm, _failure(error, before.name))
        caught.with_traceback(None)  # its frames hold the store of the attempt
        try:
            raise error.with_traceback(None) from None
        finally:
            del error
    except BaseException as caught:
        session.fail(AbortedError(f"rank {plan.rank} was interrupted", culprits=[plan.rank]))
        _vacate(comm, _failure(caught, before.name))
        raise
    else:
        session.settle()
    finally:
        if left is not None:
            left.close()
        session.close()
        dynamic.session = None
    if session.cancelled:
        comm.abort()


def _vacate(comm: EpochHolder, reason: CommError) -> None:
    """Leaves the communicator without ranks: operations raise `reason` until an attempt succeeds."""
    member = vacant_member(comm._member)
    assert comm._dynamic is not None
    comm._dynamic.recorded.add(comm._member.recorder_index)
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


def _number(rendezvous: Rendezvous, dynamic: ReconfigureState, rank: int, size: int) -> list[int]:
    """The ranks' numbers in the job. A process keeps its number; one without gets the next free number."""
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


def end_epoch(comm: EpochHolder, uuid: int) -> PreviousEpoch | None:
    """Closes the connection of the epoch. Returns what the next connection may be made from.

    Pending operations end with `AbortedError`, on all ranks of the epoch.
    """
    engine, member = comm._engine, comm._member
    error = AbortedError(
        f"ended by reconfigure (uuid {uuid}) of this rank",
        comm=engine.name,
        rank=engine.rank,
        culprits=[engine.rank],
        hint="issue the operation again when reconfigure has returned",
    )
    executor = engine.executor
    executor.seal()
    reusable = engine.backend if isinstance(engine.backend, ReusesEpochs) else None
    if executor.busy and not executor.drain(0.0):
        engine.break_(error, engine.backend.abort)
    elif engine.broken is None and member.size > 1 and not (reusable and reusable.can_reuse_epoch):
        engine.backend.abort()  # ranks that wait for this one need not wait any longer
    engine.retire(error)
    with engine.quiet(_PATIENCE):
        executor.seal()  # messages that other threads have issued meanwhile
    if executor.busy and not executor.drain(0.0):
        engine.break_(error, engine.backend.abort)
    ended = executor.close(_PATIENCE) and executor.drain(_PATIENCE)
    left = None
    with engine.quiet(_PATIENCE) as free:
        if ended := ended and free:
            engine.drop_fast_path()
            left = None if reusable is None else reusable.take_epoch()
            engine.backend.close()
            if isinstance(member.store, RemoteStore):
                member.store.close()
            engine.let_go(Vacant(member.asked_for))
    member.recorder.set_comm_state(member.recorder_index, 2 if engine.broken is None else 3, member.uid)
    _vacate(comm, error)
    if not ended:
        raise BackendError(
            "an operation did not end when it was aborted; its resources are kept",
            hint="end the process; please report this with the recorder's rings",
        )
    return left
