"""How members meet, exchange and part; what goes wrong is in test_rendezvous_failures.py."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore, TCPStore

from tests.comms.membership.rendezvous_helpers import (
    KINDS,
    LONG,
    Watched,
    close_all,
    exchange_all,
    make_store,
    meet_all,
    quick,
    same_error,
)
from tests.threads import outcomes
from unicomm.comms.errors import InvalidArgumentError, NotReadyError, PeerLostError
from unicomm.comms.membership.rendezvous import MAX_VALUE, meet


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return make_store(request.param, tmp_path)


def test_full_cycle(store: Any) -> None:
    members = meet_all(store, 3, hello={"backend": "shm", "options": {"a": [1, None]}})
    assert len({m.uid for m in members}) == 1
    assert len(members[0].uid) == 16
    assert int(members[0].uid, 16) >= 0
    values = [b"", b"\x00\xff\n?+-*", b"three"]
    for _ in range(2):
        assert exchange_all(members, values) == [values] * 3
    sent = [None, b"from one", b"ignored"]
    assert (
        outcomes([lambda m=m: m.broadcast("b", sent[m.rank], root=1) for m in members]) == [b"from one"] * 3
    )  # type: ignore[misc]
    assert 0 < members[0].remaining() <= LONG
    close_all(members)
    with pytest.raises(NotReadyError, match="closed"):
        members[0].exchange("late", b"")


def test_values_arrive_whole_however_large(store: Any) -> None:
    members = meet_all(store, 9)
    values = [bytes([r]) * (MAX_VALUE - r) for r in range(9)]
    # Nine of them are more than a TCPStore takes in one value.
    assert all(got == values for got in exchange_all(members, values))
    close_all(members)


def test_recreation_leaves_nothing_behind(store: Any) -> None:
    counts, uids = [], set()
    for i in range(50):
        members = meet_all(store, 2)
        if i % 2:
            exchange_all(members, [b"v", b"w"])
        uids.update(m.uid for m in members)
        close_all(members)
        counts.append(store.num_keys())
    assert len(uids) == 50
    assert len(set(counts)) == 1


def test_failures_are_cleaned_by_the_next_success() -> None:
    store = HashStore()
    close_all(meet_all(store, 3))
    clean = store.num_keys()
    for absent in (0, 1, 2):
        meet_all(store, 3, ranks=[r for r in range(3) if r != absent], timeout=0.02)
    members = meet_all(store, 3)
    members[1].abort("cannot go on")
    same_error(exchange_all(members[::2], [b""] * 3), PeerLostError, [1])
    assert store.num_keys() > clean
    close_all(members[:2])  # member 2 never closes
    close_all(meet_all(store, 3))
    assert store.num_keys() == clean


def test_live_communicators_of_one_name(store: Any) -> None:
    old = meet_all(store, 2)
    new = meet_all(store, 2)
    close_all(old)
    assert exchange_all(new, [b"a", b"b"]) == [[b"a", b"b"]] * 2
    close_all(new)


def test_subgroups_in_any_order(store: Any) -> None:
    # Overlapping groups of one name, each member in an order of its own; {0, 1} and {2, 3} are disjoint.
    orders = {
        0: [(0, 1), (0, 1, 2), (0, 3)],
        1: [(0, 1), (1, 2), (0, 1, 2)],
        2: [(2, 3), (1, 2), (0, 1, 2)],
        3: [(2, 3), (0, 3)],
    }

    def run(rank: int) -> dict[tuple[int, ...], str]:
        uids = {}
        for group in orders[rank]:
            size, place = len(group), group.index(rank)
            with meet(store, "g", place, size, timeout=LONG, hello={}, labels=group) as member:
                assert member.exchange("who", b"%d" % rank) == [b"%d" % r for r in group]
                uids[group] = member.uid
        return uids

    results = outcomes([lambda r=r: run(r) for r in orders])  # type: ignore[misc]
    for group in {g for order in orders.values() for g in order}:
        assert len({results[r][group] for r in group}) == 1
    assert len({uid for result in results for uid in result.values()}) == 5


def test_threads_of_one_process_may_meet_in_opposite_orders() -> None:
    # They share one connection: a wait that kept it to itself would lock the other thread out.
    tcp = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    other = TCPStore("127.0.0.1", tcp.port, is_master=False, wait_for_workers=False)

    def one(name: str) -> str:
        return meet(tcp, name, 0, 2, timeout=LONG, hello={}).uid

    def both() -> list[str]:
        return [meet(other, name, 1, 2, timeout=LONG, hello={}).uid for name in ("b", "a")]

    with quick(10):
        a, b, pair = outcomes([lambda: one("a"), lambda: one("b"), both])
    assert pair == [b, a]


def test_many_members_are_fast() -> None:
    """Of this process's time: other processes may take the cores. The bound is ten times what it takes."""
    began = time.process_time()
    members = meet_all(HashStore(), 64)
    values = [b"%d" % r for r in range(64)]
    assert exchange_all(members, values) == [values] * 64
    assert time.process_time() - began < 0.5


def test_single_member_touches_no_store() -> None:
    def fail(operation: str, arguments: tuple[Any, ...]) -> None:
        raise AssertionError(operation)

    for store in (None, Watched(None, fail)):
        with meet(store, "c", 0, 1, timeout=1, hello={}) as alone:  # type: ignore[arg-type]
            assert len(alone.uid) == 16
            assert alone.exchange("x", b"mine") == [b"mine"]
            assert alone.broadcast("y", b"too") == b"too"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": ""}, "name"),
        ({"name": "n" * 2000}, "name"),
        ({"rank": 2}, r"rank=2 is not in range \[0, 2\)"),
        ({"timeout": 0.0}, "timeout=0.0"),
        ({"timeout": float("nan")}, "timeout=nan"),
        ({"labels": [3, 3]}, "labels"),
        ({"labels": [1]}, "labels"),
        ({"store": None}, "need a store"),
        ({"hello": {"x": object()}}, "not JSON"),
    ],
)
def test_wrong_arguments(change: dict[str, Any], words: str) -> None:
    store = HashStore()
    given: dict[str, Any] = {"store": store, "name": "c", "rank": 0, "size": 2, "timeout": 1.0, "hello": {}}
    with pytest.raises(InvalidArgumentError, match=words):
        meet(**{**given, **change})
    assert store.num_keys() == 0


def test_wrong_values_leave_the_rendezvous_usable() -> None:
    members = meet_all(HashStore(), 2)
    with pytest.raises(InvalidArgumentError, match="too many"):
        members[0].exchange("x", bytes(MAX_VALUE + 1))
    with pytest.raises(InvalidArgumentError, match="root 2"):
        members[0].broadcast("x", b"", root=2)
    with pytest.raises(InvalidArgumentError, match="value=None"):
        members[0].broadcast("x", None)
    with pytest.raises(TypeError):
        members[0].exchange("x", 5)  # type: ignore[arg-type]
    assert exchange_all(members, [b"v", b"w"]) == [[b"v", b"w"]] * 2
