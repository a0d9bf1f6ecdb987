"""What members that wait look for, and what they do not take for a fault."""

from __future__ import annotations

import os
import subprocess
import threading
from collections import Counter
from typing import Any

import pytest
from torch.distributed import HashStore

from tests.comms.membership.rendezvous_helpers import LONG, close_all, meet_all
from unicomm import MismatchError
from unicomm.comms.failures.store_client import StoreClient
from unicomm.comms.membership import meeting_faults
from unicomm.comms.membership.meeting_faults import MeetingFaults
from unicomm.comms.membership.processes import Process, lives, status
from unicomm.comms.membership.rendezvous import meet


def test_whether_a_process_lives() -> None:
    ticks = int(status(os.getpid())[19])
    assert lives(os.getpid(), ticks)
    assert not lives(os.getpid(), ticks + 1)
    with subprocess.Popen(["sleep", "100"]) as process:
        ticks = int(status(process.pid)[19])
        assert lives(process.pid, ticks)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays as a zombie
        assert not lives(process.pid, ticks)
    assert not lives(process.pid, ticks)


def test_processes_of_other_hosts_are_not_judged() -> None:
    me = Process.this(holds_store=False)
    assert Process.read(me.pack()) == me
    assert not me.has_ended(me)
    elsewhere = Process(b"elsewher", me.pid, me.ticks + 1, holds_store=False)
    assert not elsewhere.has_ended(me)
    for damaged in (b"", me.pack()[1:], Process(me.scope, 1 << 31, 1, holds_store=False).pack()):
        with pytest.raises(ValueError, match="is no process"):
            Process.read(damaged)


@pytest.mark.parametrize("size", [2, 16, 17, 100, 1000])
def test_each_member_is_watched_by_several(size: int) -> None:
    watched: Counter[int] = Counter()
    for rank in range(size):
        client = StoreClient(HashStore(), "c", size, LONG)
        mine = MeetingFaults(client, "c", "at/0", rank, range(size), Process.this(holds_store=False))._watched
        assert rank not in mine
        assert len(set(mine)) == len(mine) <= 15
        watched.update(mine)
    assert min(watched.values()) == max(watched.values()) >= min(size - 1, 4)
    assert len(watched) == size


def entry(**changed: Any) -> bytes:
    process = Process.this(holds_store=False).pack().hex()
    fields = {"at": "unicomm/d/world/0", "name": "d", "ranks": [0, 1], "alone": True, "process": process}
    return meeting_faults.encode({**fields, "key": "k", **changed})


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"nonsense", b"[" * 100000, b"{}", b"null"),
        entry(at="nowhere"),
        entry(ranks=["0"]),
        entry(process="00"),
        entry(alone=False),  # another thread of rank 1 may come
        entry(at="unicomm/decided/world/0"),  # rank 1 has gone on
        entry(at="unicomm/again/world/0"),  # rank 1 has tried again, with success
        entry(ranks=[1, 2]),  # rank 1 does not wait for rank 0
    ],
    ids=lambda text: text[:20].decode(),
)
def test_no_reason_to_give_up(text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits for rank 1, which has put `text` where its call belongs, for several looks."""
    monkeypatch.setattr(meeting_faults, "PAUSE", 0.01)
    monkeypatch.setattr(meeting_faults.thread_quiescence, "threads_that_stay", lambda *_: [])
    store, looks = HashStore(), threading.Semaphore(0)
    store.set("unicomm/decided/world/0/0/result", "+")
    store.set("unicomm/again/world/generation", "2")
    store.set("unicomm-waits-in/1", text)  # type: ignore[arg-type]
    look = MeetingFaults.look

    def count(self: MeetingFaults, *arguments: Any) -> Any:
        looks.release()
        return look(self, *arguments)

    monkeypatch.setattr(MeetingFaults, "look", count)

    def late(rank: int) -> dict[str, Any]:
        if rank == 1:
            for _ in range(4):
                assert looks.acquire(timeout=LONG)
        return {}

    members = meet_all(store, 2, hello=late)
    assert len({member.uid for member in members}) == 1
    close_all(members)


def test_the_same_entry_twice_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counterpart: an entry that says so ends the wait."""
    monkeypatch.setattr(meeting_faults, "PAUSE", 0.01)
    monkeypatch.setattr(meeting_faults.thread_quiescence, "threads_that_stay", lambda *_: [])
    store = HashStore()
    store.set("unicomm-waits-in/1", entry())  # type: ignore[arg-type]
    with pytest.raises(MismatchError, match="name is 'd' on rank 1 and 'c' on rank 0"):
        meet(store, "c", 0, 2, timeout=LONG, hello={})
    assert bytes(store.get("unicomm/d/world/0/0/result")).startswith(b"-")  # the other one hears of it
