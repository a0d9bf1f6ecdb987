"""`auto`: the fastest backend that reaches all ranks of the communicator.

It chooses shared memory if all ranks can share it, messages if no two can, else shared memory within each
host and messages between hosts: by UCX if all ranks have the same UCX and a network for it that TCP does not
use, or were told to use it, else by TCP. It chooses for each communicator, so that a split whose ranks share
a host uses shared memory even if its parent cannot.

Ranks share a host if the same kernel runs them, they see each other's process numbers, and each can open the
others' memory, which is tried. Networks do not matter: containers of one host that share its process numbers
share its memory as well. See docs/design/hosts.md.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unicomm import _core
from unicomm.backends.gloo.backend import GlooBackend
from unicomm.backends.hosts.backend import Far, over
from unicomm.backends.hosts.layout import Layout
from unicomm.backends.tcp.backend import TcpBackend
from unicomm.backends.ucx.backend import UcxBackend
from unicomm.backends.ucx.devices import devices_beside, rdma_ports
from unicomm.backends.ucx.library import open_library, version_text, why_not
from unicomm.c10d.compat import PrefixStore
from unicomm.comms.backend import Backend, Capabilities, Reconfigures, Setup, Unconnected
from unicomm.comms.errors import BackendError, InvalidArgumentError, UnsupportedError
from unicomm.comms.failures.faults import rank_list
from unicomm.comms.failures.first_cause import FirstCause
from unicomm.comms.membership.rendezvous import meet
from unicomm.comms.options import Hint, read_hints

from .bootstrap import addresses, host_identity
from .out_of_band import patience
from .shm import ShmBackend

_log = logging.getLogger("unicomm")
#: UCX without shared memory: ranks that can share memory do without UCX.
_NETWORKS = "^sm"


def _read_hosts(text: str) -> tuple[str, ...]:
    hosts = tuple(part.strip() for part in text.split(","))
    if not all(hosts):
        raise ValueError("expected a name for each rank's host, such as 0,0,1,1")
    return hosts


_HOSTS = Hint(
    "hosts",
    _read_hosts,
    (),
    "Keeps ranks apart that could share memory: a name for the host of each rank, such as 0,0,1,1.",
)


def _read_between(text: str) -> str:
    if text not in ("", "tcp", "ucx", "gloo"):
        raise ValueError("expected tcp, ucx or gloo")
    return text


_BETWEEN = Hint(
    "between",
    _read_between,
    "",
    "What carries messages between hosts: tcp, ucx or gloo. Default: ucx if all ranks have it and an RDMA"
    " port, or a hint or variable of UCX; else tcp.",
)
_UCX_HINTS = tuple(
    hint
    for hint in UcxBackend.capabilities.hints
    if hint.name not in {known.name for known in GlooBackend.capabilities.hints}
)
_UCX_VARIABLES = ("UCX_TLS", "UCX_NET_DEVICES")


class AutoBackend(Unconnected, Reconfigures):
    """Chooses a backend: `connect` returns the chosen one, and no other method is ever called."""

    name = "auto"
    protocol_version = 1
    capabilities = Capabilities(
        device_types=frozenset({"cpu"}),
        hints=(
            *ShmBackend.capabilities.hints,
            *GlooBackend.capabilities.hints,
            *_UCX_HINTS,
            _HOSTS,
            _BETWEEN,
        ),
    )

    reachable_at = GlooBackend.reachable_at

    @classmethod
    def connect(cls, setup: Setup) -> Backend:
        place = addresses.here(setup.store)
        mine = {"host": host_identity(), "place": place, "ucx": _wants_ucx(setup)}
        everyone = [json.loads(blob) for blob in setup.rendezvous.exchange("auto", json.dumps(mine).encode())]
        names = _named_hosts(setup)
        # Without the host's name, which may differ between containers of one host.
        where = [(names[r], info["host"].split(" ", 1)[1]) for r, info in enumerate(everyone)]
        layout = Layout.by(where, setup.rank)
        places = [addresses.Place(*info["place"]) for info in everyone]
        return _connect(setup, layout, where, places, all(info["ucx"] for info in everyone))


def _wants_ucx(setup: Setup) -> bool:
    """Whether this rank has a network that UCX drives and TCP does not, or was told how to use UCX."""
    hinted = any(setup.hints[hint.name] for hint in _UCX_HINTS)
    return hinted or any(name in os.environ for name in _UCX_VARIABLES) or bool(rdma_ports())


def _named_hosts(setup: Setup) -> list[str]:
    """Returns the host that the hint names for each rank of this communicator."""
    names: Sequence[str] = setup.hints[_HOSTS.name]
    if not names:
        return [""] * setup.size
    if max(setup.labels) >= len(names):
        raise InvalidArgumentError(
            f"the hint 'hosts' names those of {len(names)} ranks, but there is a rank {max(setup.labels)}",
            comm=setup.name,
            hint="it names the host of every rank of the job, also for a split",
        )
    return [names[label] for label in setup.labels]


def _connect(
    setup: Setup, layout: Layout, where: Sequence[object], places: Sequence[addresses.Place], by_ucx: bool
) -> Backend:
    """`by_ucx`: whether messages between hosts go over UCX where nothing else is asked for."""
    near: Backend | None = None
    if len(layout.hosts) == 1:
        try:
            return ShmBackend.connect(replace(setup, hints=_hints_of(ShmBackend, setup)))
        except (UnsupportedError, BackendError) as error:  # the same error on all ranks
            if setup.size == 1:
                raise
            _warn(setup, error.message)
            layout = Layout.by(range(setup.size), setup.rank)
    elif layout.largest > 1:
        near, alone = _share_memory(setup, layout)
        if alone:
            layout = Layout.by([r if r in alone else w for r, w in enumerate(where)], setup.rank)
    address = ""
    if not (setup.hints["hostname"] or setup.hints["interface"]):
        cure = "choose an interface by the hint 'interface'"
        address = addresses.choose_for(setup, places, cure)
    parts: list[Backend] = [] if near is None else [near]
    try:
        far = _connect_far(setup, address, by_ucx)
        if layout.largest == 1:
            return far
        parts.append(far)
        if near is None:
            near = _alone(setup)
            parts.append(near)
        leaders = None
        if layout.is_leader and isinstance(far, GlooBackend):
            part = _Part("leaders", layout.leaders, layout.host)
            hints = _far_hints(GlooBackend, setup, address) | {"check_mismatch": True}
            leaders = part.connect(GlooBackend, setup, hints)
            parts.append(leaders)
        crowded = b"crowded" if len(layout.members) > _core.usable_cores() else b""
        # No rank goes on before all are connected.
        told = setup.rendezvous.exchange("hosts connected", crowded)
    except BaseException:
        for one in parts:
            one.close()
        raise
    assert setup.store is not None
    assert isinstance(near, ShmBackend)
    assert leaders is None or isinstance(leaders, GlooBackend)
    try:
        first_cause = FirstCause(setup.store, setup.rendezvous.uid, setup.name, setup.rank, setup.size)
        return over(far)(layout, near, far, leaders, first_cause, any(told))
    except BaseException:  # such as MemoryError; the others are connected, and have to hear of it
        for one in parts:
            one.abort()
            one.close()
        raise


def _connect_far(setup: Setup, address: str, by_ucx: bool) -> Far:
    """Collective: returns what carries messages between hosts, which connects all ranks."""
    wanted = setup.hints[_BETWEEN.name]
    if wanted == "ucx" or (by_ucx and not wanted):
        far = _connect_ucx(setup, address, bool(wanted))
        if far is not None:
            return far
    if not (wanted or by_ucx) and setup.rank == 0:
        text = "communicator '%s': tcp, as not every rank has an RDMA port, or a hint or variable for ucx"
        _log.info(text, setup.name)
    backend = GlooBackend if wanted == "gloo" else TcpBackend
    return backend.connect(replace(setup, hints=_far_hints(backend, setup, address)))


def _connect_ucx(setup: Setup, address: str, needed: bool) -> UcxBackend | None:
    """Collective: returns UCX's communicator; None, on all ranks, without one that is not `needed`."""
    if lacking := _lack_of_ucx(setup):
        text = f"no ucx between hosts, {lacking}"
        if needed:
            cure = "pip install 'unicomm[ucx]', or the hint between=tcp"
            raise UnsupportedError(text, comm=setup.name, hint=cure)
        _log.info("communicator '%s': tcp, as there is %s", setup.name, text)
        return None
    try:
        return UcxBackend.connect(replace(setup, hints=_far_hints(UcxBackend, setup, address)))
    except BackendError as error:  # the same error on all ranks
        if needed:
            raise
        text = "communicator '%s': tcp between hosts, because of this: %s"
        _log.warning(text, setup.name, error.message)
        return None


def _lack_of_ucx(setup: Setup) -> str:
    """Collective: returns why not all ranks can use UCX, "" if they can.

    Nothing promises that UCX's versions understand each other.
    """
    path, labels = setup.hints["library"], setup.rendezvous.labels
    lacks = why_not(path)
    mine = json.dumps([lacks, "" if lacks else version_text(open_library(path))])
    told = [json.loads(blob) for blob in setup.rendezvous.exchange("ucx", mine.encode())]
    if without := [r for r, (reason, _) in enumerate(told) if reason]:
        return f"{rank_list([labels[r] for r in without])}: {told[without[0]][0]}"
    versions = [version for _, version in told]
    if len(set(versions)) == 1:
        return ""
    other = next(r for r, version in enumerate(versions) if version != versions[0])
    return f"rank {labels[0]} has UCX {versions[0]}, rank {labels[other]} {versions[other]}"


def _far_hints(backend: type[Backend], setup: Setup, address: str) -> dict[str, Any]:
    hints = _hints_of(backend, setup)
    if address:
        hints["hostname"] = address
    if backend is UcxBackend:
        if not hints["tls"] and "UCX_TLS" not in os.environ:
            hints["tls"] = _NETWORKS
        if not hints["devices"] and "UCX_NET_DEVICES" not in os.environ:
            interface = hints["interface"] or addresses.interface_of(hints["hostname"])
            hints["devices"] = devices_beside(interface)
    return hints


def _share_memory(setup: Setup, layout: Layout) -> tuple[Backend | None, set[int]]:
    """Returns this host's shared memory, and the ranks of all hosts that cannot share memory."""
    near: Backend | None = None
    trouble = ""
    if len(layout.members) > 1:
        part = _Part(f"host {layout.members[0]}", layout.members, layout.local)
        try:
            near = part.connect(ShmBackend, setup, _hints_of(ShmBackend, setup))
        except (UnsupportedError, BackendError) as error:
            trouble = error.message
    troubles = setup.rendezvous.exchange("memory shared", trouble.encode())
    alone = {r for r, text in enumerate(troubles) if text}
    if near is not None and setup.rank in alone:  # another rank of this host could not share memory
        near.close()
        near = None
    if alone and setup.rank == min(alone):
        _warn(setup, troubles[setup.rank].decode())
    return near, alone


def _warn(setup: Setup, reason: str) -> None:
    _log.warning("communicator '%s': no shared memory within a host, because of this: %s", setup.name, reason)


def _alone(setup: Setup) -> Backend:
    """Returns shared memory for this rank alone."""
    part = _Part("alone", (setup.rank,), 0)
    return part.connect(ShmBackend, setup, _hints_of(ShmBackend, setup))


@dataclass(frozen=True)
class _Part:
    """Some ranks of the communicator, in order, that connect a backend of their own."""

    name: str
    ranks: tuple[int, ...]
    rank: int

    def connect(self, backend: type[Backend], setup: Setup, hints: Mapping[str, Any]) -> Backend:
        """Connects the part's ranks. Its errors number the ranks as the errors of the whole creation do."""
        rendezvous, size = setup.rendezvous, len(self.ranks)
        # Less than the others wait for these ranks: those that know who is missing then tell them.
        left = max(0.1, patience(rendezvous))
        store = None
        if size > 1:
            assert setup.store is not None
            store = PrefixStore(f"unicomm-part/{rendezvous.uid}", setup.store)
        labels = [setup.labels[r] for r in self.ranks]
        # Those that errors of this creation name: in `reconfigure` these are places in its list.
        named = [rendezvous.labels[r] for r in self.ranks]
        with meet(
            store,
            self.name,
            self.rank,
            size,
            timeout=left,
            hello={},
            labels=named if size > 1 else None,
            check_peers=rendezvous.check,
        ) as own:
            return backend.connect(
                replace(
                    setup, rendezvous=own, store=store, rank=self.rank, size=size, labels=labels, hints=hints
                )
            )


def _hints_of(backend: type[Backend], setup: Setup) -> dict[str, Any]:
    """Returns the values of the hints that `backend` knows."""
    known = {hint.name for hint in backend.capabilities.hints}
    hints = read_hints(None, backend.capabilities.hints, backend.name)
    hints.update({k: v for k, v in setup.hints.items() if k in known})
    return hints
