"""Ranks that cannot connect by Gloo: the others hear of it, by whom and why, long before any timeout."""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from unicomm import BackendError, Communicator, PeerLostError
from unicomm.backends.bootstrap.addresses import guard_store
from unicomm.backends.gloo import connect as gloo_connect
from unicomm.backends.out_of_band import sockets as mesh
from unicomm.backends.out_of_band.fault_channel import FaultChannel
from unicomm.comms.failures.process_sockets import internet_sockets
from unicomm.comms.membership import create, split
from unicomm.comms.operations.table import OPERATIONS
from unicomm.testing import run_ranks

LONG = 1000.0  # seconds; who waits for that fails by pytest's own timeout


@pytest.mark.parametrize("where", ["before gloo", "between its own connections"])
def test_a_member_that_cannot_connect_is_named(monkeypatch, raised, where):
    """At a split, in which two of three ranks take part; the third goes on."""
    listen, need = mesh.listen, gloo_connect._need_descriptors
    failing = threading.local()

    def fail(*arguments, **options):
        if getattr(failing, "now", False):
            raise OSError(24, "Too many open files")
        return listen(*arguments, **options)

    def lack(setup, count):
        need(setup, 10**9 if getattr(failing, "now", False) else count)

    if where == "before gloo":
        monkeypatch.setattr(gloo_connect, "_need_descriptors", lack)
    else:
        monkeypatch.setattr(mesh, "listen", fail)

    def program(comm: Communicator) -> None:
        me = comm.get_rank()
        failing.now = me == 2
        if me == 1:
            assert comm.split([], "pair") is None
            return
        error = raised(comm.split, [0, 2], "pair")
        if me == 2:
            assert type(error) is BackendError
            assert ("file descriptors" if where == "before gloo" else "Too many open files") in str(error)
        else:
            assert type(error) is PeerLostError
            assert error.culprits == (2,)

    run_ranks(program, 3, backend="gloo", timeout=LONG)


def test_descriptors_are_counted_beforehand(monkeypatch, raised):
    """What is asked for is enough: a limit that leaves just as much lets the communicator connect."""
    asked = []
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = gloo_connect._need_descriptors
    monkeypatch.setattr(gloo_connect, "_need_descriptors", lambda s, n: (asked.append(n), need(s, n)))
    run_ranks(lambda comm: comm.barrier(False), 4, backend="gloo", timeout=LONG)
    assert len(asked) == 4
    assert min(asked) > 4 * 3  # Gloo's own, and two of ours, for each peer
    monkeypatch.setattr(resource, "getrlimit", lambda _: (asked[0], limit[1]))
    error = raised(run_ranks, lambda comm: None, 4, backend="gloo", timeout=LONG)
    assert "raise the limit (ulimit -n)" in str(error)


def test_gloo_that_does_not_connect_is_an_error_on_all(monkeypatch, raised):
    """One rank's Gloo fails when all have come: all are told whose."""
    create, connected = dist.ProcessGroupGloo, []

    class Failing:
        _Options, create_device = create._Options, create.create_device
        create_default_device = create.create_default_device

        def __new__(cls, store, rank, size, options):
            group = create(store, rank, size, options)
            if rank == 1:
                connected.append(group)  # let go of, it would end the connections that others still make
                raise RuntimeError("no luck\nwith many lines")
            return group

    monkeypatch.setattr(dist, "ProcessGroupGloo", Failing)
    said = []

    def program(comm: Communicator) -> None:
        raise AssertionError("it is connected")

    error = raised(run_ranks, program, 3, backend="gloo", timeout=LONG)
    said.append(error)
    assert type(error) is BackendError
    assert error.culprits == (1,)
    assert error.message == "gloo could not connect on rank 1: no luck"


def test_a_split_whose_store_fails_names_the_lost_peer(monkeypatch, raised):
    """The store may be where the lost ranks were: that those are gone says more."""
    left = threading.Event()

    def program(comm: Communicator) -> None:
        if comm.get_rank() == 1:
            comm.finalize()
            left.set()
            return
        assert left.wait(60)

        def fail(asked):
            with contextlib.suppress(PeerLostError):
                while True:
                    asked.check_peers()
            raise BackendError("the store failed")

        monkeypatch.setattr(split, "create", fail)
        error = raised(comm.split, [0, 1], "both")
        assert type(error) is PeerLostError
        assert error.culprits == (1,)
        assert not comm.is_aborted()

    run_ranks(program, 2, backend="gloo", timeout=LONG)


def test_the_stores_silence_is_noticed():
    """A store whose host is cut off would keep a rank waiting for a quarter of an hour."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=60))

    def silence() -> list[int]:
        found = []
        for s in internet_sockets():
            with contextlib.suppress(OSError):
                if s.getpeername()[1] == server.port:
                    found.append(s.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
        return found

    assert set(silence()) == {0}
    guard_store(dist.PrefixStore("a prefix", client))
    assert set(silence()) == {15000}
    client.set("it", "works")
    assert client.get("it") == b"works"
    guard_store(None)


def test_who_is_elsewhere(eventually):
    """Whom a rank of several hosts may blame: those in no operation, and those that do not answer."""
    ends = [socket.socketpair() for _ in range(3)]
    faults = []
    asking = FaultChannel({1 + i: ends[i][0] for i in range(3)}, 0, lambda: faults.append(0))
    waiting = FaultChannel({0: ends[0][1]}, 1, lambda: None)
    absent = FaultChannel({0: ends[1][1]}, 2, lambda: None)
    waiting.counts.begin_whole(OPERATIONS["all_reduce"].code)  # the third one answers nothing
    try:
        assert asking.elsewhere([1, 2, 3]) == [2, 3]
        assert asking.elsewhere([1]) == []
        absent.close()
        eventually(lambda: 2 in asking._left)
        assert asking.elsewhere([1, 2]) == [2]
    finally:
        for watch in (asking, waiting, absent):
            watch.close()
        ends[2][1].close()
    assert not faults


def test_a_member_without_room_for_its_recorder_is_named(monkeypatch, raised):
    recorder_of = create.recorder_of
    failing = threading.local()

    def lack(world):
        if getattr(failing, "now", False):
            raise OSError(12, "cannot map the recorder's ring")
        return recorder_of(world)

    monkeypatch.setattr(create, "recorder_of", lack)

    def program(comm: Communicator) -> None:
        me = comm.get_rank()
        failing.now = me == 1
        error = raised(comm.split, [0, 1, 2], "again")
        if me == 1:
            assert type(error) is BackendError
            assert "cannot map the recorder's ring" in str(error)
        else:
            assert type(error) is PeerLostError
            assert error.culprits == (1,)

    run_ranks(program, 3, backend="gloo", timeout=LONG)
