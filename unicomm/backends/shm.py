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
from unicomm.backends.bootstrap.same_host import host_identity
from unicomm.comms.backend import (
    AllocatesMemory,
    Backend,
    Capabilities,
    ChecksPeers,
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
    AbortedError,
    BackendError,
    CommError,
    CommTimeoutError,
    MismatchError,
    PeerLostError,
    UnsupportedError,
)
from unicomm.comms.failures import thread_quiescence as census
from unicomm.comms.operations.call import Call, Message
from unicomm.comms.operations.dtypes import DTYPES, NAMES
from unicomm.comms.operations.reduction import RedOpType
from unicomm.comms.operations.table import BY_CODE, OPERATIONS, Kind
from unicomm.comms.options import Hint, parse_size

_HINTS = (
    Hint(
        "slot_bytes",
        parse_size,
        0,
        "Bytes staged at a time for collectives; two slots a rank. Default: 760K for two ranks, else 512K.",
    ),
    Hint("p2p_bytes", parse_size, 512 * 1024, "Bytes a rank's messages may fill before a send must wait."),
)
_TIMEOUT, _PEER_LOST, _MISMATCH, _ABORTED, _DEADLOCK = 1, 2, 3, 4, 6


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
    """One segment of memory for all ranks; see csrc/shm/group.hpp for the algorithm."""

    name = "shm"
    protocol_version = 1
    receives_from_any = True
    capabilities = Capabilities(
        device_types=frozenset({"cpu"}),
        operations=frozenset(n for n, row in OPERATIONS.items() if row.kind is Kind.COLLECTIVE),
        reduce_dtypes=frozenset(DTYPES),
        reduce_ops=frozenset(RedOpType),
        checks_mismatch=True,
        one_host=True,
        hints=_HINTS,
    )

    def __init__(self, group: Any, rank: int) -> None:
        self._group = group
        # Of which segments, as which rank: the communicator's, and that of its symmetric memory.
        self.member_of = [int(group.id)]
        self.rank = rank
        self.creator = threading.current_thread()
        _open.add(self)
        self._bytes = int(group.bytes)

    @classmethod
    def connect(cls, setup: Setup) -> ShmBackend:
        rendezvous, pid = setup.rendezvous, os.getpid()
        # A group of one rank needs no room to stage anything.
        slot, p2p = setup.hints["slot_bytes"] or _slot_bytes(setup.size), setup.hints["p2p_bytes"]
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
            # Nobody goes on before all have mapped it, and only then may the creator close its descriptor.
            answers = rendezvous.exchange("shm mapped", trouble.encode())
            if segment is not None:
                segment.close_fd()
            bad = [r for r, answer in enumerate(answers) if answer]
            if bad or group is None:
                reason = answers[bad[0]].decode() if bad else "no segment"
                raise BackendError(
                    f"no shared memory on rank {setup.labels[bad[0]] if bad else 0}: {reason}",
                    comm=setup.name,
                    culprits=[setup.labels[r] for r in bad],
                    hint="all ranks must run as the same user, see each other in /proc and have memory left;"
                    " in containers share the PID namespace",
                )
        except BaseException:
            segment = group = None  # else the error's traceback would keep the memory
            raise
        return cls(group, setup.rank)

    @classmethod
    def reachable_at(cls, hints: Mapping[str, Any]) -> str:
        return ""

    def fast_path(self, recorder: Any, index: int, timeout: float) -> Any:
        return _core.FastPath(self._group, recorder, index, timeout)

    def raise_fault(self, fault: _core.Fault, timeout: float) -> NoReturn:
        raise _error(fault, timeout)

    def check_peers(self, ranks: Sequence[int]) -> None:
        if (group := self._group) is not None and (fault := group.lost(list(ranks))) is not None:
            raise _error(fault, 0.0)

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
            raise _error(fault, call.timeout)

    def exchange(self, messages: Sequence[Message], timeout: float) -> None:
        fault = self._group.exchange(list(messages), timeout)
        if fault is not None:
            raise _error(fault, timeout)

    def open_exchange(self) -> Exchange:
        return _ShmExchange(self._group)

    def abort(self) -> None:
        self._group.abort()

    def expect_slow(self, name: str, seconds: float) -> None:
        self._group.expect_slow(seconds)

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
    """Called by the native core: see `census.bound` and csrc/shm/waiting/deadlock.hpp."""
    creators: dict[int, dict[int, threading.Thread]] = {}
    try:
        backends = list(_open)
    except RuntimeError:  # another thread opens one right now
        return None
    for backend in backends:
        for segment in list(backend.member_of):
            creators.setdefault(segment, {})[backend.rank] = backend.creator
    return census.bound(waiting, creators, comm, rank)


_core.set_thread_check(_threads_that_matter)


class _ShmExchange(Exchange):
    def __init__(self, group: Any) -> None:
        self._group = group
        self._exchange: _core.ShmExchange | None = _core.ShmExchange(group)

    def add(self, messages: Sequence[Message]) -> None:
        assert self._exchange is not None
        self._exchange.add(list(messages))

    def run(self, timeout: float, limit: float) -> list[tuple[int, int, CommError | None]]:
        assert self._exchange is not None
        over = self._exchange.run(self._group, timeout, limit)
        if isinstance(over, tuple):
            raise _error(over, timeout)
        return [(n, peer, None if fault is None else _error(fault, timeout)) for n, peer, fault in over]

    def interrupt(self) -> None:
        if (exchange := self._exchange) is not None:
            exchange.interrupt()

    def close(self) -> None:
        # Both hold the segment, which is not to outlive the communicator for a lane that somebody kept.
        self._group = self._exchange = None


def _slot_bytes(size: int) -> int:
    """What two ranks stage should have left the peer's caches when it is written again.

    Measured in docs/design/shm-rounds.md. With the room for messages a rank has at most 2 MiB.
    """
    return 760 * 1024 if size == 2 else 512 * 1024


def _same_host(setup: Setup, hosts: Sequence[str]) -> None:
    elsewhere = [setup.labels[r] for r, host in enumerate(hosts) if host.split()[1:] != hosts[0].split()[1:]]
    if elsewhere:
        names = sorted({host.split()[0] for host in hosts})
        raise UnsupportedError(
            f"shm needs all ranks on one host, but ranks {elsewhere} are not where rank {setup.labels[0]} is"
            f" (hosts: {', '.join(names)})",
            comm=setup.name,
            hint="use the backend 'gloo' across hosts; containers of one host must share the PID namespace",
        )


def _error(fault: _core.Fault, timeout: float) -> CommError:
    code, culprits, claims, detail = fault
    who = _ranks(culprits)
    if code == _TIMEOUT:
        when = f"when {detail}" if detail else f"after {timeout:g} s"
        return CommTimeoutError(
            f"{who} had not arrived {when}",
            culprits=culprits,
            hint="see what they are doing with `unicomm trace show`; a longer timeout= if they are only slow",
        )
    if code == _DEADLOCK:
        deadlock = CommTimeoutError(
            _circle(claims, detail) if claims else f"{who} wait for each other, and would for ever",
            culprits=culprits,
            late=culprits,
            hint="bring the calls of these ranks into one order; messages both ways go together in"
            " batch_op_create",
        )
        deadlock.explained = bool(claims)
        return deadlock
    if code == _PEER_LOST:
        what = "has finalized this communicator" if detail == "finalized" else "is gone (its process ended)"
        return PeerLostError(
            f"{who} {what}",
            culprits=culprits,
            hint="look at that rank's own output and exit code; its last operations: `unicomm trace show`",
        )
    if code == _MISMATCH:
        return MismatchError(_mismatch(claims, detail), culprits=culprits, hint=_mismatch_hint(culprits))
    if code == _ABORTED:
        return AbortedError(
            f"{who} aborted the communicator", culprits=culprits, hint="create a new communicator to go on"
        )
    hint = "please report this"
    if detail.startswith("cannot"):  # what the system refused
        hint = "is there memory left, and file descriptors? if it goes on, allocate with torch.empty"
    return BackendError(f"shm: {detail}", culprits=culprits, hint=hint)


def _circle(claims: list[tuple[int, ...]], detail: str) -> str:
    """Who waits in what for whom; `detail` has a line for each: the communicator's name, tab, file:line."""
    places = [line.split("\t", 1) for line in detail.splitlines()]
    several = len({name for name, _ in places}) > 1
    parts = []
    for (rank, op, _, _, peer, seq, _), (name, where) in zip(claims, places, strict=True):
        row = BY_CODE.get(op)
        what = f"rank {rank}{f' of {name!r}' if several else ''} in {row.name if row else f'operation {op}'}"
        if seq:
            what += f" #{seq}"
        to = {"send": "to", "recv": "from"}.get(row.name if row else "", "for")
        parts.append(f"{what} {to} rank {peer}{f' ({where})' if where else ''}")
    return f"these ranks wait for each other, and would for ever: {', '.join(parts)}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _mismatch_hint(culprits: Sequence[int]) -> str:
    return f"compare the program's path on {_ranks(culprits)} with the others'; nothing was written"


def _mismatch(claims: list[tuple[int, ...]], detail: str) -> str:
    """What each rank called, ranks with the same call together."""
    if detail == "sizes":
        parts = []
        for rank, _, dtype, _, sender, expected, sent in claims:
            size = _element_size(dtype)
            parts.append(
                f"rank {rank} expects {expected // size} elements from rank {sender},"
                f" which sends {sent // size}"
            )
        return "; ".join(parts)
    groups: dict[str, list[int]] = {}
    for rank, op, dtype, red, root, count, extra in claims:
        row = BY_CODE.get(op)
        text = row.name if row else f"operation {op}"
        arguments = []
        if dtype:
            arguments.append(
                f"{NAMES.get(dtype, '?')}[{count}]" if row and row.same_count else NAMES.get(dtype, "?")
            )
        if row and not row.same_count and extra:
            arguments.append(f"sizes #{extra:016x}")
        if red:
            arguments.append(RedOpType(red).name if red in set(RedOpType) else "?")
        if row and row.kind is Kind.P2P:
            arguments.append(f"{'to' if row.name == 'send' else 'from'} rank {root}")
        elif root >= 0:
            arguments.append(f"root {root}")
        groups.setdefault(f"{text}({', '.join(arguments)})", []).append(rank)
    said = [f"{_ranks(ranks)}: {text}" for text, ranks in sorted(groups.items(), key=lambda g: -len(g[1]))]
    return "the ranks called different things; " + "; ".join(said or [detail])


def _element_size(code: int) -> int:
    return next((info.dtype.itemsize for info in DTYPES.values() if info.code == code), 1)
