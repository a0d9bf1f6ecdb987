"""The names of backends, and `new_comm`."""

from __future__ import annotations

import difflib
import importlib
import operator
from collections.abc import Mapping, Sequence
from datetime import timedelta
from importlib.metadata import EntryPoint, entry_points

import torch

from unicomm.backends.bootstrap import store_of_job
from unicomm.c10d.compat import Store
from unicomm.comms.backend import PROTOCOL_VERSION, Backend, ChecksProcess, Reconfigures, device_streams
from unicomm.comms.communicator import Communicator, communicator_of
from unicomm.comms.errors import InvalidArgumentError, UnsupportedError
from unicomm.comms.execution.device import graphs
from unicomm.comms.membership import create
from unicomm.comms.membership.environment import Environment, detect_environment
from unicomm.comms.options import CommOptions, copy_hints, default_timeout, seconds, with_environment

# Imported at first use, so that `import unicomm` loads no backend.
_BUILT_IN = {
    "shm": "unicomm.backends.shm:ShmBackend",
    "gloo": "unicomm.backends.gloo.backend:GlooBackend",
    "mpi": "unicomm.backends.mpi.backend:MpiBackend",
    "tcp": "unicomm.backends.tcp.backend:TcpBackend",
    "ucx": "unicomm.backends.ucx.backend:UcxBackend",
    "nccl": "unicomm.backends.nccl.backend:NcclBackend",
    "rccl": "unicomm.backends.nccl.backend:RcclBackend",
    "nvshmem": "unicomm.backends.shmem.backend:NvshmemBackend",
    "rocshmem": "unicomm.backends.shmem.backend:RocshmemBackend",
    "fake": "unicomm.backends.fake:FakeBackend",
    "auto": "unicomm.backends.auto:AutoBackend",
}
_registered: dict[str, type[Backend]] = {}
_stand_in: type[Backend] | None = None  # the backend behind all names


def register_backend(name: str, backend: type[Backend]) -> None:
    """Makes `new_comm(name, ...)` use the class `backend`.

    Raises `UnsupportedError` if the class was written for another version of the backend protocol, and
    `InvalidArgumentError` if the name is taken or the class is no backend.
    """
    if name in _BUILT_IN or _registered.get(name, backend) is not backend:
        raise InvalidArgumentError(f"backend '{name}' exists already", hint="choose another name")
    if not (isinstance(backend, type) and issubclass(backend, Backend)):
        raise InvalidArgumentError(
            f"{backend!r} is no backend", hint="derive a class from unicomm.comms.backend.Backend"
        )
    _check_version(name, backend)
    _registered[name] = backend


def _check_version(name: str, backend: type[Backend]) -> None:
    """Raises `UnsupportedError` for a backend class of another protocol version."""
    version, ours = getattr(backend, "protocol_version", None), PROTOCOL_VERSION
    if version == ours:
        return
    states = "states no version" if version is None else f"is written for version {version!r}"
    if version is None:
        hint = f"write protocol_version = {ours} in the class, if it is written for that version"
    elif isinstance(version, int) and version > ours:
        hint = "upgrade unicomm"
    else:
        hint = f"install a release of the backend that is written for version {ours}"
    raise UnsupportedError(
        f"backend '{name}' ({backend.__qualname__}) {states} of the backend protocol; this unicomm has"
        f" version {ours}",
        hint=hint,
    )


def _installed() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group="unicomm.backends")}


def built_in_backends() -> list[str]:
    """Returns the names of the backends that come with unicomm."""
    return sorted(_BUILT_IN)


def backend_names() -> list[str]:
    """Returns the names of all backends that this installation knows."""
    return sorted({*_BUILT_IN, *_registered, *_installed()})


def stand_in(backend: type[Backend]) -> None:
    """Makes every known name mean `backend` in this process. For a process that only plays a rank."""
    global _stand_in
    _stand_in = backend


def find_backend(name: str) -> type[Backend]:
    """Returns the class of a backend; `UnsupportedError` with the cure if its library is missing."""
    if _stand_in is not None and (name == _stand_in.name or name in backend_names()):
        return _stand_in
    if name in _registered:
        return _registered[name]
    if name in _BUILT_IN:
        module, _, attribute = _BUILT_IN[name].partition(":")
        found: type[Backend] = getattr(importlib.import_module(module), attribute)
        return found
    entry = _installed().get(name)
    if entry is None:
        known = backend_names()
        close = difflib.get_close_matches(str(name), known, n=1)
        raise InvalidArgumentError(
            f"there is no backend '{name}'",
            hint=(f"did you mean '{close[0]}'? " if close else "") + f"known: {', '.join(known)}",
        )
    try:
        loaded = entry.load()
    except ImportError as error:
        raise UnsupportedError(
            f"backend '{name}' ({entry.value}) cannot be imported: {error}",
            hint="install what it needs; `unicomm doctor` lists what is missing",
        ) from error
    register_backend(name, loaded)
    return _registered[name]


def _checked_place(rank: int, size: int) -> tuple[int, int]:
    try:
        rank, size = operator.index(rank), operator.index(size)
    except TypeError:
        raise InvalidArgumentError(
            f"rank={rank!r} and size={size!r} are no whole numbers", hint="pass ints, or neither"
        ) from None
    if not 0 <= rank < size:
        raise InvalidArgumentError(f"rank={rank} is not in range [0, {size})", hint="ranks count from 0")
    return rank, size


def _environment(rank: int | None, size: int | None) -> Environment:
    """This process's place by its launcher. A rank and size that are given need no variables beside them."""
    try:
        return detect_environment()
    except InvalidArgumentError:
        if rank is None or size is None:
            raise
        return Environment(rank, size, None, None, "arguments", "")


def _check_usable(backend: type[Backend], size: int, world: Environment) -> None:
    if issubclass(backend, ChecksProcess):
        backend.check_usable(size, world.source if world.size == size else "")


def new_comm(
    backend: str,
    device: torch.device | str,
    name: str = "main",
    *,
    abort_process_on_timeout_or_error: bool = False,
    timeout: timedelta | float | None = None,
    store: Store | None = None,
    enable_reconfigure: bool = False,
    hints: Mapping[str, str | bool] | None = None,
    rank: int | None = None,
    size: int | None = None,
) -> Communicator:
    """Creates a communicator of all ranks of the job. Called by all of them, with the same arguments.

    Returns when every rank is connected and its options were compared.

    Args:
        backend: "auto" (the fastest that reaches all ranks), "shm" (ranks of one host), "tcp" and
            "gloo" (any hosts, over TCP), "ucx" (the networks of UCX),
            "mpi" (ranks that mpiexec started), "nccl", "rccl", "nvshmem", "rocshmem" (GPUs), "fake" (one
            process plays any rank), or a registered one.
        device: the device of the tensors; required.
        name: tells communicators apart. A name may be used again.
        abort_process_on_timeout_or_error: end the process when the communicator breaks, instead of raising.
        timeout: of the creation, and of each operation without its own; seconds or timedelta.
            Default: TORCHCOMM_TIMEOUT_SECONDS, else 600.
        store: a torch.distributed Store that all ranks share. Default: the one of the launcher
            (MASTER_ADDR and MASTER_PORT), or a file where one launcher runs all ranks on one host.
        enable_reconfigure: the ranks may change later, see docs/reconfigure.md. The communicator then waits
            for no rank, and has no ranks before the first `reconfigure`, as in torchcomms; with rank= and
            size= it connects them at once. `UnsupportedError` if the backend cannot.
        hints: options of the backend, text to text; True and False are text, too. An unknown one raises
            `InvalidArgumentError`.
        rank: this rank. Default: from the environment (torchrun, Open MPI, PMI, PMIx, PALS, Slurm,
            TORCHCOMM_RANK and TORCHCOMM_SIZE), else one rank.
        size: the number of ranks; given together with `rank`, or not at all.

    Raises:
        CommTimeoutError: ranks were missing at the deadline; `culprits` names them.
        MismatchError: ranks passed different options; `culprits` is the minority.
        InvalidArgumentError, UnsupportedError: before anything was sent.
        BackendError: the store or the transport failed.
    """
    created = connect(
        backend,
        device,
        name,
        abort_process_on_timeout_or_error=abort_process_on_timeout_or_error,
        timeout=timeout,
        store=store,
        enable_reconfigure=enable_reconfigure,
        hints=hints,
        rank=rank,
        size=size,
    )
    return communicator_of(created, Communicator)


def connect(
    backend: str,
    device: torch.device | str,
    name: str,
    *,
    abort_process_on_timeout_or_error: bool = False,
    timeout: timedelta | float | None = None,
    store: Store | None = None,
    enable_reconfigure: bool = False,
    hints: Mapping[str, str | bool] | None = None,
    rank: int | None = None,
    size: int | None = None,
    meeting: str = "",
    labels: Sequence[int] | None = None,
) -> create.Created:
    """Does what `new_comm` does, up to the object that the user holds.

    `meeting`: the name under which the ranks meet, by default `name`. `labels`: the ranks' numbers in the
    whole job, by which those that wait elsewhere are found; by default those of the communicator.
    """
    found = find_backend(backend)
    device = create.check_device(device, found)
    graphs.refuse_capture(device_streams(found, device), "new_comm", str(name))
    if not isinstance(name, str) or not name:
        raise InvalidArgumentError(f"name={name!r} is no name", hint='pass a text such as "main"')
    if enable_reconfigure and not issubclass(found, Reconfigures):
        raise UnsupportedError(
            f"backend '{backend}' cannot change its ranks", comm=name, hint="leave enable_reconfigure off"
        )
    options = CommOptions(
        timeout=seconds(timeout, default_timeout()),
        abort_process_on_timeout_or_error=bool(abort_process_on_timeout_or_error),
        enable_reconfigure=bool(enable_reconfigure),
        hints=with_environment(copy_hints(hints)),
    )
    if (rank is None) != (size is None):
        raise InvalidArgumentError("rank and size go together", hint="pass both, or neither")
    by_launcher = rank is None
    if rank is not None and size is not None:
        rank, size = _checked_place(rank, size)
    world = _environment(rank, size)
    if enable_reconfigure and by_launcher:
        return create.create_vacant(found, device, name=name, options=options, world=world)
    if rank is None or size is None:
        rank, size = world.rank, world.size
    _check_usable(found, size, world)
    if by_launcher and store is None and size > 1 and found.capabilities.moves_data:
        store = store_of_job(world, options.timeout, uses_mpi=backend == "mpi")
    asked = create.Request(
        *(found, device, name, store, rank, size, options, world), labels=labels, meeting=meeting
    )
    return create.create(asked)
