"""The devices that UCX is to use: by default it takes all, also those that only this host can reach."""

from __future__ import annotations

import contextlib
from pathlib import Path

_RDMA = Path("/sys/class/infiniband")
_ACTIVE = "4:"  # how the state of a port begins that can send


def rdma_ports(rdma: Path = _RDMA) -> list[str]:
    """Returns the active ports of RDMA devices, such as mlx5_0:1."""
    found = []
    for port in sorted(rdma.glob("*/ports/*")):
        with contextlib.suppress(OSError):  # it has gone, or is not ours to read
            if (port / "state").read_text().startswith(_ACTIVE):
                found.append(f"{port.parent.parent.name}:{port.name}")
    return found


def devices_beside(interface: str, rdma: Path = _RDMA) -> str:
    """Returns UCX_NET_DEVICES: the interface, and all active ports of RDMA devices; "" for no interface."""
    return ",".join([*rdma_ports(rdma), interface]) if interface else ""
