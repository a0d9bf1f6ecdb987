"""The sockets that this process has open."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator


def internet_sockets() -> Iterator[socket.socket]:
    """Yields duplicates of this process's internet sockets; each is closed before the next one."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            s = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # it was closed meanwhile
            continue
        with s:
            if s.family in (socket.AF_INET, socket.AF_INET6) and s.type == socket.SOCK_STREAM:
                yield s


def plain_address(address: object) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Returns the one form of an address that may be written in several ways."""
    ip = ipaddress.ip_address(str(address).partition("%")[0])
    return getattr(ip, "ipv4_mapped", None) or ip
