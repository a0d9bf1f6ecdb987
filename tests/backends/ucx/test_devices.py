"""Which devices UCX is to use beside `auto`: the interface between the hosts, and RDMA ports that are up."""

import socket

import pytest

import unicomm
from unicomm.backends.bootstrap import addresses
from unicomm.backends.ucx.devices import devices_beside


@pytest.fixture
def ports(tmp_path):
    """Two ports of RDMA devices that are up and one that is down, as the kernel shows them."""
    for device, port, state in (
        ("mlx5_0", 1, "4: ACTIVE"),
        ("mlx5_1", 1, "1: DOWN"),
        ("rxe0", 2, "4: ACTIVE"),
    ):
        folder = tmp_path / device / "ports" / str(port)
        folder.mkdir(parents=True)
        (folder / "state").write_text(f"{state}\n")
    return tmp_path


def test_the_interface_and_active_ports(ports, tmp_path):
    assert devices_beside("eth0", ports) == "mlx5_0:1,rxe0:2,eth0"
    assert devices_beside("eth0", tmp_path / "none") == "eth0"
    assert devices_beside("", ports) == ""


def test_the_interface_of_an_address():
    assert addresses.interface_of("127.0.0.1") == "lo"
    assert addresses.interface_of("192.0.2.7") == ""
    assert addresses.interface_of("") == ""
    for _, name in socket.if_nameindex():
        try:
            address = addresses.of_interface(name)
        except unicomm.InvalidArgumentError:
            continue
        assert addresses.of_interface(addresses.interface_of(address)) == address
