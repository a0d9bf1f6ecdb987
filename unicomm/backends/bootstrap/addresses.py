"""The address of this host that the other ranks reach, found by routing, so that it is never loopback by
accident.

A host's own name often means 127.0.0.1 in its /etc/hosts; a rank that listens there waits for hosts that
cannot come. So the kernel is asked which address it would send from. Nothing is sent for that.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import struct
from collections.abc import Sequence
from typing import NamedTuple

from unicomm.c10d.compat import Store, base_store
from unicomm.comms.backend import Setup, SetupRendezvous
from unicomm.comms.errors import BackendError, InvalidArgumentError
from unicomm.comms.failures.process_sockets import plain_address
from unicomm.comms.failures.store_requests import connections
from unicomm.comms.membership.handles import network, notice_silence

INTERFACE = "UNICOMM_INTERFACE"  # names the interface to use, instead of routing
_SIOCGIFADDR = 0x8915
# Addresses of no network (RFC 5737, RFC 3849): the way to them is the default route.
_ANYWHERE = ("192.0.2.1", "2001:db8::1")
_PORT = 9  # connecting a datagram socket sends nothing; any port but 0 will do


class Place(NamedTuple):
    """Where a rank is in the network.

    Attributes:
        address: the address at which others reach the rank.
        network: identity of the network namespace; ranks of one share a loopback.
    """

    address: str
    network: str


def here(store: Store | None) -> Place:
    """Returns this rank's place. The address is "" if only loopback leads to the host of the store."""
    target = _host_of(store)
    address = route_to(target) if target else ""
    if not address and not target:
        address = route_anywhere()
    return Place(address, network())


def of_interface(name: str) -> str:
    """Returns an interface's address, IPv4 before IPv6; "" for no name. `InvalidArgumentError` if none."""
    if not name:
        return ""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            request = struct.pack("256s", name.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])
    except OSError as error:
        if address := _ipv6_of(name):
            return address
        raise InvalidArgumentError(
            f"the interface '{name}' has no address: {error}", hint="`ip address` lists those of this host"
        ) from error


def interface_of(address: str) -> str:
    """Returns the interface whose address, as `of_interface` returns it, this is; "" if there is none."""
    if not address:
        return ""
    for _, name in socket.if_nameindex():
        with contextlib.suppress(InvalidArgumentError):
            if address == of_interface(name):
                return name
    return ""


def _ipv6_of(interface: str) -> str:
    """Returns an address that is valid beyond the link, if there is one."""
    found = []
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as file:
        for fields in map(str.split, file):
            if fields[5] == interface:
                address = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(fields[0]))
                found.append(f"{address}%{interface}" if address.startswith("fe80") else address)
    return min(found, key=lambda address: "%" in address, default="")


def chosen_interface() -> str:
    """Returns the interface that this host's environment names, "" for none.

    The interface that leads to the others may differ between hosts. So it is not a hint, which all ranks pass
    alike. GLOO_SOCKET_IFNAME is the variable that programs for torch set.
    """
    named = os.environ.get(INTERFACE) or os.environ.get("GLOO_SOCKET_IFNAME", "")
    return named.partition(",")[0].strip()


def reachable_at(interface: str, hostname: str) -> str:
    """Returns the address that other hosts reach: of these hints if they are not "", else by routing."""
    return of_interface(interface) or hostname or of_interface(chosen_interface()) or here(None).address


def listen_address(rendezvous: SetupRendezvous, store: Store | None) -> str:
    """Collective: returns the address for this rank to listen on, as `choose` does."""
    place = here(store)
    blobs = rendezvous.exchange("addresses", json.dumps(place).encode())
    return choose([Place(*json.loads(blob)) for blob in blobs], rendezvous.rank)


def choose(places: Sequence[Place], rank: int) -> str:
    """Returns the address for this rank to listen on, "" if loopback will do; `OSError` if there is none.

    A rank that sees only loopback, as the store is on its own host, takes the way to the others.
    """
    if address := of_interface(chosen_interface()):
        return address
    if len({place.network for place in places}) == 1:
        return ""
    mine = places[rank]
    if mine.address:
        return mine.address
    for other in places:
        if other.network != mine.network and other.address and (address := route_to(other.address)):
            return address
    if address := route_anywhere():
        return address
    raise OSError("this host has no network address but loopback")


def choose_for(setup: Setup, places: Sequence[Place], cure: str) -> str:
    """Returns what `choose` does; `BackendError` with `cure` as a hint if there is no address."""
    try:
        return choose(places, setup.rank)
    except OSError as error:
        me = setup.rendezvous.labels[setup.rank]
        raise BackendError(
            f"rank {me} cannot be reached from other hosts: {error}",
            comm=setup.name,
            culprits=[me],
            hint=f"connect the host to a network, or {cure}",
        ) from error


def route_anywhere() -> str:
    """Returns the address on the default route, IPv4 before IPv6; "" if there is none."""
    return next(filter(None, map(route_to, _ANYWHERE)), "")


def route_to(host: str) -> str:
    """Returns the address from which this host would send to `host`; "" for loopback or no way."""
    try:
        found = socket.getaddrinfo(host, _PORT, type=socket.SOCK_DGRAM)
    except OSError:
        return ""
    for family, kind, protocol, _, target in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(target)
                address = str(probe.getsockname()[0])
        except OSError:
            continue
        if not is_loopback(address):
            return address
    return ""


def guard_store(store: Store | None) -> None:
    """Makes this process notice within 15 seconds that the host of its TCPStore cannot be reached any more.

    A call that waits for the store then ends with an error; without this it would take many minutes.
    """
    connections(_host_of(store), _port_of(store), notice_silence)


def is_loopback(address: str) -> bool:
    """Whether an address, not a name, is of this host only."""
    ip = plain_address(address)
    return ip.is_loopback or ip.is_unspecified


def _host_of(store: Store | None) -> str:
    return str(getattr(base_store(store), "host", "") or "")


def _port_of(store: Store | None) -> int:
    return int(getattr(base_store(store), "port", 0) or 0)
