"""torch's rendezvous handlers with stores of ours: what a launcher listens at, and who may talk to it there.

| hosts | rendezvous | launchers' store | ranks' store |
|---|---|---|---|
| one | c10d | in the launcher's memory: no socket | TCPStore at loopback |
| one | static | the ranks' | TCPStore at loopback |
| several | c10d | a server of ours at the endpoint's address: token | TCPStore at one host's address |
| several | static | the ranks' | TCPStore at the master's address |

With c10d only the job's hosts reach the ranks' store (source_filter.py). Rendezvous of other kinds (etcd) are
torch's; that of etcd-v2 holds JSON, too.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed.elastic.rendezvous import registry
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import (
    DEFAULT_PORT,
    C10dRendezvousBackend,
    create_backend,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
    create_handler,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import (
    StaticTCPRendezvous,
    create_rdzv_handler,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher import api as launcher

from unicomm.c10d import compat
from unicomm.c10d.compat import HashStore, Store, TCPStore
from unicomm.comms.membership.job_store import store_listener

from .client import LaunchersStore
from .server import StoreServer
from .source_filter import allow_only, own_addresses
from .state import JsonState

LOOPBACK = "127.0.0.1"
_BACKLOG = 2048  # as torch's
_READING = 60  # seconds, torch's default for the setting read_timeout
_HEARTBEATS = (5, 3)  # torch's defaults: seconds between two, and how many may be missing
_LEAVING = 2.0  # seconds for other launchers to leave the store
_ADDRESSES = "unicomm/addresses/"
_Number = ipaddress.IPv4Address | ipaddress.IPv6Address


@contextlib.contextmanager
def our_rendezvous(token: str) -> Iterator[None]:
    """Makes torchrun's launcher use these handlers. `token`: the job's, "" if it has none.

    torchrun shuts its handler down when ranks have failed. What the launchers' store serves then, how hubs
    find each other, is needed for the verdict: it is closed here, at the end.
    """
    at_end = contextlib.ExitStack()

    class Registry:
        @staticmethod
        def get_rendezvous_handler(params: RendezvousParameters) -> RendezvousHandler:
            made = handler(params, token)
            if isinstance(made, DynamicHandler):
                at_end.callback(made.give_closing())
            return made

    names = vars(launcher)
    before = names["rdzv_registry"]
    names["rdzv_registry"] = Registry
    try:
        with at_end:
            yield
    finally:
        names["rdzv_registry"] = before


def handler(params: RendezvousParameters, token: str) -> RendezvousHandler:
    """Returns the handler for these parameters. Raises what torch's handlers do."""
    if params.backend == "static":
        made = create_rdzv_handler(params)
        assert isinstance(made, StaticTCPRendezvous)
        return StaticHandler(made, one_host=params.max_nodes == 1)
    if params.backend == "c10d" and params.max_nodes == 1:
        return _dynamic(HashStore(), params, None)
    if params.backend == "c10d" and params.get("store_type", "tcp").strip().lower() == "tcp":
        server, store = _launchers_store(params, token)
        return _dynamic(store, params, server)
    if params.backend == "c10d":
        backend, files = create_backend(params)
        return create_handler(files, JsonState(backend), params)
    if params.backend == "etcd-v2":
        from torch.distributed.elastic.rendezvous import etcd_rendezvous_backend as etcd

        found, etcd_store = etcd.create_backend(params)
        return create_handler(etcd_store, JsonState(found), params)
    return registry.get_rendezvous_handler(params)


# --- the store of the launchers -----------------------------------------------------------------------


def _launchers_store(params: RendezvousParameters, token: str) -> tuple[StoreServer | None, LaunchersStore]:
    """Hosts the store if the endpoint is of this host, and connects to it."""
    host, port = parse_rendezvous_endpoint(params.endpoint, default_port=DEFAULT_PORT)
    told = params.get_as_bool("is_host")
    timeout = params.get_as_int("read_timeout", _READING)
    if timeout is None or timeout <= 0:
        raise ValueError("The read timeout must be a positive integer.")
    server = None
    if told or (told is None and compat.is_this_host(host)):
        try:
            listeners = _listeners(host, port, params.local_addr)
        except OSError as error:
            # Several launchers of one job may run on this host: another one hosts the store then.
            if told:
                raise RendezvousConnectionError(
                    f"cannot listen at {host}, port {port}, for the rendezvous: {error.strerror or error};"
                    " give all hosts another port in --rdzv-endpoint"
                ) from error
        else:
            server = StoreServer(listeners, token)
            port = int(listeners[0].getsockname()[1])
            host = _own(listeners[0])
            if not token:
                _warn(port)
    return server, LaunchersStore(host, port, token, timeout)


def _warn(port: int) -> None:
    print(
        f"unicomm run: this job has no token: whoever reaches port {port} of this host can join or"
        " disturb it. Set UNICOMM_JOB_TOKEN (`openssl rand -hex 16`) to one value for the launchers of all"
        " hosts, or use --token-file",
        file=sys.stderr,
        flush=True,
    )


def _listeners(host: str, port: int, own: str | None) -> list[socket.socket]:
    """Returns sockets at the endpoint's address, and at this host's for others where that is another one.

    Raises `OSError` if a port is taken.
    """
    own_numbers = {_number(address) for address in own_addresses()}
    wanted = _numbers(host, port)[:1]
    if wanted and wanted[0].is_loopback and not _says_loopback(host) and own:
        wanted += _numbers(own, port)[:1]  # on Debian the host's own name is loopback
    wanted = [number for number in wanted if number in own_numbers or number.is_loopback]
    if not wanted and own:  # the endpoint is another machine's, which passes connections on
        wanted = [number for number in _numbers(own, port)[:1] if number in own_numbers]
    made: list[socket.socket] = []
    try:
        for number in wanted:
            family = socket.AF_INET6 if number.version == 6 else socket.AF_INET
            made.append(socket.create_server((str(number), port), family=family, backlog=_BACKLOG))
        if not made:
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            made.append(
                socket.create_server(("", port), family=family, backlog=_BACKLOG, dualstack_ipv6=both)
            )
    except OSError:
        for s in made:
            s.close()
        raise
    return made


def _own(listener: socket.socket) -> str:
    """Returns the address by which this host itself reaches its listener."""
    number = _number(listener.getsockname()[0])
    if number.is_unspecified:
        return "::1" if number.version == 6 else LOOPBACK
    return str(number)


def _number(address: str) -> _Number:
    return ipaddress.ip_address(address.partition("%")[0])


def _numbers(host: str, port: int) -> list[_Number]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [_number(str(each[4][0])) for each in found]


def _says_loopback(host: str) -> bool:
    try:
        return _number(host).is_loopback
    except ValueError:
        return host == "localhost"


# --- the ranks' store -----------------------------------------------------------------------------------


def _ranks_store(
    host: str, port: int, listener: socket.socket | None, timeout: timedelta, world_size: int | None = None
) -> TCPStore:
    """Hosts the store at which ranks meet; torch opens the socket if there is none."""
    if listener is not None:
        port = int(listener.getsockname()[1])
    return TCPStore(
        host,
        port,
        world_size,
        True,
        timeout,
        multi_tenant=True,
        master_listen_fd=None if listener is None else listener.detach(),
    )


class StaticHandler(StaticTCPRendezvous):
    """torch's static rendezvous, whose store listens at the master's address only."""

    def __init__(self, like: StaticTCPRendezvous, one_host: bool) -> None:
        super().__init__(like.master_addr, like.master_port, like.rank, like.world_size, like.run_id, 0)
        self.timeout, self._one_host = like.timeout, one_host

    def next_rendezvous(self) -> RendezvousInfo:
        if not self._store and self.rank == 0:
            listener = store_listener(
                self.master_addr, self.master_port, one_host=self._one_host, backlog=_BACKLOG
            )
            if listener is not None:
                self._store = _ranks_store(
                    self.master_addr, self.master_port, listener, self.timeout, self.world_size
                )
        return super().next_rendezvous()


class DynamicHandler(DynamicRendezvousHandler):
    """torch's rendezvous whose hosts may come and go. Its ranks' store listens at one address.

    Of several hosts only those that take part in the rendezvous reach the ranks' store.
    """

    _server: StoreServer | None = None
    _one_host = True
    _guarded: socket.socket | None = None  # the listener of the ranks' store, if its callers are filtered

    def next_rendezvous(self) -> RendezvousInfo:
        if not self._one_host:
            # Before this host takes part: whoever hosts the ranks' store then knows the addresses of all.
            addresses = {*filter(_reaches_others, own_addresses()), getattr(self._store, "seen_as", LOOPBACK)}
            self._store.set(f"{_ADDRESSES}{self._this_node}", json.dumps(sorted(addresses)))
        info = super().next_rendezvous()
        self._guard()  # again, as hosts may have joined since the store was opened
        return info

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> TCPStore:
        host = master_addr
        listener = store_listener(host, master_port, one_host=self._one_host, backlog=_BACKLOG)
        if listener is not None and not self._one_host:
            self._guarded = listener.dup()
            self._guard()
        return _ranks_store(host, master_port, listener, timedelta(seconds=300))

    def _guard(self) -> None:
        if self._guarded is None:
            return
        nodes = self._state_holder.state.participants
        hosts = set(own_addresses())
        for said in self._store.multi_get([f"{_ADDRESSES}{node}" for node in nodes]):
            hosts |= _addresses(said)
        if not allow_only(self._guarded, hosts):
            port = self._guarded.getsockname()[1]
            print(
                f"unicomm run: port {port} of this host, where the ranks meet, is open to all who reach it:"
                f" the kernel takes no filter for {len(hosts)} addresses; SECURITY.md has a firewall's rules",
                file=sys.stderr,
                flush=True,
            )
            self._guarded.close()
            self._guarded = None

    def give_closing(self) -> Callable[[], None]:
        """Returns what closes the launchers' store, which `shutdown` leaves open then.

        Other launchers may still read there that all are done.
        """
        server, self._server = self._server, None

        def close() -> None:
            if isinstance(self._store, LaunchersStore):
                self._store.close()
            if server is not None:
                server.close(_LEAVING)

        return close

    def shutdown(self) -> bool:
        try:
            return super().shutdown()
        finally:
            if self._server is not None:
                self._server.close()


def _reaches_others(address: str) -> bool:
    number = _number(address)
    return not (number.is_loopback or number.is_link_local)


def _addresses(said: bytes) -> set[str]:
    """Reads what a host has said of its addresses; what is none is left out."""
    found = set()
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        for address in json.loads(said):
            with contextlib.suppress(ValueError, TypeError, AttributeError):
                found.add(str(_number(address)))
    return found


def _dynamic(store: Store, params: RendezvousParameters, server: StoreServer | None) -> DynamicHandler:
    seconds: Sequence[int | None] = [
        params.get_as_int(f"{name}_timeout") for name in ("join", "last_call", "close", "heartbeat")
    ]
    limits: list[Any] = [None if each is None else timedelta(seconds=each) for each in seconds]
    interval, missing = (
        params.get_as_int(name, default) or default
        for name, default in zip(("keep_alive_interval", "keep_alive_max_attempt"), _HEARTBEATS, strict=True)
    )
    made = DynamicHandler.from_backend(
        params.run_id,
        store,
        JsonState(C10dRendezvousBackend(store, params.run_id)),
        params.min_nodes,
        params.max_nodes,
        params.local_addr,
        RendezvousTimeout(*limits),
        keep_alive_interval=interval,
        keep_alive_max_attempt=missing,
    )
    assert isinstance(made, DynamicHandler)
    made._server, made._one_host = server, params.max_nodes == 1
    return made
