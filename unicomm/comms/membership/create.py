"""Creation: connects a backend and makes what a communicator consists of."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unicomm.c10d.compat import Store
from unicomm.comms.backend import Backend, ChoosesDevice, PreviousEpoch, Reconfigures, Setup
from unicomm.comms.errors import BackendError, CommError, InvalidArgumentError, UnsupportedError
from unicomm.comms.execution.member import Member
from unicomm.comms.operations.dtypes import NAMES
from unicomm.comms.operations.reduction import REDUCTION_NAMES
from unicomm.comms.operations.table import BY_CODE
from unicomm.comms.options import CommOptions, read_hints
from unicomm.flight_recorder.recording import dumps, writer
from unicomm.flight_recorder.texts import format_ranks

from .endpoint import Endpoint
from .environment import Environment
from .epoch import ReconfigureState, no_ranks_yet, vacant_member
from .handles import LOOPBACK
from .rendezvous import Rendezvous, meet


@dataclass(frozen=True)
class Created:
    """What a new communicator is made of.

    Attributes:
        member: this rank's place, and the parts that it owns.
        dynamic: what a communicator that can be reconfigured keeps over its epochs.
        vacant: the error of its operations as long as it has no ranks.
        dump: what to call when the communicator breaks.
    """

    member: Member
    dynamic: ReconfigureState | None
    vacant: CommError | None
    dump: Callable[..., None] | None


def recorder_of(world: Environment) -> Any:
    """This process's flight recorder."""
    names = {
        "ops": {str(code): row.name for code, row in BY_CODE.items()},
        "dtypes": {str(code): name for code, name in NAMES.items()},
        "reductions": {"0": "", **{str(code): name for code, name in REDUCTION_NAMES.items()}},
        "local": [world.local_rank, world.local_size],
    }
    alone = world.size == 1 and world.source == "single process"
    return writer.get_recorder(names, -1 if alone else world.rank, world.size)


def check_device(device: Any, backend: type[Backend]) -> torch.device:
    """The device with its index.

    Raises `InvalidArgumentError` when the backend does not take it, and `UnsupportedError` when no index was
    given and torch has no device of that type here.
    """
    if device is None:
        raise InvalidArgumentError(
            "a communicator needs a device",
            hint='pass one, e.g. torch.device("cpu") or torch.device("cuda", local_rank)',
        )
    try:
        checked = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidArgumentError(
            f"device={device!r} is no device: {error}", hint='e.g. torch.device("cpu")'
        ) from None
    if checked.type not in backend.capabilities.device_types:
        raise InvalidArgumentError(
            f"backend '{backend.name}' has no device type '{checked.type}'",
            hint=f"it takes {', '.join(sorted(backend.capabilities.device_types))}",
        )
    if not issubclass(backend, ChoosesDevice):
        return checked
    if str(checked) == checked.type and not torch.get_device_module(checked).is_available():
        raise UnsupportedError(
            f"torch {torch.__version__} has no device of type '{checked.type}' on this machine",
            hint="install a torch that is built for it, and its driver; `unicomm doctor` tells more",
        )
    return backend.which_device(checked)


@dataclass(frozen=True)
class Request:
    """A communicator to connect, as each of its ranks asks for it.

    Attributes:
        labels: the ranks' numbers in the whole job; by default those of the communicator.
        check_peers: called while this waits for the others; raises if a rank cannot come any more.
        parent, color: see `Setup`.
        timeout: seconds that connecting may take; by default that of the options.
        number: agrees with the others on the labels, instead of `labels`; then all ranks connect, or none.
        meeting: the name under which the ranks meet, if they may name the communicator differently.
        previous: what the communicator's last epoch has left.
    """

    backend: type[Backend]
    device: torch.device
    name: str
    store: Store | None
    rank: int
    size: int
    options: CommOptions
    world: Environment
    labels: Sequence[int] | None = None
    check_peers: Callable[[], None] | None = None
    parent: Backend | None = None
    color: int = 0
    timeout: float | None = None
    number: Callable[[Rendezvous], Sequence[int]] | None = None
    meeting: str = ""
    previous: PreviousEpoch | None = None


def connect(asked: Request) -> Member:
    """Connects a backend and registers it with the recorder. Called by all ranks."""
    backend, name, rank, size, options = asked.backend, asked.name, asked.rank, asked.size, asked.options
    labels = range(size) if asked.labels is None else asked.labels
    timeout = options.timeout if asked.timeout is None else asked.timeout
    hints = read_hints(options.hints, backend.capabilities.hints, backend.name)
    together = size > 1 and backend.capabilities.moves_data
    if together and asked.store is None:
        raise InvalidArgumentError(
            f"{size} ranks need a store to find each other",
            comm=name,
            rank=rank,
            hint="pass store=, or start the program with torchrun",
        )
    recorder: Any = None
    unrecorded: OSError | None = None
    try:
        recorder = recorder_of(asked.world)
    except OSError as error:  # raised where the other members hear of it
        unrecorded = error
    began = time.monotonic()
    hello = {
        "backend": backend.name,
        "device type": asked.device.type,
        "hints": {k: str(v) for k, v in sorted(hints.items())},
    }
    engine: Backend | None = None
    try:
        if together:
            rendezvous = meet(
                asked.store,
                asked.meeting or name,
                rank,
                size,
                timeout=timeout,
                hello=hello,
                labels=asked.labels,
                check_peers=asked.check_peers,
            )
        else:
            rendezvous = meet(None, name, 0, 1, timeout=timeout, hello=hello)
        with rendezvous:  # tells the other members if this one cannot connect, so that they do not wait
            if unrecorded is not None:
                raise unrecorded
            if asked.number is not None:
                labels = asked.number(rendezvous)
            left = max(0.1, timeout - (time.monotonic() - began))
            setup = Setup(
                rendezvous,
                asked.store if together else None,
                rank,
                size,
                labels,
                asked.device,
                name,
                left,
                hints,
                asked.parent,
                asked.color,
                options.enable_reconfigure,
                asked.number is not None,
                asked.previous,
            )
            engine = backend.connect(setup)
            if asked.number is not None:
                rendezvous.exchange("connected", b"")
        index = recorder.add_comm(
            name=name,
            backend=engine.name,
            uid=rendezvous.uid,
            ranks=format_ranks(labels),
            rank=rank,
            size=size,
        )
    except BaseException as error:
        if engine is not None:  # another rank could not connect, or this one has no memory left
            if isinstance(error, CommError):
                engine.give_up(error)
            else:
                engine.abort()
            engine.close()
        if isinstance(error, CommError):
            error.locate(None, name, rank)
        elif isinstance(error, OSError):
            raise BackendError(
                f"backend '{backend.name}' cannot connect: {error}",
                comm=name,
                rank=rank,
                hint="is there memory left, and are there file descriptors (ulimit -n)?",
            ) from error
        raise
    return Member(
        *(engine, backend, name, rendezvous.uid, rank, size, labels, asked.device, options, asked.store),
        *(recorder, index, asked.world),
    )


def create(asked: Request) -> Created:
    """Connects a new communicator. Called by all its ranks; returns when all are connected."""
    dump = dumps.prepare()
    with contextlib.ExitStack() as on_error:
        dynamic = None
        if asked.options.enable_reconfigure:
            dynamic = _open_endpoint(asked.backend, asked.name, asked.options, asked.rank, asked.size)
            on_error.callback(dynamic.endpoint.close)
        member = connect(asked)
        on_error.pop_all()
    return Created(member, dynamic, None, dump)


def create_vacant(
    backend: type[Backend], device: torch.device, *, name: str, options: CommOptions, world: Environment
) -> Created:
    """Makes a communicator that gets its ranks from `reconfigure`. Waits for no other rank."""
    dump = dumps.prepare()
    read_hints(options.hints, backend.capabilities.hints, backend.name)
    dynamic = _open_endpoint(backend, name, options, world.rank, world.size)
    member = vacant_member(
        Member(
            *(backend, backend, name, "", 0, 1, [dynamic.label or 0]),  # type: ignore[arg-type]
            *(device, options, None, recorder_of(world), 0, world),
        )
    )
    return Created(member, dynamic, no_ranks_yet(name), dump)


def _open_endpoint(
    backend: type[Backend], name: str, options: CommOptions, rank: int, size: int
) -> ReconfigureState:
    hosts: list[str] = []
    if backend.capabilities.moves_data:
        hints = read_hints(options.hints, backend.capabilities.hints, backend.name)
        address = backend.reachable_at(hints) if issubclass(backend, Reconfigures) else ""
        hosts = [LOOPBACK] + [address] * (address not in ("", LOOPBACK))
    # A process alone has no number in a job yet: another process may have that number.
    label, top = (rank, size - 1) if size > 1 else (None, -1)
    return ReconfigureState(Endpoint(hosts, backend.name, name), label, top)
