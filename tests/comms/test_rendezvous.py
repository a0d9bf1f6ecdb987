"""Ranks are threads here: each test drives all members of a meeting at once, over real stores."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, TCPStore

from unicomm.comms.errors import (
    AbortedError,
    BackendError,
    CommError,
    CommTimeoutError,
    InvalidArgumentError,
    MismatchError,
    NotReadyError,
    PeerLostError,
)
from unicomm.comms.rendezvous import MAX_VALUE, Rendezvous, meet

LONG = 60.0  # seconds; nothing here may come near it
KINDS = ("hash", "file", "tcp", "prefix")


def together(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Runs each call in a thread of its own; returns what each returned or raised."""
    results: list[Any] = [None] * len(calls)

    def run(i: int) -> None:
        try:
            results[i] = calls[i]()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert not any(thread.is_alive() for thread in threads), "a member hangs"
    return results


def meet_all(store: Any, size: int, *, ranks: Sequence[int] | None = None, **options: Any) -> list[Any]:
    """Members `ranks` (all of them if not given) meet; `options` may be functions of the rank."""

    def call(rank: int) -> Any:
        chosen = {"name": "c", "timeout": LONG, "hello": {}}
        chosen.update({key: v(rank) if callable(v) else v for key, v in options.items()})
        return meet(store, chosen.pop("name"), rank, size, **chosen)

    return together([lambda r=r: call(r) for r in (range(size) if ranks is None else ranks)])  # type: ignore[misc]


def close_all(members: Sequence[Rendezvous]) -> None:
    for member in members:
        member.close()


def same_error(results: Sequence[Any], kind: type[CommError], culprits: Sequence[int]) -> CommError:
    """All members raised the same error; returns one."""
    for error in results:
        assert type(error) is kind, repr(error)
        assert error.culprits == tuple(culprits)
    assert len({error.message for error in results}) == 1
    first: CommError = results[0]
    return first


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """One store object that all the threads share, as threads of one process do."""
    if request.param == "hash":
        return HashStore()
    if request.param == "file":
        return FileStore(str(tmp_path / "store"), -1)
    tcp = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return tcp if request.param == "tcp" else PrefixStore("outer", PrefixStore("inner", tcp))


class Watched:
    """A store that runs a hook before each operation; stands for delays, crashes and interrupts."""

    def __init__(self, store: Any, hook: Callable[[str, tuple[Any, ...]], None]) -> None:
        self._store, self._hook = store, hook

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self._hook(operation, arguments)
            return getattr(self._store, operation)(*arguments)

        return call


@contextmanager
def quick(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


def test_full_cycle(store: Any) -> None:
    members = meet_all(store, 3, hello={"backend": "shm", "options": {"a": [1, None]}})
    assert len({m.uid for m in members}) == 1
    assert len(members[0].uid) == 16
    assert int(members[0].uid, 16) >= 0
    values = [b"", b"\x00\xff\n?+-*", b"three"]
    for _ in range(2):
        got = together([lambda m=m: m.exchange("x", values[m.rank]) for m in members])  # type: ignore[misc]
        assert got == [values] * 3
    sent = [None, b"from one", b"ignored"]
    assert (
        together([lambda m=m: m.broadcast("b", sent[m.rank], root=1) for m in members]) == [b"from one"] * 3
    )  # type: ignore[misc]
    assert 0 < members[0].remaining() <= LONG
    close_all(members)
    with pytest.raises(NotReadyError, match="closed"):
        members[0].exchange("late", b"")


def test_values_arrive_whole_however_large(store: Any) -> None:
    members = meet_all(store, 9)
    values = [bytes([r]) * (MAX_VALUE - r) for r in range(9)]
    # Nine of them are more than a TCPStore takes in one value.
    got = together([lambda m=m: m.exchange("big", values[m.rank]) for m in members])  # type: ignore[misc]
    assert all(result == values for result in got)
    close_all(members)


@pytest.mark.parametrize("absent", [0, 2])
def test_missing_member(store: Any, absent: int) -> None:
    there = [r for r in range(4) if r != absent]
    began = time.monotonic()
    results = meet_all(store, 4, ranks=there, timeout=0.3)
    took = time.monotonic() - began
    error = same_error(results, CommTimeoutError, [absent])
    assert 0.3 <= took < 1.3
    assert f"rank {absent} did not arrive within 0.3 s" in error.message
    assert ("ranks 1-3 did" if absent == 0 else "ranks 0-1, 3 did") in error.message
    assert "timeout=" in error.hint
    assert (error.comm, [e.rank for e in results]) == ("c", there)
    # Trying again meets again, with the one that had not come.
    members = meet_all(store, 4)
    assert len({m.uid for m in members}) == 1
    close_all(members)


def test_late_comer_is_never_alone_in_a_success() -> None:
    store = HashStore()
    same_error(meet_all(store, 3, ranks=[0, 1], timeout=0.05), CommTimeoutError, [2])
    (late,) = meet_all(store, 3, ranks=[2], timeout=0.05)
    same_error([late], CommTimeoutError, [0, 1])
    assert "after an earlier attempt: rank 2 did not arrive within 0.05 s; ranks 0-1 did" in late.hint
    same_error(meet_all(store, 3, ranks=[1, 2], timeout=0.05), CommTimeoutError, [0])
    assert len({m.uid for m in meet_all(store, 3)}) == 1


def test_late_comer_in_the_middle_of_the_failure_joins_the_retry() -> None:
    # Member 2 finds the attempt open, and posts only when it has failed for want of member 2.
    store, failed = HashStore(), threading.Event()

    def delay(operation: str, arguments: tuple[Any, ...]) -> None:
        if operation == "compare_set" and arguments[0].endswith("/0/0/2"):
            assert failed.wait(LONG)

    def retry(rank: int) -> tuple[Exception, Rendezvous]:
        with pytest.raises(CommTimeoutError) as caught:
            meet(store, "c", rank, 3, timeout=0.05, hello={})
        failed.set()
        return caught.value, meet(store, "c", rank, 3, timeout=LONG, hello={})

    first, second, third = together(
        [
            lambda: retry(0),
            lambda: retry(1),
            lambda: meet(Watched(store, delay), "c", 2, 3, timeout=LONG, hello={}),  # type: ignore[arg-type]
        ]
    )
    assert first[0].culprits == second[0].culprits == (2,)
    assert first[1].uid == second[1].uid == third.uid


def test_late_comer_without_time_left_gets_the_error() -> None:
    store, failed = HashStore(), threading.Event()

    def delay(operation: str, arguments: tuple[Any, ...]) -> None:
        if operation == "compare_set" and arguments[0].endswith("/0/0/1"):
            assert failed.wait(LONG)

    def first() -> None:
        try:
            meet(store, "c", 0, 2, timeout=0.1, hello={})
        finally:
            failed.set()

    late = Watched(store, delay)
    results = together([first, lambda: meet(late, "c", 1, 2, timeout=0.05, hello={})])  # type: ignore[arg-type]
    same_error(results, CommTimeoutError, [1])


def test_member_that_died_while_completing_is_named() -> None:
    store = HashStore()

    def die(operation: str, arguments: tuple[Any, ...]) -> None:
        if operation == "multi_get":
            raise RuntimeError("connection lost")

    waiting = threading.Event()

    def last() -> Any:
        assert waiting.wait(LONG)
        return meet(Watched(store, die), "c", 1, 2, timeout=LONG, hello={})  # type: ignore[arg-type]

    def see(operation: str, arguments: tuple[Any, ...]) -> None:
        if operation == "check":
            waiting.set()

    first, second = together(
        [lambda: meet(Watched(store, see), "c", 0, 2, timeout=0.2, hello={}), last]  # type: ignore[arg-type]
    )
    assert isinstance(second, BackendError)
    assert "connection lost" in second.message
    assert second.hint
    same_error([first], CommTimeoutError, [1])
    assert "stopped before it could answer" in first.message


def test_recreation_leaves_nothing_behind(store: Any) -> None:
    counts, uids = [], set()
    for i in range(50):
        members = meet_all(store, 2)
        if i % 2:
            together([lambda m=m: m.exchange("x", b"v") for m in members])  # type: ignore[misc]
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
    same_error(together([lambda m=m: m.exchange("x", b"") for m in members[::2]]), PeerLostError, [1])  # type: ignore[misc]
    assert store.num_keys() > clean
    close_all(members[:2])  # member 2 never closes
    close_all(meet_all(store, 3))
    assert store.num_keys() == clean


def test_live_communicators_of_one_name(store: Any) -> None:
    old = meet_all(store, 2)
    new = meet_all(store, 2)
    close_all(old)
    assert together([lambda m=m: m.exchange("x", bytes([m.rank])) for m in new]) == [[b"\x00", b"\x01"]] * 2  # type: ignore[misc]
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

    results = together([lambda r=r: run(r) for r in orders])  # type: ignore[misc]
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
        a, b, pair = together([lambda: one("a"), lambda: one("b"), both])
    assert pair == [b, a]


def test_many_members_are_fast() -> None:
    with quick(1.0):
        members = meet_all(HashStore(), 64)
        values = together([lambda m=m: m.exchange("x", b"%d" % m.rank) for m in members])  # type: ignore[misc]
    assert values == [[b"%d" % r for r in range(64)]] * 64


@pytest.mark.parametrize(
    ("values", "culprits", "words"),
    [
        (["shm", "gloo", "shm"], [1], ["backend is 'gloo' on rank 1 and 'shm' on ranks 0, 2"]),
        (["gloo", "shm", "shm"], [0], ["'gloo' on rank 0"]),
        (["shm", "shm", "gloo", "gloo"], [2, 3], ["'gloo' on ranks 2-3 and 'shm' on ranks 0-1"]),
        (["a", "b", "c"], [1, 2], ["'a' on rank 0", "'b' on rank 1", "'c' on rank 2"]),
    ],
)
def test_mismatch(store: Any, values: list[str], culprits: list[int], words: list[str]) -> None:
    results = meet_all(store, len(values), hello=lambda r: {"backend": values[r], "same": 1})
    error = same_error(results, MismatchError, culprits)
    assert all(word in error.message for word in words)
    assert "same" not in error.message
    close_all(meet_all(store, len(values), hello={"backend": "shm"}))


def test_mismatch_of_several_keys_names_each() -> None:
    hellos = [{"a": 1, "b": {"x": "1"}}, {"a": 2, "b": {"x": "1"}}, {"a": 1, "b": {"x": "2"}, "c": None}]
    error = same_error(meet_all(HashStore(), 3, hello=lambda r: hellos[r]), MismatchError, [1, 2])
    assert "a is 2 on rank 1 and 1 on ranks 0, 2" in error.message
    assert "b is {'x': '2'} on rank 2" in error.message
    assert "c is None on rank 2 and not given on ranks 0-1" in error.message


def test_mismatch_of_the_size_is_found_before_the_timeout() -> None:
    store = HashStore()

    def call(rank: int, size: int) -> Any:
        return meet(store, "c", rank, size, timeout=LONG, hello={})

    def misled() -> Any:
        store.wait(["unicomm/c/world/0/0/0", "unicomm/c/world/0/0/2"])
        return call(1, 2)

    with quick(10):
        results = together([lambda: call(0, 3), misled, lambda: call(2, 3)])
    error = same_error(results, MismatchError, [1])
    assert "size is 2 on rank 1 and 3 on rank 0" in error.message


def test_size_that_leaves_a_member_out_is_an_error_there() -> None:
    store = HashStore()

    def pair(rank: int) -> Any:
        store.wait(["unicomm/c/world/0/0/2"])
        return meet(store, "c", rank, 2, timeout=LONG, hello={})

    with quick(10):
        first, second, third = together(
            [lambda: pair(0), lambda: pair(1), lambda: meet(store, "c", 2, 3, timeout=LONG, hello={})]
        )
    assert first.uid == second.uid
    same_error([third], MismatchError, [2])
    assert "size is 3 on rank 2 only" in third.message


def test_mismatch_explains_a_missing_member() -> None:
    store = HashStore()
    # Rank 1 believes in a world of two: nobody is going to be the third.
    calls = [(0, 3), (1, 2)]
    results = together(
        [lambda r=r, n=n: meet(store, "c", r, n, timeout=0.2, hello={}) for r, n in calls]  # type: ignore[misc]
    )
    same_error(results, MismatchError, [1])


def test_two_processes_with_one_rank(store: Any) -> None:
    # Rank 1 was given out twice and rank 2 not at all: no success, and no waiting for the timeout.
    with quick(10):
        results = meet_all(store, 3, ranks=[0, 1, 1])
    same_error(results, MismatchError, [1])
    assert "two processes call themselves rank 1" in results[0].message


def test_errors_name_global_ranks() -> None:
    (error,) = meet_all(HashStore(), 3, ranks=[1], timeout=0.02, labels=(7, 4, 5))
    same_error([error], CommTimeoutError, [7, 5])
    assert error.rank == 1
    assert "global ranks 5, 7 did not arrive within 0.02 s; global rank 4 did" in error.message


def test_member_missing_in_a_later_step(store: Any) -> None:
    members = meet_all(store, 3, timeout=0.4)
    with quick(2):
        results = together([lambda m=m: m.exchange("addresses", b"") for m in members[:2]])  # type: ignore[misc]
    error = same_error(results, CommTimeoutError, [2])
    assert "rank 2 did not reach exchange 'addresses'" in error.message
    with pytest.raises(CommTimeoutError) as again:
        members[0].exchange("more", b"")
    assert again.value is results[0]
    with pytest.raises(CommTimeoutError):
        members[2].exchange("addresses", b"")
    close_all(members)
    close_all(meet_all(store, 3))


def test_members_at_different_calls() -> None:
    members = meet_all(HashStore(), 3)
    calls: list[Callable[[], Any]] = [
        lambda: members[0].exchange("a", b""),
        lambda: members[1].exchange("b", b""),
        lambda: members[2].exchange("a", b""),
    ]
    error = same_error(together(calls), MismatchError, [1])
    assert "tag is 'b' on rank 1 and 'a' on ranks 0, 2" in error.message


def test_abort_reaches_the_others_at_once(store: Any) -> None:
    members = meet_all(store, 3)

    def leave() -> None:
        with members[1]:
            raise OSError("no shared memory\nand a long tail")

    with quick(10):
        left, *others = together(
            [leave, lambda: members[0].exchange("x", b""), lambda: members[2].exchange("x", b"")]
        )
    assert isinstance(left, OSError)
    error = same_error(others, PeerLostError, [1])
    assert error.message == "rank 1 left: OSError: no shared memory"
    close_all(members)


def test_abort_is_final_for_the_one_that_left() -> None:
    (alone,) = meet_all(None, 1)
    alone.abort("no reason")
    with pytest.raises(AbortedError, match="no reason"):
        alone.exchange("x", b"")


def test_ctrl_c_ends_the_wait_and_the_others_learn_it(store: Any) -> None:
    members = meet_all(store, 3)
    key = "unicomm/c/world/0/1/0"
    main = threading.main_thread()

    def interrupt() -> None:
        while not store.check([key]):
            time.sleep(0.001)
        assert main.ident is not None
        signal.pthread_kill(main.ident, signal.SIGINT)

    helper = threading.Thread(target=interrupt, daemon=True)
    with quick(10):
        helper.start()
        with pytest.raises(KeyboardInterrupt):
            members[0].exchange("x", b"")
        results = together([lambda m=m: m.exchange("x", b"") for m in members[1:]])  # type: ignore[misc]
    same_error(results, PeerLostError, [0])
    helper.join(LONG)
    close_all(members)


def test_store_that_is_gone() -> None:
    def fail(operation: str, arguments: tuple[Any, ...]) -> None:
        raise RuntimeError("Broken pipe\nframe #0")

    (error,) = meet_all(Watched(HashStore(), fail), 2, ranks=[0])
    assert isinstance(error, BackendError)
    assert error.message == "the store failed: Broken pipe"
    assert "MASTER_ADDR" in error.hint
    assert isinstance(error.__cause__, RuntimeError)


def test_store_that_dies_during_the_wait() -> None:
    def fail(operation: str, arguments: tuple[Any, ...]) -> None:
        if operation == "check":
            raise RuntimeError("recv failed")

    (error,) = meet_all(Watched(HashStore(), fail), 2, ranks=[0])
    assert isinstance(error, BackendError)
    members = meet_all(HashStore(), 2)
    members[0]._client._store = Watched(HashStore(), fail)
    members[0].close()  # the store may be gone by then, and nobody minds


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
    assert together([lambda m=m: m.exchange("x", b"v") for m in members]) == [[b"v"] * 2] * 2  # type: ignore[misc]
