"""Shared memory: ranks of one host, as processes or as threads of one process, over the native core."""

from __future__ import annotations

import json
import os
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from unicomm import _core
from unicomm.backends.bootstrap import host_identity
from unicomm.comms.backend import (
    AllocatesMemory,
    Backend,
    Capabilities,
    ChecksPeers,
    Completed,
    Exchange,
    ExtendsDeadlines,
    HasFastPath,
    HasSymmetricMemory,
    OpensExchange,
    Reconfigures,
    ReportsMemory,
    RunsCollectives,
    Setup,
)
from unicomm.comms.errors import (
    BackendError,
    CommError,
    UnsupportedError,
)
from unicomm.comms.failures import thread_quiescence
from unicomm.comms.failures.faults import core_error, told
from unicomm.comms.operations import reproducible
from unicomm.comms.operations.call import Call, Message
from unicomm.comms.operations.dtypes import DTYPES
from unicomm.comms.operations.reduction import RedOpType, ReproducibleOp
from unicomm.comms.operations.table import OPERATIONS, Kind
from unicomm.comms.options import Hint, parse_bool, parse_size

_HINTS = (
    Hint(
        "slot_bytes",
        parse_size,
        0,
        "Bytes staged at a time for collectives; two slots a rank. Default: 760K for two ranks, else 512K.",
    ),
    Hint(
        "p2p_bytes",
        parse_size,
        0,
        "Bytes a rank's messages may fill before a send must wait. Default: 1M a peer; over 8 ranks, 512K.",
    ),
    Hint(
        "one_copy",
        parse_bool,
        False,
        "Whether messages that do not fit into the ring are read where they lie, if the kernel permits it.",
    ),
)


class ShmBackend(
    Backend,
    RunsCollectives,
    OpensExchange,
    HasFastPath,
    ExtendsDeadlines,
    AllocatesMemory,
    HasSymmetricMemory,
    ReportsMemory,
    ChecksPeers,
    Reconfigures,
):
    """A communicator in one memory segment of all its ranks; csrc/shm/group.hpp has the algorithm."""

    name = "shm"
    protocol_version = 1
    receives_from_any = True
    capabilities = Capabilities(
        device_types=frozenset({"cpu"}),
        operations=frozenset(n for n, row in OPERATIONS.items() if row.kind is Kind.COLLECTIVE),
        reduce_dtypes=frozenset(DTYPES),
        reduce_ops=frozenset(RedOpType),
        reductions=frozenset((dtype, op) for dtype in reproducible.DTYPES for op in ReproducibleOp),
        checks_mismatch=True,
        one_host=True,
        hints=_HINTS,
    )

    def __init__(self, group: Any, rank: int) -> None:
        self._group = group
        # The segments of this rank: the communicator's, and that of its symmetric memory.
        self.member_of = [int(group.id)]
        self.rank = rank
        self.creator = threading.current_thread()
        _open.add(self)
        self._bytes = int(group.bytes)

    @classmethod
    def connect(cls, setup: Setup) -> ShmBackend:
        rendezvous, pid = setup.rendezvous, os.getpid()
        # A group of one rank needs no room to stage anything.
        slot = setup.hints["slot_bytes"] or _slot_bytes(setup.size)
        p2p = setup.hints["p2p_bytes"] or _p2p_bytes(setup.size)
        if setup.size == 1:
            slot = p2p = 4096
        segment = group = None
        try:
            trouble = ""
            if setup.rank == 0:
                try:
                    segment = _core.ShmSegment(setup.size, slot, p2p)
                except OSError as error:
                    trouble = str(error)
            mine = {
                "host": host_identity(),
                "pid": pid,
                "fd": segment.fd if segment else -1,
                "trouble": trouble,
                "proof": _core.proof_of_reading(),
            }
            everyone = [json.loads(blob) for blob in rendezvous.exchange("shm", json.dumps(mine).encode())]
            _same_host(setup, [info["host"] for info in everyone])
            leader = everyone[0]
            if not leader["trouble"]:
                try:
                    segment = segment or _core.ShmSegment.open(leader["pid"], leader["fd"])
                    group = _core.ShmGroup(
                        segment, setup.rank, [info["pid"] for info in everyone], setup.name
                    )
                except OSError as error:
                    trouble = str(error)
            # No rank goes on before all have mapped it; only then may the creator close its descriptor.
            readable = _readable(everyone, setup.hints["one_copy"])
            said = rendezvous.exchange("shm mapped", json.dumps([trouble, readable]).encode())
            answers = [json.loads(blob) for blob in said]
            if segment is not None:
                segment.close_fd()
            bad = [r for r, (answer, _) in enumerate(answers) if answer]
            if bad or group is None:
                reason = answers[bad[0]][0] if bad else "no segment"
                raise BackendError(
                    f"no shared memory on rank {setup.rendezvous.labels[bad[0]] if bad else 0}: {reason}",
                    comm=setup.name,
                    culprits=[setup.rendezvous.labels[r] for r in bad],
                    hint="all ranks must run as the same user, see each other in /proc and have memory left;"
                    " in containers share the PID namespace",
                )
        except BaseException:
            segment = group = None  # which the error's traceback would keep
            raise
        readers = [r for r, (_, can_read) in enumerate(answers) if setup.rank in can_read]
        group.offer_memory([tuple(info["proof"]) for info in everyone], readers)
        return cls(group, setup.rank)

    @classmethod
    def reachable_at(cls, hints: Mapping[str, Any]) -> str:
        return ""

    @property
    def group(self) -> Any:
        """The native core's end of the communicator, for those that run operations in it."""
        return self._group

    def fast_path(self, recorder: Any, index: int, timeout: float) -> Any:
        return _core.FastPath(self._group, recorder, index, timeout)

    def raise_fault(self, fault: _core.Fault, timeout: float) -> NoReturn:
        raise core_error(fault, timeout)

    def check_peers(self, ranks: Sequence[int]) -> None:
        if (group := self._group) is not None and (fault := group.lost(list(ranks))) is not None:
            raise core_error(fault, 0.0)

    def left(self, ranks: Sequence[int]) -> list[int]:
        return [] if (group := self._group) is None else group.left(list(ranks))

    def run(self, call: Call) -> None:
        op = call.op
        fault = self._group.run(
            call.operation.code,
            call.dtype_code,
            0 if op is None else op.code,
            0.0 if op is None or op.factor is None else op.factor,
            call.root,
            call.count,
            call.extra,
            call.timeout,
            call.inputs,
            call.outputs,
            call.in_splits,
            call.out_splits,
        )
        if fault is not None:
            raise core_error(fault, call.timeout)

    def exchange(self, messages: Sequence[Message], timeout: float) -> None:
        fault = self._group.exchange(list(messages), timeout)
        if fault is not None:
            raise core_error(fault, timeout)

    def open_exchange(self) -> Exchange:
        return _ShmExchange(self._group)

    # These three may be called from any thread, also when `close` has been called.
    def abort(self) -> None:
        if (group := self._group) is not None:
            group.abort()

    def give_up(self, error: CommError) -> None:
        code, culprits = told(error)
        if not code:
            self.abort()
        elif (group := self._group) is not None:
            group.give_up(code, culprits)

    def expect_slow(self, name: str, seconds: float) -> None:
        if (group := self._group) is not None:
            group.expect_slow(seconds)

    def close(self) -> None:
        _open.discard(self)
        self._group.finalize()
        self._group = None  # unmaps; the peers' own mappings keep what they have yet to read

    @classmethod
    def version(cls) -> str:
        return f"native core, {_core.fold_isa()}"

    def memory(self) -> dict[str, int]:
        return {"segment": self._bytes}

    def allocate(self, nbytes: int) -> torch.Tensor:
        try:
            return torch.from_numpy(_core.heap_allocate(nbytes))
        except (MemoryError, OSError) as error:
            raise BackendError(
                f"no memory for a tensor of {nbytes} bytes: {str(error) or 'the heap is full'}",
                hint="free tensors, or allocate it with torch.empty: it then is staged",
            ) from error

    def allocated_here(self, tensor: torch.Tensor) -> bool:
        return tensor.is_contiguous() and _core.heap_holds(tensor.data_ptr(), tensor.nbytes)

    def symmetric_table(self, one_host: bool = True) -> _core.SymmTable:
        return _core.symm_host()

    def symmetric_joined(self, uid: bytes, domain: Any) -> None:
        self.member_of.append(int.from_bytes(uid[:8], sys.byteorder))  # HostId in csrc/symm/tables/host.cpp

    def bytes_allocated(self) -> int:
        return _core.heap_allocated()


_open: weakref.WeakSet[ShmBackend] = weakref.WeakSet()


def _threads_that_matter(comm: int, rank: int, waiting: list[int]) -> list[int] | None:
    """Called by the native core: see `threads_that_stay` and csrc/shm/waiting/deadlock.hpp."""
    creators: dict[int, dict[int, threading.Thread]] = {}
    try:
        backends = list(_open)
    except RuntimeError:  # another thread opens one right now
        return None
    for backend in backends:
        for segment in list(backend.member_of):
            creators.setdefault(segment, {})[backend.rank] = backend.creator
    return thread_quiescence.threads_that_stay(waiting, creators, comm, rank)


_core.set_thread_check(_threads_that_matter)


class _ShmExchange(Exchange):
    def __init__(self, group: Any) -> None:
        self._group = group
        self._exchange: _core.ShmExchange | None = _core.ShmExchange(group)

    def add(self, messages: Sequence[Message]) -> None:
        assert self._exchange is not None
        self._exchange.add(list(messages))

    def run(self, timeout: float, limit: float, given: float) -> list[Completed]:
        assert self._exchange is not None
        over = self._exchange.run(self._group, timeout, limit)
        if isinstance(over, tuple):
            raise core_error(over, given)
        return [(n, peer, None if fault is None else core_error(fault, given)) for n, peer, fault in over]

    def interrupt(self) -> None:
        if (exchange := self._exchange) is not None:
            exchange.interrupt()

    def attend(self, attended: bool) -> None:
        if (exchange := self._exchange) is not None:
            exchange.set_attended(attended)

    def close(self) -> None:
        # Both hold the segment, which must not outlive the communicator if a user keeps the message queue.
        self._group = self._exchange = None


def _readable(everyone: list[dict[str, Any]], one_copy: bool) -> list[int]:
    """Returns the ranks whose memory this process can and should read: docs/design/one-copy.md."""
    if not one_copy:
        return []
    return [r for r, info in enumerate(everyone) if _core.can_read(info["pid"], tuple(info["proof"]))]


def _slot_bytes(size: int) -> int:
    """Returns the default size of a slot. For two ranks the slot is so large that its lines have left the
    peer's caches when they are written again.

    Measured in docs/design/shm-rounds.md.
    """
    return 760 * 1024 if size == 2 else 512 * 1024


def _p2p_bytes(size: int) -> int:
    """Returns the default room for a rank's messages.

    Rings of 1 MiB are the fastest (docs/design/one-copy.md), but each pair of ranks has two, so that many
    ranks would need too much memory.
    """
    return (size - 1) << 20 if size <= 8 else 512 * 1024


def _same_host(setup: Setup, hosts: Sequence[str]) -> None:
    labels = setup.rendezvous.labels
    elsewhere = [labels[r] for r, host in enumerate(hosts) if host.split()[1:] != hosts[0].split()[1:]]
    if elsewhere:
        names = sorted({host.split()[0] for host in hosts})
        raise UnsupportedError(
            f"shm needs all ranks on one host, but ranks {elsewhere} are not where rank {labels[0]} is"
            f" (hosts: {', '.join(names)})",
            comm=setup.name,
            hint="use the backend 'gloo' across hosts; containers of one host must share the PID namespace",
        )
