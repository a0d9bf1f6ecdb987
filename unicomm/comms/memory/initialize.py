"""Connects symmetric memory: of a communicator, and of a team that shares its communicator's memory."""

from __future__ import annotations

import zlib
from typing import Any

import torch

from unicomm.comms.backend import HasSymmetricMemory, LaunchesKernels
from unicomm.comms.errors import (
    BackendError,
    InvalidArgumentError,
    MismatchError,
    UnsupportedError,
)
from unicomm.comms.execution.engine import Engine
from unicomm.comms.execution.one_sided import agree, issue
from unicomm.comms.operations.numbers import ADDRESSABLE, whole_number
from unicomm.comms.operations.symmetric_table import Capability
from unicomm.comms.options import Timeout
from unicomm.comms.streams import on_device

from .device_domain import DeviceDomain
from .device_kernels import CupyLauncher
from .device_memory import DeviceMemory
from .symmetric import SymmetricMemory, attached, memory_of


def initialize(engine: Engine, heap_bytes: int = 0, timeout: Timeout = None) -> SymmetricMemory:
    """Gives a communicator symmetric memory. Collective. See `unicomm.symm.init`."""
    engine.check_open("symm_init")
    if (memory := attached(engine)) is not None:
        return memory
    with engine.located("symm_init"):
        heap_bytes = whole_number("heap_bytes", heap_bytes, 0, ADDRESSABLE // engine.group.size - 1)
    engine.refuse_capture("symm_init")
    backend = engine.backend
    if not isinstance(backend, HasSymmetricMemory):
        engine.refuse(
            "symm_init",
            f"backend '{backend.name}' has no one-sided access",
            "use the backend 'shm', for ranks of one host",
        )
    one_host, launcher = True, None
    if engine.executor.streams is not None:
        one_host, launcher = _look_around(engine, backend, timeout)
    table = backend.symmetric_table(one_host)
    note = torch.zeros(129, dtype=torch.uint8, device="cpu")  # whether rank 0 failed, then the unique id
    trouble = ""
    if engine.rank == 0:
        fault, uid = table.unique_id(engine.group.size, heap_bytes)
        if fault is None:
            note[1:] = torch.frombuffer(bytearray(uid), dtype=torch.uint8)
        else:
            note[0], trouble = 1, fault[3]
    try:
        told = note.to(engine.member.device)
        engine.collective("broadcast", (told,), False, None, timeout, root=0).wait_blocking()
        note = told.cpu()
        if note[0]:
            raise engine.error(
                BackendError,
                "symm_init",
                f"no symmetric heap: {trouble or 'rank 0 could not make it'}",
                "ask for fewer heap_bytes; is there memory left, and file descriptors?",
                (0,),
            )
    except BaseException:
        if engine.rank == 0 and not note[0]:
            table.discard_id(note[1:].numpy().tobytes())
        raise
    uid = note[1:].numpy().tobytes()
    made: list[SymmetricMemory] = []

    def job(limit: float) -> None:
        with on_device(engine.member.device):
            fault, domain = table.init(uid, engine.rank, engine.group.size, engine.name, limit)
        if fault is not None:
            backend.raise_fault(fault, limit)
        made.append(_memory(engine, table, domain, launcher))
        backend.symmetric_joined(uid, domain)

    issue(engine, "symm_init", job, timeout=timeout)
    engine.symmetric = memory = made[0]
    memory.open()
    return memory


def _look_around(engine: Engine, backend: HasSymmetricMemory, timeout: Timeout) -> tuple[bool, Any]:
    """Returns whether all ranks are on one host, and the launcher of this rank's kernels. Collective."""
    launcher: Any = None
    trouble: UnsupportedError | None = None
    try:
        device = engine.member.device
        launcher = backend.kernels(device) if isinstance(backend, LaunchesKernels) else CupyLauncher(device)
    except UnsupportedError as error:
        trouble = error
    own = [zlib.crc32(backend.host().encode()), int(trouble is None)]
    rows = agree(engine, "symm_init", (), own, timeout)
    lacking = [rank for rank, (_, fine) in enumerate(rows) if not fine]
    if trouble is not None:
        raise trouble
    if lacking:
        text = f"ranks {lacking} cannot compile the kernels of symmetric memory; they say why"
        raise engine.error(UnsupportedError, "symm_init", text, "install there what it says", lacking)
    return len({host for host, _ in rows}) == 1, launcher


def _memory(engine: Engine, table: Any, domain: Any, launcher: Any) -> SymmetricMemory:
    capabilities, name = Capability(table.capabilities), str(table.name)
    streams = engine.executor.streams
    if streams is None:
        return SymmetricMemory(engine, capabilities, name, domain)
    device = DeviceDomain(domain, streams, launcher, engine.member.device)
    return DeviceMemory(engine, capabilities, name, device)


def initialize_team(team: Engine | None, whole: Engine, timeout: Timeout = None) -> SymmetricMemory | None:
    """Gives a team of `whole`'s ranks a part of its symmetric memory. Collective over `whole`.

    See `unicomm.symm.init_team`.
    """
    memory = memory_of(whole, "symm_init")
    whole.refuse_capture("symm_init")
    memory.require("symm_init", Capability.TEAMS)
    start, stride, size, wrong = 0, 1, 0, ""
    if team is not None:
        team.check_open("symm_init")
        known = {label: rank for rank, label in enumerate(whole.member.labels)}
        ranks = [known.get(label, -1) for label in team.member.labels]
        size, start = len(ranks), ranks[0]
        stride = ranks[1] - start if size > 1 else 1
        if team.symmetric is not None:
            wrong = f"communicator '{team.name}' has symmetric memory already"
        elif -1 in ranks or any(rank != start + i * stride for i, rank in enumerate(ranks)):
            wrong = f"ranks {ranks} of '{whole.name}' are not evenly spaced, or not in it"
        if wrong:
            size, stride = 2, 0  # no team, of which all ranks hear
    said = memory.allocate(memory.domain.said_bytes(memory.size), timeout)
    made = []

    def job(limit: float) -> None:
        fault, domain = memory.domain.team_split(start, stride, size, limit)
        if wrong:
            raise InvalidArgumentError(
                wrong, hint="split ranks i, i + k, i + 2 k ...; or give it memory of its own: symm.init"
            )
        memory.check(fault, limit)
        made.append(domain)

    try:
        issue(memory.engine, "symm_init", job, timeout=timeout)
    except (InvalidArgumentError, MismatchError):
        memory.free(said, timeout)  # on all ranks
        raise
    if team is None:
        return None
    mine = type(memory)(team, memory.capabilities, memory.library, made[0], memory)
    mine.open(said)
    team.symmetric = mine
    return mine
