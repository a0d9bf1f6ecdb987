"""A filter in the kernel that lets only some hosts reach a listening socket.

torch's TCPStore answers everybody who reaches its port. The kernel can drop what comes from other addresses
before: any process may give its own sockets a packet filter (SO_ATTACH_FILTER, classic BPF). A connection
needs answers, so that its source cannot be forged by hosts that are not on the way.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterable

_ATTACH, _DETACH = 26, 27  # SO_ATTACH_FILTER, SO_DETACH_FILTER
_LOAD, _IF_EQUAL, _JUMP, _RETURN = 0x20, 0x15, 0x05, 0x06
_NETWORK = 0xFFF00000  # SKF_NET_OFF: an offset from here is one in the IP header
_PROTOCOL = 0xFFFFF000  # SKF_AD_OFF + SKF_AD_PROTOCOL
_IPV4 = 0x0800
_SOURCE_4, _SOURCE_6 = 12, 8  # offsets of the source address in the IP header
_ALL, _NOTHING = 0xFFFFFFFF, 0
_SIOCGIFCONF = 0x8912
_INTERFACE = 40  # bytes of a struct ifreq on 64-bit machines
_LONGEST = 4096  # BPF_MAXINSNS
_MOST_OWN = 256  # addresses of this host

_Code = list[tuple[int, int, int, int]]


def allow_only(s: socket.socket, hosts: Iterable[str]) -> bool:
    """Lets only packets of these addresses reach the socket and the connections that it accepts from now on.

    Replaces an earlier filter. Returns False, and leaves the socket open to all, where there are no such
    filters, or if this one is too long for the kernel.
    """
    code = _program({ipaddress.ip_address(host.partition("%")[0]) for host in hosts})
    data = b"".join(struct.pack("HBBI", *each) for each in code)
    kept = ctypes.create_string_buffer(data, len(data))
    try:
        if len(code) > _LONGEST:
            raise OSError("too long")
        s.setsockopt(socket.SOL_SOCKET, _ATTACH, struct.pack("HP", len(code), ctypes.addressof(kept)))
    except OSError:
        with contextlib.suppress(OSError):  # there was none
            s.setsockopt(socket.SOL_SOCKET, _DETACH, 0)
        return False
    return True


def _program(hosts: set[ipaddress.IPv4Address | ipaddress.IPv6Address]) -> _Code:
    fourth: _Code = [(_LOAD, 0, 0, _NETWORK + _SOURCE_4)]
    sixth: _Code = []
    for host in sorted(hosts, key=lambda host: (host.version, int(host))):
        words = struct.unpack(f">{host.max_prefixlen // 32}I", host.packed)
        if len(words) == 1:
            fourth += [(_IF_EQUAL, 0, 1, words[0]), (_RETURN, 0, 0, _ALL)]
        else:
            for i, word in enumerate(words):
                # To the next address, behind the comparisons that are left and the acceptance.
                sixth += [(_LOAD, 0, 0, _NETWORK + _SOURCE_6 + 4 * i), (_IF_EQUAL, 0, 7 - 2 * i, word)]
            sixth += [(_RETURN, 0, 0, _ALL)]
    fourth += [(_RETURN, 0, 0, _NOTHING)]
    sixth += [(_RETURN, 0, 0, _NOTHING)]
    start: _Code = [(_LOAD, 0, 0, _PROTOCOL), (_IF_EQUAL, 1, 0, _IPV4), (_JUMP, 0, 0, len(fourth))]
    return start + fourth + sixth


def own_addresses() -> list[str]:
    """Returns the addresses of all interfaces of this host, loopback included."""
    found = []
    room = bytearray(_MOST_OWN * _INTERFACE)
    kept = (ctypes.c_char * len(room)).from_buffer(room)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            said = fcntl.ioctl(probe, _SIOCGIFCONF, struct.pack("iP", len(room), ctypes.addressof(kept)))
            length = struct.unpack("iP", said)[0]
        except OSError:
            length = 0
    for at in range(0, length, _INTERFACE):
        family = struct.unpack_from("H", room, at + 16)[0]
        if family == socket.AF_INET:
            found.append(socket.inet_ntoa(room[at + 20 : at + 24]))
    try:
        with open("/proc/net/if_inet6") as file:
            found += [socket.inet_ntop(socket.AF_INET6, bytes.fromhex(line.split()[0])) for line in file]
    except OSError:
        pass  # no IPv6
    return found
