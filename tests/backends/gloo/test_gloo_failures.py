"""What stands beside Gloo's connections: hints, leaks, strangers at the door."""

from __future__ import annotations

import gc
import os
import socket
import struct
import sys
import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from tests.in_operation import in_operation
from unicomm import AbortedError, CommTimeoutError, Communicator, MismatchError, ReduceOp
from unicomm.backends.out_of_band import fault_channel
from unicomm.backends.out_of_band import sockets as mesh
from unicomm.backends.out_of_band.user_frame import where_is
from unicomm.comms.membership.rendezvous import meet
from unicomm.testing import run_ranks

SUM = ReduceOp.SUM


def held() -> tuple[int, int]:
    """Sockets and threads of this process that a communicator could have left."""
    sockets = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            sockets += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
        except OSError:
            continue
    watches = [t for t in threading.enumerate() if t.name == "unicomm-faults"]
    return sockets, len(watches)


@pytest.mark.parametrize("end", ["finalize", "abort", "abort while others wait", "timeout"])
def test_nothing_is_left(end, raised, eventually):
    """Neither of a communicator that ends well, nor of one that breaks."""
    gc.collect()  # what earlier tests left to it would go meanwhile
    before = held()
    entered = threading.Barrier(3, timeout=60)

    def program(comm: Communicator) -> tuple[int, int]:
        comm.barrier(False)
        now = held()
        entered.wait()
        if end == "abort" and comm.get_rank() == 0:
            comm.abort()
        elif end.startswith("abort"):
            if comm.get_rank() == 0:
                comm.abort()
            assert type(raised(comm.barrier, False)) is AbortedError
        elif end == "timeout":
            if comm.get_rank() == 0:
                assert type(raised(comm.barrier, False, timeout=0.05)) is CommTimeoutError
            entered.wait()
            assert type(raised(comm.barrier, False)) is CommTimeoutError
        return now

    counts = run_ranks(program, 3, backend="gloo", timeout=60)
    assert min(sockets for sockets, _ in counts) >= before[0] + 3 * 2  # so that their absence means something
    assert min(threads for _, threads in counts) == 1
    try:
        eventually(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))
    except AssertionError as error:
        raise AssertionError(f"{before} before, {held()} now") from error


def test_the_check_is_a_hint(raised):
    """Off, it is not done, and the capabilities say so; on, also in a world that is not small."""

    def off(comm: Communicator) -> None:
        assert not comm.get_capabilities().checks_mismatch
        x = torch.full((4,), comm.get_rank() + 1.0)
        # Of equal bytes, so that Gloo takes it; checked, it would be refused.
        comm.broadcast(x if comm.get_rank() == 0 else x.view(torch.int32), 0, False)
        assert x.tolist() == [1.0] * 4

    run_ranks(off, 2, backend="gloo", hints={"check_mismatch": "false"})

    def by_default(comm: Communicator) -> bool:
        x = torch.ones(4 + comm.get_rank() if comm.get_capabilities().checks_mismatch else 4)
        if comm.get_capabilities().checks_mismatch:
            assert type(raised(comm.all_reduce, x, SUM, False)) is MismatchError
        comm.barrier(False)
        return comm.get_capabilities().checks_mismatch

    assert run_ranks(by_default, 2, backend="gloo") == [True] * 2
    assert run_ranks(by_default, 17, backend="gloo", timeout=60) == [False] * 17
    assert run_ranks(by_default, 17, backend="gloo", hints={"check_mismatch": "true"}, timeout=60)[0]


def test_without_the_check_absent_ranks_are_named_too(raised, eventually, monkeypatch):
    """Rank 1 gives up when rank 0 waits, and takes it along."""
    # All ranks answer. A rank that a busy machine lets answer late would be named besides.
    monkeypatch.setattr(fault_channel, "ANSWER", 30.0)
    away = threading.Event()  # rank 2 has left the barrier; a rank that is still in it is late, not absent
    over = threading.Barrier(3, timeout=60)  # no rank finalizes before ranks 0 and 1 have their errors
    first: list[Communicator] = []

    def program(comm: Communicator) -> None:
        comm.barrier(False)
        if comm.get_rank() == 2:
            away.set()
            over.wait()
        else:
            if comm.get_rank() == 0:
                first.append(comm)
            else:
                eventually(lambda: first and in_operation(first[0]))
                assert away.wait(60)
            timeout = 0.05 if comm.get_rank() == 1 else None
            error = raised(comm.all_reduce, torch.ones(5), SUM, False, timeout=timeout)
            assert type(error) is CommTimeoutError
            assert error.absent == error.culprits == (2,)
            over.wait()

    run_ranks(program, 3, backend="gloo", hints={"check_mismatch": "off"}, timeout=60)


def test_where_a_thread_is():
    ready, over, line = threading.Event(), threading.Event(), 0

    def elsewhere() -> None:
        nonlocal line
        line = sys._getframe().f_lineno + 2
        ready.set()
        over.wait(60)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    assert ready.wait(60)
    place = where_is(thread.ident or 0)
    while place != f"{__file__}:{line} in elsewhere":  # it may still be in the line before
        assert place == f"{__file__}:{line - 1} in elsewhere"
        place = where_is(thread.ident or 0)
    over.set()
    thread.join()


def test_the_users_line_is_not_that_of_a_wrapper():
    names = {"where_is": where_is}
    text = "def call(*inner):\n return inner[0](*inner[1:]) if inner else where_is(0)"
    for file in ("/lib/site-packages/accelerate/accelerator.py", "/job/train.py"):
        code = {**names}
        exec(compile(text, file, "exec"), code)
        names[file] = code["call"]
    wrapper, own = (names[f] for f in names if f.startswith("/"))
    assert own(wrapper) == "/job/train.py:2 in call"
    assert own() == "/job/train.py:2 in call"


def test_strangers_do_not_come_in():
    """Who does not know the secret, says too much, or nothing at all, neither joins nor holds others up."""
    store, ports, made = HashStore(), {}, {}
    listening = threading.Event()
    original = mesh.listen

    def listen(host: str, backlog: int) -> socket.socket:
        s = original(host, backlog=backlog)
        ports.setdefault("first", s.getsockname())
        listening.set()
        return s

    def member(rank: int) -> None:
        with meet(store, "mesh", rank, 2, timeout=60, hello={}) as rendezvous:
            if rank == 1:
                assert called.wait(60)
            setup = SimpleNamespace(rendezvous=rendezvous, name="test", hints={})
            made[rank] = mesh.connect_all(setup, "127.0.0.1", 1, "gloo")

    called = threading.Event()
    mesh.listen = listen  # type: ignore[assignment]
    try:
        threads = [threading.Thread(target=member, args=(r,)) for r in range(2)]
        for thread in threads:
            thread.start()
        assert listening.wait(60)
        strangers = [socket.create_connection(ports["first"], 60) for _ in range(4)]
        strangers[0].sendall(struct.pack("<16sIB", b"guessed", 1, 0))
        strangers[1].sendall(os.urandom(1000))
        strangers[2].close()  # strangers[3] says nothing
        called.set()
        for thread in threads:
            thread.join(60)
    finally:
        mesh.listen = original
    assert sorted(made) == [0, 1]
    a, b = made[0][0][1], made[1][0][0]
    assert (a.getsockname(), a.getpeername()) == (b.getpeername(), b.getsockname())
    for s in (a, b, *strangers):
        s.close()


class ForgottenWork:
    """A mock of a work that Gloo has lost sight of: it is never over."""

    def __init__(self) -> None:
        self.never = threading.Event()

    def is_completed(self) -> bool:
        return False

    def wait(self, limit: timedelta) -> None:
        self.never.wait(min(limit.total_seconds(), 100.0))
        raise RuntimeError("Operation timed out!")


class ForgetfulGroup:
    """A mock of Gloo's group that forgets what it is given."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.works: list[ForgottenWork] = []

    def forget(self, *_: Any) -> ForgottenWork:
        self.works.append(ForgottenWork())
        return self.works[-1]

    send = recv = barrier = forget

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


@pytest.mark.parametrize("kind", ["message", "collective", "both ways"])
def test_what_gloo_forgets_ends_with_the_communicator(kind, raised):
    """Its connections are ended, of which Gloo does not tell whoever waits for the operation."""
    entered = threading.Barrier(2, timeout=60)

    def program(comm: Communicator) -> None:
        backend: Any = comm.unsafe_backend
        peer = 1 - comm.get_rank()
        if comm.get_rank() == 1:
            entered.wait()
            comm.abort()
            return
        backend._group = group = ForgetfulGroup(backend._group)
        x = torch.ones(3)
        threading.Thread(target=lambda: (eventually_called(group), entered.wait())).start()
        if kind == "message":
            error = raised(comm.recv, x, peer, False)
        elif kind == "collective":
            backend._check = None
            error = raised(comm.barrier, False)
        else:
            batch = comm.batch_op_create()
            batch.send(x, peer)
            batch.recv(x.clone(), peer)
            error = raised(batch.issue, False)
        assert (type(error), list(error.culprits)) == (AbortedError, [1])
        for work in group.works:
            work.never.set()

    def eventually_called(group: ForgetfulGroup) -> None:
        while not group.works:
            threading.Event().wait(0.01)

    run_ranks(program, 2, backend="gloo", timeout=60)
