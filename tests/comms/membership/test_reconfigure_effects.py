"""reconfigure: what stays, what is left, and what process groups make of it."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import unicomm
import unicomm.profiler
from tests.comms import inside
from tests.comms.membership.casts import LONG
from unicomm import Communicator, NotReadyError, ReduceOp, UnsupportedError
from unicomm.c10d.process_group import UnicommProcessGroup
from unicomm.comms.membership import split, store_users
from unicomm.comms.membership.handles import Handle
from unicomm.comms.membership.remote_store import RemoteStore
from unicomm.flight_recorder.analysis.analyze import analyze
from unicomm.flight_recorder.recording import writer
from unicomm.flight_recorder.table.load import load

SUM = ReduceOp.SUM
REAL = ["shm", "gloo", "tcp"]


def test_hooks_stay(cast):
    ranks = cast("shm", 2)
    seen: list[tuple[str, int]] = []
    hook = ranks.comms[0].register_pre_hook(lambda name, _, args: seen.append((name.value, args.seq)))
    ranks.become([0, 1])
    ranks.become([1, 0])
    once = [("reconfigure", 0), ("all_reduce", 1), ("all_gather_single", 2)]
    assert seen == 2 * once
    hook.remove()
    ranks.become([0, 1])
    assert seen == 2 * once


@pytest.mark.usefixtures("fresh_recorder")
def test_epochs_are_communicators_for_the_recorder(cast):
    ranks = cast("shm", 3)
    ranks.become([0, 1, 2])
    ranks.become([2, 0])
    ranks.become([1, 2, 0])
    ranks.play([0, 1, 2], lambda comm, _: [comm.barrier(False) for _ in range(5)])
    table = load([writer.recorder_path()])
    assert sorted(group.ranks.tolist() for group in table.groups) == [[0, 1, 2], [1, 2, 0], [2, 0]]
    assert len({group.uid for group in table.groups}) == 3
    report = analyze(table)
    assert not report.main.culprits, report.main.sentence


@pytest.mark.usefixtures("fresh_recorder")
def test_the_analyzer_blames_in_the_last_epoch(cast, raised):
    ranks = cast("shm", 4)
    ranks.become([0, 1, 2])
    ranks.become([2, 3, 0])  # in the job these are 2, 3 and 0
    errors = ranks.play([0, 3], lambda comm, _: raised(comm.barrier, False, timeout=2.0))
    for error in errors.values():
        assert error.culprits == (0,)
        assert "Rank 2 " in error.message.partition("verdict")[2]
    report = analyze(load([writer.recorder_path()]), stuck_after=0.0)
    assert list(report.main.culprits) == [2]


def test_the_profiler_sees_two_communicators(cast):
    ranks = cast("shm", 1)
    ranks.become([0])
    with torch.profiler.profile() as prof:
        ranks.comms[0].barrier(False)
        ranks.become([0])
    seen = unicomm.profiler.events(prof)
    assert [(event.name, event.seq_num) for event in seen][:2] == [
        ("unicomm::barrier", 3),
        ("unicomm::all_reduce", 1),
    ]
    assert len({event.group.uid for event in seen}) == 2


def left_open() -> dict[str, int]:
    gc.collect()
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    maps = Path("/proc/self/maps").read_text()
    return {
        "threads": threading.active_count(),
        "kernel threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(links),
        "segments": maps.count("unicomm"),
    }


@pytest.mark.parametrize("backend", REAL)
def test_nothing_is_left_behind(backend, cast, raised, eventually):
    ranks = cast(backend, 3)
    for order in ([0, 1, 2], [2, 1], [0, 2, 1]):
        ranks.become(order)
    before = left_open()
    for k in range(20):
        if k % 4 == 1:
            ranks.comms[k % 3].abort()
        if k % 4 == 3:
            gone = (k + 1) % 3
            there = [i for i in range(3) if i != gone]
            ranks.play(there, lambda comm, _, k=k: raised(comm.reconfigure, k, ranks.handles, 0.1))
        ranks.become([[0, 1, 2], [2, 1, 0], [1, 0, 2]][k % 3])

    def as_before() -> bool:
        return all(n <= before[what] for what, n in left_open().items())

    try:
        eventually(as_before)
    except AssertionError:
        raise AssertionError(f"before {before}, after {left_open()}") from None


@pytest.mark.parametrize("backend", REAL)
@pytest.mark.parametrize("gone", ["late", "finalized", "the store's"])
def test_errors_of_a_split_name_global_ranks(backend, gone, cast, raised):
    """Whether the meeting, the parent or the store has noticed that a rank is missing."""
    ranks = cast(backend, 3)
    ranks.become([0, 1, 2])
    ranks.become([2, 1, 0])  # whose global ranks are these
    missing = 2 if gone == "the store's" else 0

    def act(comm: Communicator, i: int) -> Any:
        if i != missing:
            return raised(comm.split, [0, 1, 2], "child", timeout=2.0)
        if gone == "finalized":
            comm.finalize()
        elif gone == "the store's":
            inside.endpoint(comm).serve_nothing()
        return None

    for i, error in ranks.play([0, 1, 2], act).items():
        if i != missing:
            assert error.culprits == (missing,), repr(error)
            assert f"global rank {missing}" in str(error)


@pytest.mark.parametrize("backend", REAL)
@pytest.mark.parametrize("then", ["finalize", "reconfigure"])
def test_the_first_rank_keeps_the_store_for_those_that_split(backend, then, cast, monkeypatch):
    """It is through with the split, and goes on, while another rank has not read the outcome."""
    ranks = cast(backend, 3)
    ranks.become([0, 1, 2])
    ask = RemoteStore._ask

    def slowly(store: RemoteStore, name: str, *fields: bytes) -> list[bytes]:
        if any(field.endswith(b"/result") for field in fields):
            time.sleep(0.1)
        return ask(store, name, *fields)

    monkeypatch.setattr(RemoteStore, "_ask", slowly)
    monkeypatch.setattr(store_users, "_PATIENCE", LONG)

    def act(comm: Communicator, i: int) -> Communicator | None:
        child = comm.split([0, 1, 2], "child", timeout=LONG)
        if i == 0 and then == "finalize":
            comm.finalize()
        elif then == "reconfigure" and i < 2:
            comm.reconfigure(7, ranks.handles[:2])
        return child

    children = ranks.play([0, 1, 2], act)
    assert all(isinstance(child, Communicator) for child in children.values()), children
    ranks.play([0, 1, 2], lambda _, i: children[i].barrier())
    for child in children.values():
        child.finalize()


@pytest.mark.parametrize("then", ["finalize", "reconfigure"])
def test_the_first_rank_keeps_the_store_as_long_as_others_wait(then, cast, monkeypatch):
    """Ranks 1 and 2 split without rank 0, which holds the store, and rank 2 comes late."""
    ranks = cast("shm", 3)
    ranks.become([0, 1, 2])
    monkeypatch.setattr(store_users, "_PATIENCE", 0.5)
    waits = threading.Event()
    using = store_users.using

    @contextlib.contextmanager
    def told(*arguments: Any) -> Iterator[None]:
        with using(*arguments):
            waits.set()
            yield

    monkeypatch.setattr(split, "using", told)

    def act(comm: Communicator, i: int) -> Communicator | None:
        if i == 0:
            assert waits.wait(LONG)
            comm.finalize() if then == "finalize" else comm.reconfigure(7, ranks.handles[:1])
            return None
        if i == 2:
            assert waits.wait(LONG)
            time.sleep(2.0)
        return comm.split([1, 2], "child", timeout=LONG)

    children = ranks.play([0, 1, 2], act)
    assert all(isinstance(children[i], Communicator) for i in (1, 2)), children
    ranks.play([1, 2], lambda _, i: children[i].barrier())
    for i in (1, 2):
        children[i].finalize()


@pytest.mark.parametrize("then", ["finalize", "reconfigure"])
def test_a_split_after_the_store_was_ended(then, cast, raised):
    """The rank that ended it does not wait for one that cannot come, nor blame it."""
    ranks = cast("shm", 2)
    ranks.become([0, 1])
    children = ranks.play([0, 1], lambda comm, _: comm.split([0, 1], "child"))

    def act(comm: Communicator, i: int) -> unicomm.CommError:
        if then == "reconfigure":
            comm.reconfigure(7, ranks.handles)
        elif i == 0:
            comm.finalize()
        error = raised(children[i].split, [0, 1], "grandchild", timeout=LONG)
        if i == 0:
            children[i].finalize()
        return error

    errors = ranks.play([0, 1], act)
    assert type(errors[0]) is NotReadyError, errors
    assert errors[0].message == "the epoch in whose store the ranks would meet has ended"
    assert errors[1].culprits == (0,), errors
    children[1].finalize()


def test_strangers_are_hung_up_on(cast, eventually):
    ranks = cast("shm", 2)
    host, port = Handle.read(ranks.handles[0]).at[0]
    assert host == "127.0.0.1"
    for said in (b"", b"GET / HTTP/1.0\r\n\r\n" * 4, bytes(20), bytes(200)):
        with socket.create_connection((host, port)) as s:
            s.sendall(said)
            if len(said) >= 20:
                assert s.recv(1) == b""
    eventually(lambda: not ranks.comms[0]._dynamic.endpoint._guests)
    crowd = [socket.create_connection((host, port)) for _ in range(100)]
    ranks.become([0, 1])
    for s in crowd:
        s.close()


# --- process groups --------------------------------------------------------------------------------------


def test_a_group_follows(cast):
    ranks = cast("shm", 3)
    groups = [UnicommProcessGroup(comm) for comm in ranks.comms]

    def act(order: list[int]) -> Callable[[Communicator, int], Any]:
        handles = [groups[i].get_init_handle() for i in order]

        def run(_: Communicator, i: int) -> Any:
            groups[i].reconfigure(len(order), handles)
            x = torch.ones(3)
            groups[i].allreduce([x]).wait()
            return groups[i].rank(), groups[i].size(), groups[i].getRank(), x[0].item()

        return run

    assert groups[0].supports_reconfigure
    assert ranks.play([0, 1, 2], act([0, 1, 2])) == {i: (i, 3, i, 3.0) for i in range(3)}
    assert ranks.play([0, 2], act([2, 0])) == {2: (0, 2, 0, 2.0), 0: (1, 2, 1, 2.0)}


def test_the_default_group_follows(cast, raised):
    store = torch.distributed.HashStore()
    dist.init_process_group(
        "unicomm", rank=0, world_size=1, store=store, pg_options={"enable_reconfigure": "true"}
    )
    try:
        group: Any = dist.group.WORLD
        part: Any = dist.new_group([0])
        ranks = cast("auto", 1)
        handles = [ranks.handles[0], group.get_init_handle()]

        def newcomer() -> None:
            ranks.comms[0].reconfigure(1, handles)
            ranks.comms[0].all_reduce(torch.ones(4), SUM, False)
            ranks.comms[0].broadcast(torch.full((2,), 7.0), 0, False)

        other = threading.Thread(target=newcomer)
        other.start()
        group.reconfigure(1, handles)
        x, y = torch.ones(4), torch.zeros(2)
        dist.all_reduce(x)
        dist.broadcast(y, src=0)
        other.join(LONG)
        assert (dist.get_rank(), dist.get_world_size(), dist.get_process_group_ranks(group)) == (1, 2, [0, 1])
        assert (x.tolist(), y.tolist()) == ([2.0] * 4, [7.0] * 2)
        error = raised(part.reconfigure, 2, handles)
        assert type(error) is UnsupportedError
        assert "default group" in error.message
    finally:
        dist.destroy_process_group()


def test_groups_that_cannot(raised):
    with unicomm.new_comm("fake", "cpu") as cpu, unicomm.new_comm("fake", "meta") as meta:
        both = UnicommProcessGroup(cpu, meta)
        assert not both.supports_reconfigure
        assert "several devices" in str(raised(both.reconfigure, 1, []))
        assert not UnicommProcessGroup(cpu).supports_reconfigure
