"""A network between hosts on one machine that loses, delays, reorders and limits packets when told to.

    with Namespaces(2) as hosts, Relay(hosts) as network:
        network.set(0, 1, loss=0.1)          # one packet of ten from host 0 to host 1 is lost
        network.set_all(delay=0.05)          # 50 ms more each way

The hosts' links are replaced by TUN devices of the same name and address, whose packets a thread of this
process passes on. It needs nothing of the kernel but TUN, and serves some ten thousand packets a second.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import threading
import time
from dataclasses import dataclass, replace

from tools.namespaces import Namespaces, command

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI, _CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000
_LARGEST = 1 << 16  # bytes of a packet
_BACKLOG = 0.5  # seconds of packets that wait for a limited link; more are lost, as in a router


@dataclass(frozen=True)
class Path:
    """What happens to packets from one host to another.

    `loss`: the part of the packets that is lost, 0 to 1. `delay`: seconds. `jitter`: up to so many seconds
    more, chosen for each packet, so that packets overtake each other. `rate`: bits a second, or None.
    """

    loss: float = 0.0
    delay: float = 0.0
    jitter: float = 0.0
    rate: float | None = None


class Relay:
    """Passes packets between the hosts while its block runs. Any thread may call its methods."""

    def __init__(self, hosts: Namespaces, seed: int = 0) -> None:
        self._hosts = hosts
        n = len(hosts.names)
        self._at = {_bytes_of(hosts.address(i)): i for i in range(n)}
        self._paths = {pair: Path() for pair in itertools.permutations(range(n), 2)}
        self._free = dict.fromkeys(self._paths, 0.0)  # when the link has sent all that it was given
        self._chance = random.Random(seed)
        self._files: list[int] = []
        self._waiting: list[tuple[float, int, int, bytes]] = []  # due, order, host, packet
        self._order = itertools.count()
        self._stop, self._stopped = os.pipe()
        self._thread = threading.Thread(target=self._serve, name="relay", daemon=True)
        #: Packets that were passed on, and that were lost.
        self.passed, self.lost = 0, 0

    def set(self, source: int, target: int, **changes: float | None) -> None:
        """Changes the path from one host to another: the fields of `Path`. Not for packets on their way."""
        self._paths[source, target] = replace(self._paths[source, target], **changes)  # type: ignore[arg-type]

    def set_all(self, **changes: float | None) -> None:
        """Changes all paths."""
        for source, target in self._paths:
            self.set(source, target, **changes)

    def __enter__(self) -> Relay:
        for i, name in enumerate(self._hosts.names):
            command("ip", "-n", name, "link", "del", "eth0")
            self._files.append(_tun(name, "eth0"))
            command("ip", "-n", name, "addr", "add", f"{self._hosts.address(i)}/24", "dev", "eth0")
            command("ip", "-n", name, "link", "set", "eth0", "up")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._stopped)
        if self._thread.ident is not None:
            self._thread.join()
        for file in [self._stop, *self._files]:
            os.close(file)

    def _serve(self) -> None:
        poll = select.poll()
        for file in (self._stop, *self._files):
            poll.register(file, select.POLLIN | select.POLLHUP)
        hosts = {file: host for host, file in enumerate(self._files)}
        while True:
            due = self._waiting[0][0] - time.monotonic() if self._waiting else None
            ready = poll.poll(None if due is None else max(0.0, due * 1000))
            for file, _ in ready:
                if file == self._stop:
                    return
                self._take(hosts[file], os.read(file, _LARGEST))
            now = time.monotonic()
            while self._waiting and self._waiting[0][0] <= now:
                _, _, target, packet = heapq.heappop(self._waiting)
                try:
                    os.write(self._files[target], packet)
                    self.passed += 1
                except OSError:  # the host's device is down, or its queue is full
                    self.lost += 1

    def _take(self, source: int, packet: bytes) -> None:
        target = self._at.get(packet[16:20]) if packet[0] >> 4 == 4 else None
        if target is None or target == source:  # IPv6's own messages, or another network
            return
        pair = source, target
        path, now = self._paths[pair], time.monotonic()
        leaves = now
        if path.rate is not None:
            leaves = max(now, self._free[pair]) + 8 * len(packet) / path.rate
        if self._chance.random() < path.loss or leaves - now > _BACKLOG:
            self.lost += 1
            return
        self._free[pair] = leaves
        due = leaves + path.delay + self._chance.random() * path.jitter
        heapq.heappush(self._waiting, (due, next(self._order), target, packet))


def _bytes_of(address: str) -> bytes:
    return bytes(map(int, address.split(".")))


def _tun(namespace: str, device: str) -> int:
    """Returns the file of a new TUN device in a network namespace."""
    found: list[int | OSError] = []

    def make() -> None:  # in a thread of its own, which alone enters the namespace
        try:
            with open(f"/var/run/netns/{namespace}") as file:
                libc = ctypes.CDLL(None, use_errno=True)
                if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")
            tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            request = struct.pack("16sH22x", device.encode(), _IFF_TUN | _IFF_NO_PI)
            fcntl.ioctl(tun, _TUNSETIFF, request)
            found.append(tun)
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    (result,) = found
    if isinstance(result, OSError):
        raise result
    return result
