"""Creation, split and the end of communicators."""

from __future__ import annotations

import atexit
import contextlib
import logging
import operator
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from unicomm.comms.backend import (
    Backend,
    ChecksPeers,
    ChoosesDevice,
    PreviousEpoch,
    Reconfigures,
    Setup,
    SplitsInLibrary,
    SurvivesFork,
)
from unicomm.comms.errors import (
    AbortedError,
    BackendError,
    CommError,
    CommTimeoutError,
    InvalidArgumentError,
    NotReadyError,
)
from unicomm.comms.execution.device import watchdog
from unicomm.comms.execution.fast_path import NoFastPath
from unicomm.comms.execution.hooks import next_op_id
from unicomm.comms.execution.member import Environment, Member
from unicomm.comms.failures import threads
from unicomm.comms.operations.call import OpArgs
from unicomm.comms.operations.dtypes import NAMES
from unicomm.comms.operations.reduction import RedOpType
from unicomm.comms.operations.table import BY_CODE
from unicomm.comms.options import CommOptions, copy_hints, read_hints
from unicomm.flight_recorder.recording import dumps, writer
from unicomm.flight_recorder.texts import format_ranks

from .endpoint import Endpoint
from .handles import LOOPBACK
from .reconfigure import Dynamic, no_ranks_yet, vacant_member
from .rendezvous import Rendezvous, meet
from .rendezvous_parts import is_store_failure

if TYPE_CHECKING:
    from unicomm.comms.communicator import Communicator

_log = logging.getLogger("unicomm")
_EXIT_GRACE = 5.0  # seconds that pending operations of unfinalized communicators get when the process ends
_THREAD_ENDS = 10.0  # that the worker gets when its operations are over: a busy machine may not run it soon
_LAST_WORDS = 5.0  # and then what this rank is about to tell the others


def recorder_of(world: Environment) -> Any:
    """This process's flight recorder."""
    names = {
        "ops": {str(code): row.name for code, row in BY_CODE.items()},
        "dtypes": {str(code): name for code, name in NAMES.items()},
        "reductions": {"0": "", **{str(int(red)): red.name for red in RedOpType}},
    }
    alone = world.size == 1 and world.source == "single process"
    return writer.get_recorder(names, -1 if alone else world.rank, world.size)


def check_device(device: Any, backend: type[Backend]) -> torch.device:
    """The device as given, if the backend takes it; which one, where it says the type alone."""
    if device is None:
        raise InvalidArgumentError(
            "a communicator needs a device",
            hint='pass one, e.g. torch.device("cpu") or torch.device("cuda", local_rank)',
        )
    try:
        checked = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidArgumentError(
            f"device={device!r} is none: {error}", hint='e.g. torch.device("cpu")'
        ) from None
    if checked.type not in backend.capabilities.device_types:
        raise InvalidArgumentError(
            f"backend '{backend.name}' has no device type '{checked.type}'",
            hint=f"it takes {', '.join(sorted(backend.capabilities.device_types))}",
        )
    return backend.which_device(checked) if issubclass(backend, ChoosesDevice) else checked


def connect(
    backend: type[Backend],
    device: torch.device,
    *,
    name: str,
    store: Store | None,
    rank: int,
    size: int,
    options: CommOptions,
    world: Environment,
    timeout: float,
    labels: Sequence[int] | None = None,
    check_peers: Callable[[], None] | None = None,
    number: Callable[[Rendezvous], Sequence[int]] | None = None,
    meeting: str = "",
    parent: Backend | None = None,
    color: int = 0,
    previous: PreviousEpoch | None = None,
) -> Member:
    """Connects a backend and registers it with the recorder. Called by all ranks.

    `check_peers` is called while it waits for the others, and raises when they cannot come any more.
    `number`, instead of `labels`, agrees on these with the others; then all are connected, or none.
    `meeting` is what the ranks call it, where they may have different names for the communicator. `previous`:
    what the communicator's last epoch left.
    """
    given, labels = labels, range(size) if labels is None else labels
    hints = read_hints(options.hints, backend.capabilities.hints, backend.name)
    together = size > 1 and backend.capabilities.moves_data
    if together and store is None:
        raise InvalidArgumentError(
            f"{size} ranks need a store to find each other",
            comm=name,
            rank=rank,
            hint="pass store=, or start the program with torchrun",
        )
    recorder = recorder_of(world)
    began = time.monotonic()
    hello = {
        "backend": backend.name,
        "device type": device.type,
        "hints": {k: str(v) for k, v in sorted(hints.items())},
    }
    engine: Backend | None = None
    try:
        if together:
            rendezvous = meet(
                store,
                meeting or name,
                rank,
                size,
                timeout=timeout,
                hello=hello,
                labels=given,
                check_peers=check_peers,
            )
        else:
            rendezvous = meet(None, name, 0, 1, timeout=timeout, hello=hello)
        with rendezvous:  # a member that cannot connect tells the others, which need not wait for it
            if number is not None:
                labels = number(rendezvous)
            left = max(0.1, timeout - (time.monotonic() - began))
            setup = Setup(
                rendezvous,
                store if together else None,
                rank,
                size,
                labels,
                device,
                name,
                left,
                hints,
                parent,
                color,
                options.enable_reconfigure,
                number is not None,
                previous,
            )
            engine = backend.connect(setup)
            if number is not None:
                rendezvous.exchange("connected", b"")
    except BaseException as error:
        if engine is not None:  # the others are not connected
            engine.abort()
            engine.close()
        if isinstance(error, CommError):
            error.comm = error.comm or name
            error.rank = rank if error.rank is None else error.rank
        elif isinstance(error, OSError):
            raise BackendError(
                f"backend '{backend.name}' cannot connect: {error}",
                comm=name,
                rank=rank,
                hint="is there memory left, and are there file descriptors (ulimit -n)?",
            ) from error
        raise
    index = recorder.add_comm(
        name=name, backend=engine.name, uid=rendezvous.uid, ranks=format_ranks(labels), rank=rank, size=size
    )
    return Member(
        engine,
        backend,
        name,
        rendezvous.uid,
        rank,
        size,
        labels,
        device,
        options,
        store,
        recorder,
        index,
        world,
    )


def create(
    backend: type[Backend],
    device: torch.device,
    *,
    name: str,
    store: Store | None,
    rank: int,
    size: int,
    options: CommOptions,
    world: Environment,
    labels: Sequence[int] | None = None,
    check_peers: Callable[[], None] | None = None,
    parent: Backend | None = None,
    color: int = 0,
) -> Communicator:
    """A connected communicator. Called by all its ranks; returns when all are connected."""
    dump = dumps.prepare()
    with contextlib.ExitStack() as on_error:
        dynamic = None
        if options.enable_reconfigure:
            # A process alone has no number in a job yet: that would be another's later.
            label, top = (rank, size - 1) if size > 1 else (None, -1)
            dynamic = _open_endpoint(backend, name, options, label, top)
            on_error.callback(dynamic.endpoint.close)
        member = connect(
            backend,
            device,
            name=name,
            store=store,
            rank=rank,
            size=size,
            options=options,
            world=world,
            timeout=options.timeout,
            labels=labels,
            check_peers=check_peers,
            parent=parent,
            color=color,
        )
        on_error.pop_all()
    return _created(member, dynamic, None, dump)


def create_vacant(
    backend: type[Backend], device: torch.device, *, name: str, options: CommOptions, world: Environment
) -> Communicator:
    """A communicator that gets its ranks from `reconfigure`. Waits for nobody."""
    dump = dumps.prepare()
    read_hints(options.hints, backend.capabilities.hints, backend.name)
    label, top = (world.rank, world.size - 1) if world.size > 1 else (None, -1)
    dynamic = _open_endpoint(backend, name, options, label, top)
    member = vacant_member(
        Member(
            *(backend, backend, name, "", 0, 1, [0 if label is None else label]),  # type: ignore[arg-type]
            *(device, options, None, recorder_of(world), 0, world),
        )
    )
    return _created(member, dynamic, no_ranks_yet(name), dump)


def _open_endpoint(
    backend: type[Backend], name: str, options: CommOptions, label: int | None, top: int
) -> Dynamic:
    hosts: list[str] = []
    if backend.capabilities.moves_data:
        hints = read_hints(options.hints, backend.capabilities.hints, backend.name)
        address = backend.reachable_at(hints) if issubclass(backend, Reconfigures) else ""
        hosts = [LOOPBACK] + [address] * (address not in ("", LOOPBACK))
    return Dynamic(Endpoint(hosts, backend.name, name), label, top)


def _created(
    member: Member, dynamic: Dynamic | None, vacant: CommError | None, dump: Callable[..., None] | None
) -> Communicator:
    from unicomm.comms.communicator import Communicator

    comm = Communicator(member, dynamic, vacant)
    if dump is not None:
        comm.register_abort_hook(dump)
    _living.add(comm)
    return comm


def split(
    parent: Communicator, ranks: Sequence[int], name: str, hints: Mapping[str, str] | None, timeout: Any
) -> Communicator | None:
    """See `Communicator.split`."""
    engine = parent._engine
    engine.check_open("split")
    engine.refuse_capture("split")
    size, me = parent.get_size(), parent.get_rank()

    def wrong(message: str, hint: str) -> InvalidArgumentError:
        return InvalidArgumentError(message, op="split", comm=parent.get_name(), rank=me, hint=hint)

    try:
        chosen = [operator.index(r) for r in ranks if not isinstance(r, bool)]
        usable = len(chosen) == len(ranks) and all(0 <= r < size for r in chosen)
    except TypeError:
        usable = False
    if not usable:
        raise wrong(
            f"ranks={ranks!r} is no list of ranks of this communicator",
            f"ranks are whole numbers from 0 to {size - 1}",
        )
    if len(set(chosen)) != len(chosen):
        raise wrong(f"ranks {chosen} hold one twice", "name each rank once")
    if chosen and me not in chosen:
        raise wrong(f"ranks {chosen} do not include this one", "pass [] on ranks that are not to be members")
    member = parent._member
    with engine.located("split"):
        options = CommOptions(
            timeout=engine.read_timeout("split", timeout),
            abort_process_on_timeout_or_error=member.options.abort_process_on_timeout_or_error,
            enable_reconfigure=False,  # it has its parent's store, which is its parent's epoch's
            hints=dict(member.options.hints) if hints is None else copy_hints(hints),
        )
        read_hints(options.hints, member.asked_for.capabilities.hints, member.asked_for.name)

    def peers_are_there() -> None:
        with engine.located("split"):
            engine.check_open("split")
            if not isinstance(member.backend, ChecksPeers):
                return
            try:
                member.backend.check_peers([r for r in chosen if r != me])
            except CommError as error:
                engine.break_(error)
                raise

    def wait_until_idle() -> None:
        if not engine.executor.drain(options.timeout):
            late = ", ".join(f"{work.name} #{work.seq}" for work in engine.executor.pending())
            raise CommTimeoutError(
                f"still pending after {options.timeout:g} s: {late}; the library splits what is idle",
                op="split",
                comm=member.name,
                rank=me,
                hint="find out who is missing in them; the hint split_by=init waits for none of them",
            )
        engine.check_open("split")

    def connect() -> Communicator | None:
        library = member.backend if isinstance(member.backend, SplitsInLibrary) else None
        if library is not None and library.splits_when_idle:
            wait_until_idle()
        if not chosen:
            if library is not None:
                library.split_away(options.timeout)
            return None
        # Below the parent's uid, so that communicators of the same name under other parents never meet.
        store = None if member.store is None else PrefixStore(f"unicomm-split/{member.uid}", member.store)
        with engine.located("split"):
            try:
                return create(
                    member.asked_for,
                    member.device,
                    name=name or f"{member.name}_{min(chosen)}",
                    store=store,
                    rank=chosen.index(me),
                    size=len(chosen),
                    options=options,
                    world=member.world,
                    labels=[member.labels[r] for r in chosen],
                    check_peers=peers_are_there,
                    parent=member.backend,
                    color=min(chosen),
                )
            except BackendError as error:
                if is_store_failure(error):
                    peers_are_there()  # where they are gone, that is why, and says more
                raise

    return engine.control(
        OpArgs("split", next_op_id(), ranks=chosen, timeout=options.timeout, hints=hints), connect
    )


def finalize(comm: Communicator, timeout: float) -> None:
    """See `Communicator.finalize`."""
    if not comm._engine.closing:
        comm._engine.refuse_capture("finalize")
    _end(comm, timeout)


def _end(comm: Communicator, timeout: float) -> None:
    if (dynamic := comm._dynamic) is None:
        _finalize_once(comm, timeout)
        return
    dynamic.cancel()
    if not dynamic.busy.acquire(timeout=timeout):
        raise NotReadyError(
            "reconfigure is under way in another thread, or in the hook that called finalize",
            op="finalize",
            comm=comm.get_name(),
            rank=comm.get_rank(),
            hint="finalize when it has returned",
        )
    try:
        dynamic.endpoint.close()
        _finalize_once(comm, timeout)
        comm._member.store = None  # the epoch's own
    finally:
        dynamic.busy.release()


def _finalize_once(comm: Communicator, timeout: float) -> None:
    engine = comm._engine
    in_worker = engine.executor.is_current()  # in a callback or hook: it cannot wait for what comes after it
    if in_worker and engine.broken is None:
        engine.executor.check_can_wait("finalize")
    # One thread at a time, and once; hooks may call it too. The worker must not wait for one that joins it.
    if engine.finalizing.acquire(blocking=not in_worker):
        try:
            if not engine.closing:
                engine.closing = True
                _finalize(comm, timeout)
        finally:
            engine.finalizing.release()


def _finalize(comm: Communicator, timeout: float) -> None:
    # Another thread may be at abort: the others are to hear that, and not that this rank has left.
    comm._engine.ended.wait(timeout)
    late: list[str] = []
    executor = comm._engine.executor
    executor.seal()
    drained = executor.is_current() or executor.drain(timeout)
    if not drained:
        late = [f"{work.name} #{work.seq}" for work in executor.pending()]
        comm._engine.break_(
            AbortedError(
                "finalized with pending operations",
                comm=comm.get_name(),
                rank=comm.get_rank(),
                hint="wait for all works before finalize",
            )
        )
        comm._member.backend.abort()
    comm._engine.finalized = True
    comm._engine.vacant = None
    comm._engine.fast.block()
    ended = executor.close(_THREAD_ENDS if late else max(timeout, _THREAD_ENDS))
    if ended:
        comm._engine.fast = NoFastPath()  # the other one holds the backend's memory
        if (symmetric := comm._engine.symmetric) is not None:
            comm._engine.symmetric = None
            if comm._engine.broken is not None:  # who broke it may not have come to this
                symmetric.abort()
            symmetric.close()
        comm._member.backend.close()
    comm._member.recorder.set_comm_state(comm._member.recorder_index, 3 if comm._engine.broken else 2)
    _living.discard(comm)
    if not ended:
        raise BackendError(
            "an operation did not end when it was aborted; its resources are kept",
            op="finalize",
            comm=comm.get_name(),
            rank=comm.get_rank(),
            hint="end the process; please report this with the recorder's rings",
        )
    if late:
        raise CommTimeoutError(
            f"still pending after {timeout:g} s, and given up: {', '.join(late)}",
            op="finalize",
            comm=comm.get_name(),
            rank=comm.get_rank(),
            hint="wait for all works before finalize, or find who is missing with `unicomm trace show`",
        )


# Communicators that nobody finalized. Strong references: one that is dropped while operations are pending
# must not lose them, and its peers must not see it as gone.
_living: set[Communicator] = set()


def abort_all() -> None:
    """Aborts all communicators of this process, so that none of its operations waits any longer."""
    for comm in list(_living):
        comm.abort()


def forget_after_fork() -> None:
    """In a forked child the parent's communicators are the parent's: here they refuse everything.

    The child shares the parent's memory and connections: an operation, or a finalize by the end of a `with`
    block, would be taken for the parent's. Takes no lock: at the fork another thread may have held it.
    """
    for comm in _living:
        engine = comm._engine
        engine.closed_because = "the communicator belongs to the process that this one was forked from"
        engine.finalized = engine.closing = True
        engine.finalizing = threading.RLock()
        engine.fast = NoFastPath()
        engine.executor.forget()
        if isinstance(comm._member.backend, SurvivesFork):
            comm._member.backend.forget()
        if comm._dynamic is not None:
            comm._dynamic.forget()
    _living.clear()
    watchdog.forget_after_fork()


os.register_at_fork(after_in_child=forget_after_fork)

_when_closed: list[Callable[[], None]] = []


def when_closed(action: Callable[[], None]) -> None:
    """Has `action` called when the process ends and its communicators are closed."""
    _when_closed.append(action)


@atexit.register
def _at_exit() -> None:
    deadline = time.monotonic() + _EXIT_GRACE
    for comm in list(_living):
        left = max(0.1, deadline - time.monotonic())
        try:
            _end(comm, left)
        except CommError as error:
            _log.warning("at exit: %s", error)
        except Exception:
            with contextlib.suppress(Exception):
                _log.exception("at exit: communicator '%s'", comm.get_name())
    for action in _when_closed:
        action()
    threads.finish(_LAST_WORDS)
