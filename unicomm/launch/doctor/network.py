"""`unicomm doctor --network`: the way to other hosts, or, within a job, the network between all of its hosts.

Within a job one rank of each host measures, over one TCP connection for each pair of hosts, as Gloo uses one.
In each round every host talks to one other host.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import statistics
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from unicomm.backends.bootstrap import addresses
from unicomm.backends.bootstrap.same_host import host_identity
from unicomm.backends.out_of_band import receive_exactly
from unicomm.c10d.compat import Store
from unicomm.comms.errors import CommError, InvalidArgumentError
from unicomm.comms.failures.store_client import StoreClient
from unicomm.comms.membership.environment import Environment
from unicomm.comms.membership.handles import listen
from unicomm.comms.membership.job_store import open_store
from unicomm.comms.membership.rendezvous import meet
from unicomm.comms.membership.tcp_store import UnresolvedError, resolve

PINGS = 200
SECONDS = 1.0  # of sending, each way
MOST_ROUNDS = 16  # of a large job: each host then measures the way to so many others
PORT = 29500  # where launchers have their store by default
_PATIENCE = 10.0  # seconds for one answer
_KEY = 16  # bytes of the secret
_LEFT = "doctor network left"  # how many ranks need the store no more
_WORD = struct.Struct("<Q")
_CHUNK = bytes(1 << 20)


@dataclass(frozen=True)
class Place:
    """A host as it sees itself. `own_name`: the address that its own name has there. `gigabits`: of the
    interface, None if it does not say. `interface` and `mtu` are those of `address`. `congestion`: TCP's
    congestion control that connections begin with, "" if the system does not say.
    """

    hostname: str
    own_name: str
    address: str
    interface: str
    mtu: int
    gigabits: float | None
    congestion: str = ""


@dataclass(frozen=True)
class Pair:
    """The network between two hosts, numbered as they are listed. `trouble`: why it could not be measured.

    `round_trip`: the median of small messages there and back in seconds, `slowest` the highest of 99 %.
    `there`, `back`: bits a second from `one` to `other`, and the other way. `path_mtu`: bytes. `resent`:
    packets that TCP sent again, of all.
    """

    one: int
    other: int
    trouble: str = ""
    round_trip: float = 0.0
    slowest: float = 0.0
    there: float = 0.0
    back: float = 0.0
    path_mtu: int = 0
    resent: float = 0.0


@dataclass(frozen=True)
class Way:
    """The way from this host to another one. `error`: why there is none. `answer`: how the port answered."""

    host: str
    error: str = ""
    address: str = ""
    source: str = ""
    interface: str = ""
    mtu: int = 0
    answer: str = ""
    round_trip: float | None = None


# --- within a job -----------------------------------------------------------------------------------------


def measure(env: Environment, timeout: float = 60.0) -> tuple[list[Place], list[Pair]] | None:
    """Collective among all ranks of the job: returns what rank 0 shows, None on the other ranks.

    Raises `CommTimeoutError` naming the ranks that do not come within `timeout` seconds, `PeerLostError` when
    one ends, and `InvalidArgumentError` if there is one host only.
    """
    store = open_store(env, timeout)
    if store is None:
        raise InvalidArgumentError(
            "the job has one process", hint="start one process on each host, or name hosts: --network HOST"
        )
    limit = timeout + MOST_ROUNDS * (2 * SECONDS + _PATIENCE)
    with meet(store, "doctor network", env.rank, env.size, timeout=limit, hello={}) as rendezvous:

        def exchange(tag: str, value: Any) -> list[Any]:
            return [json.loads(post) for post in rendezvous.exchange(tag, json.dumps(value).encode())]

        first: dict[str, int] = {}
        for rank, host in enumerate(exchange("hosts", host_identity())):
            first.setdefault(host, rank)
        leaders = list(first.values())
        if len(leaders) == 1:
            raise InvalidArgumentError(
                "all ranks of the job are on one host", hint="start the job on several, one rank on each"
            )
        place = here(addresses.here(store).address)
        key = secrets.token_bytes(_KEY)
        me = leaders.index(env.rank) if env.rank in leaders else None
        listener = listen(place.address or "127.0.0.1") if me is not None else None
        try:
            port = listener.getsockname()[1] if listener else 0
            posts = exchange("places", {"place": asdict(place), "port": port, "key": key.hex()})
            there = [posts[rank] for rank in leaders]
            pairs: list[Pair] = []
            for number, pairing in enumerate(rounds(len(leaders))):
                found = None
                for one, other in pairing:
                    if me == one:
                        at = there[other]
                        target = at["place"]["address"], at["port"]
                        found = asdict(call(one, other, target, bytes.fromhex(at["key"])))
                    elif me == other and listener is not None:
                        answer(listener, key)
                pairs += [Pair(**said) for said in exchange(f"round {number}", found) if said]
        finally:
            if listener is not None:
                listener.close()
    _leave(store, env)
    return ([Place(**post["place"]) for post in there], pairs) if env.rank == 0 else None


def _leave(store: Store, env: Environment) -> None:
    """Rank 0, whose process may hold the store, ends last. A store that fails or is silent keeps nobody."""
    client = StoreClient(store, "doctor network", env.size, _PATIENCE)
    with contextlib.suppress(CommError):
        if env.rank:
            client.add(_LEFT)
            return
        end = time.monotonic() + _PATIENCE
        while client.add(_LEFT, 0) < env.size - 1 and time.monotonic() < end:
            time.sleep(0.01)


def rounds(hosts: int) -> Iterator[list[tuple[int, int]]]:
    """Yields pairs of hosts such that in a round each host is in at most one, and in the end all have met.

    It is the circle method of round-robin tournaments. Of a large job only the first rounds are held.
    """
    seats: list[int | None] = [*range(hosts), *([None] if hosts % 2 else [])]
    for _ in range(min(len(seats) - 1, MOST_ROUNDS)):
        half = len(seats) // 2
        met = zip(seats[:half], reversed(seats[half:]), strict=True)
        yield sorted((min(a, b), max(a, b)) for a, b in met if a is not None and b is not None)
        seats.insert(1, seats.pop())


def call(one: int, other: int, target: tuple[str, int], key: bytes) -> Pair:
    """Measures the way to a host that answers at `target`; what goes wrong is the pair's trouble."""
    try:
        with socket.create_connection(target, _PATIENCE) as s:
            s.settimeout(_PATIENCE)
            s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            s.sendall(key)
            times = []
            for _ in range(PINGS):
                began = time.perf_counter()
                s.sendall(_WORD.pack(0))
                receive_exactly(s, _WORD.size)
                times.append(time.perf_counter() - began)
            there = _send(s)
            back = _take(s)
            sent, resent, mtu = _said_by_tcp(s)
            times.sort()
            return Pair(
                one,
                other,
                round_trip=statistics.median(times),
                slowest=times[int(0.99 * len(times))],
                there=there,
                back=back,
                path_mtu=mtu,
                resent=resent / max(1, sent),
            )
    except OSError as error:
        said = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        return Pair(one, other, trouble=f"{target[0]} port {target[1]}: {said}")


def answer(listener: socket.socket, key: bytes) -> None:
    """Answers one caller that knows the key. Returns when it has ended, or has not come in time."""
    end = time.monotonic() + _PATIENCE
    while (left := end - time.monotonic()) > 0:
        try:
            listener.settimeout(left)
            s, _ = listener.accept()
            with s:
                s.settimeout(_PATIENCE)
                s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if not hmac.compare_digest(receive_exactly(s, _KEY), key):
                    continue
                for _ in range(PINGS):
                    s.sendall(receive_exactly(s, _WORD.size))
                _take(s)
                _send(s)
                return
        except OSError:
            continue


def _send(s: socket.socket) -> float:
    """Sends for some time; returns the bits a second that arrived."""
    began, sent = time.perf_counter(), 0
    while time.perf_counter() - began < SECONDS:
        s.sendall(_WORD.pack(len(_CHUNK)))
        s.sendall(_CHUNK)
        sent += len(_CHUNK)
    s.sendall(_WORD.pack(0))
    receive_exactly(s, _WORD.size)  # all of it has arrived
    return 8 * sent / (time.perf_counter() - began)


def _take(s: socket.socket) -> float:
    """Receives what `_send` sends, to its end. Returns the rate in bits a second."""
    began, taken = time.perf_counter(), 0
    buffer = bytearray(len(_CHUNK))
    while count := _WORD.unpack(receive_exactly(s, _WORD.size))[0]:
        view = memoryview(buffer)[: min(count, len(buffer))]
        while view:
            got = s.recv_into(view)
            if not got:
                raise ConnectionError("the connection ended")
            view = view[got:]
        taken += count
    s.sendall(_WORD.pack(0))
    return 8 * taken / (time.perf_counter() - began)


def _said_by_tcp(s: socket.socket) -> tuple[int, int, int]:
    """Returns packets sent, packets sent again, and the path's MTU: struct tcp_info of linux/tcp.h."""
    info = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    mtu, resent = (struct.unpack_from("=I", info, at)[0] for at in (60, 100))
    sent = struct.unpack_from("=I", info, 136)[0] if len(info) >= 140 else 0  # tcpi_segs_out
    return sent, resent, mtu


# --- this host --------------------------------------------------------------------------------------------


def here(address: str) -> Place:
    """Returns this host's place, of which `address` is the one that others reach."""
    name = socket.gethostname()
    try:
        own_name = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        own_name = ""
    interface = interface_of(address)
    return Place(name, own_name, address, interface, *_of_device(interface), _congestion())


def interface_of(address: str) -> str:
    """Returns the interface that has this address, "" if none has."""
    for _, name in socket.if_nameindex():
        try:
            if addresses.of_interface(name) == address:
                return name
        except InvalidArgumentError:  # it has no address
            continue
    return ""


def _congestion() -> str:
    with socket.socket() as s:
        try:
            name = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        except OSError:
            return ""
    return name.split(b"\0")[0].decode(errors="replace")


def _of_device(interface: str) -> tuple[int, float | None]:
    """Returns an interface's MTU in bytes and its speed in Gbit/s, None if the device does not say."""
    folder = Path("/sys/class/net", interface or "-")
    try:
        mtu = int((folder / "mtu").read_text())
    except (OSError, ValueError):
        mtu = 0
    try:
        speed = int((folder / "speed").read_text())
    except (OSError, ValueError):
        speed = -1
    return mtu, speed / 1000 if speed > 0 else None


# --- the way to hosts that run nothing of ours ------------------------------------------------------------


def look(hosts: Sequence[str]) -> list[Way]:
    """Returns the ways from here to hosts, which are given as `HOST` or `HOST:PORT`. It only connects."""
    return [_way(host) for host in hosts]


def _way(given: str) -> Way:
    host, _, text = given.rpartition(":") if given.count(":") == 1 else (given.strip("[]"), "", "")
    port = int(text) if text.isdecimal() and 0 < int(text) < 65536 else PORT
    try:
        resolve(host, port, _PATIENCE / 2)
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (UnresolvedError, OSError) as error:
        return Way(given, str(error))
    family, kind, protocol, _, target = found[0]
    address, source = str(target[0]), addresses.route_to(host)
    if not source:
        why = (
            "its name means this host's loopback"
            if addresses.is_loopback(address)
            else "no route leads there"
        )
        return Way(given, f"{address}: {why}", address)
    interface = interface_of(source)
    times, said = [], ""
    for _ in range(5):
        with socket.socket(family, kind, protocol) as s:
            s.settimeout(_PATIENCE / 4)
            began = time.perf_counter()
            try:
                s.connect(target)
                said = f"port {port} is open"
            except ConnectionRefusedError:  # an answer as well
                said = f"nothing listens at port {port}"
            except OSError as error:
                why = "no answer" if isinstance(error, TimeoutError) else os.strerror(error.errno or 0)
                return Way(given, "", address, source, interface, _of_device(interface)[0], why)
            times.append(time.perf_counter() - began)
    mtu = _of_device(interface)[0]
    return Way(given, "", address, source, interface, mtu, said, statistics.median(times))
