"""The devices that UCX is to use: by default it takes all, also those that only this host can reach."""

from __future__ import annotations

from pathlib import Path

_RDMA = Path("/sys/class/infiniband")
_ACTIVE = "4:"  # how the state of a port begins that can send


def devices_beside(interface: str, rdma: Path = _RDMA) -> str:
    """Returns UCX_NET_DEVICES: the interface, and all active ports of RDMA devices; "" for no interface."""
    if not interface:
        return ""
    ports = [
        f"{port.parent.parent.name}:{port.name}"
        for port in sorted(rdma.glob("*/ports/*"))
        if (port / "state").read_text().startswith(_ACTIVE)
    ]
    return ",".join([*ports, interface])
