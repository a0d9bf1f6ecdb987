"""What `auto` makes of where the ranks are, and which address each listens on."""

import logging
import os
import threading

import pytest
import torch

import unicomm
from tests.backends.hosts.between import BETWEEN
from unicomm import _core
from unicomm.backends import auto
from unicomm.backends.bootstrap import addresses
from unicomm.backends.bootstrap.addresses import Place, choose
from unicomm.backends.hosts.layout import Layout
from unicomm.testing import run_ranks


@pytest.mark.parametrize(
    ("layout", "backend"),
    [("a,a,a", "shm"), ("a,b,c", BETWEEN), ("a,b,a", "hosts"), ("a", "shm"), ("a,b", BETWEEN)],
)
def test_backend(layout, backend):
    n = layout.count(",") + 1
    assert run_ranks(lambda c: c.get_backend(), n, backend="auto", hints={"hosts": layout}) == [backend] * n


def test_splits_of_each_kind():
    """The hint names the hosts of all ranks of the job; a split uses its members' part of it."""

    def program(comm):
        kinds = {}
        for ranks in ([0, 2], [1, 0], [3, 1, 0], [2]):
            child = comm.split(ranks if comm.get_rank() in ranks else [], f"of {ranks}")
            if child is not None:
                x = torch.tensor([float(comm.get_rank())])
                child.all_reduce(x, unicomm.ReduceOp.SUM, False)
                assert x.item() == sum(ranks)
                kinds[tuple(ranks)] = child.get_backend()
                child.finalize()
        return kinds

    said = run_ranks(program, 4, backend="auto", hints={"hosts": "x,y,x,y"})
    everything = {ranks: kind for one in said for ranks, kind in one.items()}
    assert everything == {(0, 2): "shm", (1, 0): BETWEEN, (3, 1, 0): "hosts", (2,): "shm"}


def test_a_hint_for_too_few_ranks(raised):
    error = raised(run_ranks, lambda c: None, 3, backend="auto", hints={"hosts": "a,b"})
    assert isinstance(error, unicomm.InvalidArgumentError)
    assert "2 ranks, but there is a rank 2" in str(error)
    error = raised(run_ranks, lambda c: None, 2, backend="auto", hints={"hosts": "a,"})
    assert isinstance(error, unicomm.InvalidArgumentError)
    assert "such as 0,0,1,1" in str(error)


@pytest.mark.parametrize(("layout", "backend"), [("a,a", BETWEEN), ("a,b,b,a", "hosts"), ("a,a,b", BETWEEN)])
def test_memory_that_cannot_be_opened_is_not_shared(monkeypatch, caplog, layout, backend):
    """Two ranks may run under one kernel and still not reach each other's memory: then they are two hosts."""
    opened = _core.ShmSegment.open

    class Closed(_core.ShmSegment):
        """The first rank's host does not let others in; there is one such for each communicator."""

        @staticmethod
        def open(pid, fd):
            if os.stat(f"/proc/{pid}/fd/{fd}").st_ino in refused:
                raise PermissionError(f"/proc/{pid}/fd/{fd}: permission denied")
            return opened(pid, fd)

    refused = set()
    made, lock = _core.ShmSegment, threading.Lock()

    def make(world, *rest):
        segment = made(world, *rest)
        with lock:  # the ranks of two hosts make theirs at the same time
            if world > 1 and not refused:
                refused.add(os.stat(segment.fd).st_ino)  # its number is used again
        return segment

    make.open = Closed.open
    monkeypatch.setattr(_core, "ShmSegment", make)

    def program(comm):
        x = torch.ones(5000)
        comm.all_reduce(x, unicomm.ReduceOp.SUM, False)
        return comm.get_backend(), x[-1].item()

    n = layout.count(",") + 1
    with caplog.at_level(logging.WARNING, "unicomm"):
        said = run_ranks(program, n, backend="auto", hints={"hosts": layout})
    assert said == [(backend, float(n))] * n
    assert "permission denied" in caplog.text


def test_a_rank_without_memory_after_the_last_meeting_tells_the_others(monkeypatch, raised):
    """The others are connected: if they heard nothing, they would wait for it until their deadline."""
    made = auto.FirstCause

    def make(store, uid, name, rank, size):
        if (name, rank) == ("child", 1):
            raise MemoryError
        return made(store, uid, name, rank, size)

    monkeypatch.setattr(auto, "FirstCause", make)

    def program(comm):
        if comm.get_rank() == 1:
            with pytest.raises(MemoryError):
                comm.split([0, 1, 2], "child")
            return
        child = comm.split([0, 1, 2], "child")
        error = raised(child.barrier, False)
        assert isinstance(error, unicomm.AbortedError | unicomm.PeerLostError), repr(error)
        assert error.culprits == (1,)
        child.finalize()

    run_ranks(program, 3, backend="auto", hints={"hosts": "a,a,b"})


def test_layout():
    layout = Layout.by(["b", "a", "a", "b", "c"], 3)
    assert layout.hosts == ((0, 3), (1, 2), (4,))
    assert (layout.host, layout.local, layout.is_leader) == (0, 1, False)
    assert layout.leaders == (0, 1, 4)
    assert layout.order == (0, 3, 1, 2, 4)
    assert layout.elsewhere == (1, 2, 4)
    assert (layout.largest, layout.smallest) == (2, 1)


def test_memory_and_version():
    def program(comm):
        return comm.memory(), comm.get_backend_version()

    for memory, version in run_ranks(program, 3, backend="auto", hints={"hosts": "a,a,b"}):
        assert memory["segment"] > 0
        assert "shm: native core" in version
        assert f"{BETWEEN}: " in version


class TestAddresses:
    def test_one_network_needs_none(self):
        assert choose([Place("", "boot net:1"), Place("10.0.0.2", "boot net:1")], 0) == ""

    def test_the_way_to_the_store_is_the_address(self):
        assert choose([Place("10.0.0.1", "a"), Place("10.0.0.2", "b")], 1) == "10.0.0.2"

    def test_who_sees_only_loopback_asks_for_the_way_to_the_others(self, monkeypatch):
        """MASTER_ADDR is a name of this host, which its /etc/hosts says is 127.0.1.1."""
        monkeypatch.setattr(addresses, "route_to", {"10.0.0.2": "10.0.0.1"}.__getitem__)
        assert choose([Place("", "a"), Place("", "a"), Place("10.0.0.2", "b")], 0) == "10.0.0.1"

    def test_a_host_without_a_network_is_told(self, monkeypatch):
        monkeypatch.setattr(addresses, "route_to", lambda host: "")
        with pytest.raises(OSError, match="no network address"):
            choose([Place("", "a"), Place("10.0.0.2", "b")], 0)

    @pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1", "no-such-host.invalid"])
    def test_loopback_is_no_way(self, host):
        assert addresses.route_to(host) == ""


def test_an_interface_that_is_named_goes_before_the_way(monkeypatch):
    places = [Place("10.0.0.1", "a"), Place("10.0.0.2", "b")]
    monkeypatch.delenv(addresses.INTERFACE, raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth7")
    assert choose(places, 0) == "127.0.0.1"
    monkeypatch.setenv(addresses.INTERFACE, "nonesuch0")
    with pytest.raises(unicomm.InvalidArgumentError, match="'nonesuch0' has no address"):
        choose(places, 0)
    monkeypatch.delenv(addresses.INTERFACE)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert choose(places, 0) == "10.0.0.1"
