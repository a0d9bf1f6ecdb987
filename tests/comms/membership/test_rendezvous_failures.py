"""Members that are missing, late, wrong or dying: nobody hangs, and the error names the culprits."""

from __future__ import annotations

import contextlib
import json
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from tests.comms.membership.rendezvous_helpers import (
    KINDS,
    LONG,
    Watched,
    close_all,
    exchange_all,
    make_store,
    meet_all,
    meet_in_vain,
    posts,
    quick,
    same_error,
)
from tests.eventually import eventually
from tests.threads import outcomes
from unicomm.comms.errors import (
    AbortedError,
    BackendError,
    CommError,
    CommTimeoutError,
    MismatchError,
    PeerLostError,
)
from unicomm.comms.failures.first_cause import await_cause
from unicomm.comms.membership.rendezvous import Rendezvous, meet
from unicomm.comms.membership.rendezvous_parts import error_of, read_failure


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return make_store(request.param, tmp_path)


@pytest.mark.parametrize("absent", [0, 2])
def test_missing_member(store: Any, absent: int) -> None:
    there = [r for r in range(4) if r != absent]
    began = time.monotonic()
    results = meet_in_vain(store, 4, there, timeout=0.3)
    took = time.monotonic() - began
    error = same_error(results, CommTimeoutError, [absent])
    assert 0.3 <= took < 5.3  # its deadline, and what a busy machine may add
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
    same_error(meet_in_vain(store, 3, [0, 1], timeout=0.05), CommTimeoutError, [2])
    (late,) = meet_all(store, 3, ranks=[2], timeout=0.05)
    same_error([late], CommTimeoutError, [0, 1])
    assert "after an earlier attempt: rank 2 did not arrive within 0.05 s; ranks 0-1 did" in late.hint
    same_error(meet_in_vain(store, 3, [1, 2], timeout=0.05, attempt=2), CommTimeoutError, [0])
    assert len({m.uid for m in meet_all(store, 3)}) == 1


def test_late_comer_in_the_middle_of_the_failure_joins_the_retry() -> None:
    # Member 2 finds the attempt open, and posts only when it has failed for want of member 2. Member 1 gives
    # up, and comes when the others have done so much.
    store, failed, found_open = HashStore(), threading.Event(), threading.Event()

    def delay(operation: str, arguments: tuple[Any, ...]) -> None:
        if operation == "compare_set" and arguments[0].endswith("/0/0/2"):
            found_open.set()
            assert failed.wait(LONG)

    def retry(rank: int, timeout: float) -> tuple[Exception, Rendezvous]:
        if rank == 1:
            store.wait(posts([0]))
            assert found_open.wait(LONG)
        with pytest.raises(CommTimeoutError) as caught:
            meet(store, "c", rank, 3, timeout=timeout, hello={})
        failed.set()
        return caught.value, meet(store, "c", rank, 3, timeout=LONG, hello={})

    first, second, third = outcomes(
        [
            lambda: retry(0, LONG),
            lambda: retry(1, 0.05),
            lambda: meet(Watched(store, delay), "c", 2, 3, timeout=LONG, hello={}),  # type: ignore[arg-type]
        ]
    )
    assert first[0].culprits == second[0].culprits == (2,)
    assert first[1].uid == second[1].uid == third.uid


def test_late_comer_without_time_left_gets_the_error() -> None:
    # Member 0 comes when member 1 has found the attempt open, and gives up after the deadline of member 1.
    store, failed, found_open = HashStore(), threading.Event(), threading.Event()

    def delay(operation: str, arguments: tuple[Any, ...]) -> None:
        if operation == "compare_set" and arguments[0].endswith("/0/0/1"):
            found_open.set()
            assert failed.wait(LONG)

    def first() -> None:
        assert found_open.wait(LONG)
        try:
            meet(store, "c", 0, 2, timeout=0.1, hello={})
        finally:
            failed.set()

    late = Watched(store, delay)
    results = outcomes([first, lambda: meet(late, "c", 1, 2, timeout=0.05, hello={})])  # type: ignore[arg-type]
    same_error(results, CommTimeoutError, [1])


def test_member_that_died_while_completing_is_named() -> None:
    store = HashStore()
    waiting, died = threading.Event(), threading.Event()

    def die(operation: str, arguments: tuple[Any, ...]) -> None:
        if operation == "multi_get":
            died.set()
            raise RuntimeError("connection lost")

    def last() -> Any:
        assert waiting.wait(LONG)
        return meet(Watched(store, die), "c", 1, 2, timeout=LONG, hello={})  # type: ignore[arg-type]

    def see(operation: str, arguments: tuple[Any, ...]) -> None:
        if operation == "check":
            waiting.set()
        if operation == "add" and arguments[0].endswith("/abandon"):  # the deadline has passed
            waiting.set()
            assert died.wait(LONG)

    first, second = outcomes(
        [lambda: meet(Watched(store, see), "c", 0, 2, timeout=0.2, hello={}), last]  # type: ignore[arg-type]
    )
    assert isinstance(second, BackendError)
    assert "connection lost" in second.message
    assert second.hint
    same_error([first], CommTimeoutError, [1])
    assert "stopped before it could answer" in first.message


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


def test_a_member_that_expects_fewer_reads_who_differs() -> None:
    differences = {"size": [("2", [[1, 1]]), ("3", [[0, 0], [2, 2]])]}
    text = json.dumps({"kind": "mismatch", "culprits": [[1, 1]], "differences": differences}).encode()
    error = error_of(read_failure(text, 2), "arrive", "c", 1, [0, 1])
    assert (type(error), error.culprits) == (MismatchError, (1,))
    assert "size is 2 on rank 1 and 3 on ranks 0, 2" in error.message
    with pytest.raises(ValueError, match="no range of 3 ranks"):
        read_failure(text.replace(b"[2, 2]", b"[2, 3]"), 2)


def test_mismatch_of_the_size_is_found_before_the_timeout() -> None:
    store = HashStore()

    def call(rank: int, size: int) -> Any:
        return meet(store, "c", rank, size, timeout=LONG, hello={})

    def misled() -> Any:
        store.wait(["unicomm/c/world/0/0/0", "unicomm/c/world/0/0/2"])
        return call(1, 2)

    with quick(10):
        results = outcomes([lambda: call(0, 3), misled, lambda: call(2, 3)])
    error = same_error(results, MismatchError, [1])
    assert re.search(r"size is 2 on rank 1 and 3 on rank(s 0, 2| 0)(,|;|$)", error.message)


def test_size_that_leaves_a_member_out_is_an_error_there() -> None:
    store = HashStore()

    def pair(rank: int) -> Any:
        store.wait(["unicomm/c/world/0/0/2"])
        return meet(store, "c", rank, 2, timeout=LONG, hello={})

    with quick(10):
        first, second, third = outcomes(
            [lambda: pair(0), lambda: pair(1), lambda: meet(store, "c", 2, 3, timeout=LONG, hello={})]
        )
    assert first.uid == second.uid
    same_error([third], MismatchError, [2])
    assert "size is 3 on rank 2 only" in third.message


def test_mismatch_explains_a_missing_member() -> None:
    store = HashStore()

    def waits_for_three() -> Any:
        store.wait(posts([1]))
        return meet(store, "c", 0, 3, timeout=0.2, hello={})

    # Rank 1 believes in a world of two: nobody is going to be the third.
    results = outcomes([waits_for_three, lambda: meet(store, "c", 1, 2, timeout=LONG, hello={})])
    same_error(results, MismatchError, [1])


def test_two_processes_with_one_rank(store: Any) -> None:
    # Rank 1 was given out twice and rank 2 not at all: no success, and no waiting for the timeout.
    with quick(10):
        results = meet_all(store, 3, ranks=[0, 1, 1])
    error = same_error(results, MismatchError, [1])
    assert error.message == "two processes call themselves rank 1"


def test_late_comer_hears_once_why_the_others_failed(store: Any) -> None:
    # All but a timeout would meet a late comer, too: it must not wait for those who have long given up.
    same_error(meet_all(store, 3, ranks=[1, 1]), MismatchError, [1])
    with quick(10):
        (late,) = meet_all(store, 3, ranks=[2])
    same_error([late], MismatchError, [1])
    others = outcomes([lambda: meet(store, "c", 0, 3, timeout=LONG, hello={})])
    same_error(others, MismatchError, [1])
    clean = meet_all(store, 3)
    assert len({m.uid for m in clean}) == 1
    close_all(clean)


def test_a_member_that_has_only_heard_why_does_not_differ() -> None:
    """Its post has no header. A member that is about to give up may still read that one."""
    store = HashStore()
    store.set(posts([1])[0], "f" * 16)
    (error,) = meet_all(store, 2, ranks=[0], timeout=1.0)
    assert type(error) is CommTimeoutError, repr(error)
    assert error.culprits == (1,)


def test_errors_name_global_ranks() -> None:
    (error,) = meet_all(HashStore(), 3, ranks=[1], timeout=0.02, labels=(7, 4, 5))
    same_error([error], CommTimeoutError, [7, 5])
    assert error.rank == 1
    assert "global ranks 5, 7 did not arrive within 0.02 s; global rank 4 did" in error.message


def test_member_missing_in_a_later_step(store: Any) -> None:
    members = meet_all(store, 3)

    def gives_up() -> Any:
        eventually(lambda: store.check(["unicomm/c/world/0/1/0"]))  # member 0 has reached the step
        members[1]._deadline = time.monotonic() + 0.4
        return members[1].exchange("addresses", b"")

    with quick(10):
        results = outcomes([lambda: members[0].exchange("addresses", b""), gives_up])
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
    error = same_error(outcomes(calls), MismatchError, [1])
    assert "tag is 'b' on rank 1 and 'a' on ranks 0, 2" in error.message


def test_abort_reaches_the_others_at_once(store: Any) -> None:
    members = meet_all(store, 3)

    def leave() -> None:
        with members[1]:
            raise OSError("no shared memory\nand a long tail")

    with quick(10):
        left, *others = outcomes(
            [leave, lambda: members[0].exchange("x", b""), lambda: members[2].exchange("x", b"")]
        )
    assert isinstance(left, OSError)
    error = same_error(others, PeerLostError, [1])
    assert error.message == "rank 1 left: OSError: no shared memory"
    close_all(members)


def test_a_member_that_leaves_because_others_have_aborted_blames_them() -> None:
    members = meet_all(HashStore(), 3)

    def leave() -> None:
        with members[1]:
            raise AbortedError("rank 7 aborted the communicator", culprits=[7])

    _, *others = outcomes([leave, *(partial(members[r].exchange, "x", b"") for r in (0, 2))])
    error = same_error(others, AbortedError, [7])
    assert error.message == "rank 7 aborted the communicator"
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
        results = exchange_all(members[1:], [b""] * 3)
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


def test_a_member_that_lost_the_store_for_a_moment_meets_at_its_next_attempt() -> None:
    """It finds its own post there. One member waits since before that attempt, and one comes after it."""
    store, lost, again = HashStore(), threading.Event(), threading.Event()

    def fail(operation: str, arguments: tuple[Any, ...]) -> None:
        if operation == "check" and not lost.is_set():
            lost.set()
            raise RuntimeError("recv failed")
        if operation == "add" and lost.is_set():
            again.set()  # its post is there

    def tries_again() -> Rendezvous:
        watched = Watched(store, fail)
        (error,) = meet_all(watched, 3, ranks=[0])
        assert isinstance(error, BackendError)
        while not store.check(["unicomm/c/world/0/0/1"]):
            time.sleep(0.01)
        return meet(watched, "c", 0, 3, timeout=LONG, hello={})

    def comes(rank: int, after: threading.Event) -> Rendezvous:
        after.wait(LONG)
        return meet(store, "c", rank, 3, timeout=LONG, hello={})

    members = outcomes([tries_again, partial(comes, 1, lost), partial(comes, 2, again)])
    assert len({member.uid for member in members}) == 1
    assert exchange_all(members, [b"0", b"1", b"2"]) == [[b"0", b"1", b"2"]] * 3
    close_all(members)
    close_all(meet_all(store, 3))


def test_a_member_that_comes_again_while_the_last_meeting_is_erased() -> None:
    """It read the number of the first meeting before that changed. Then it must not post there once more."""
    store = HashStore()
    again, erased = threading.Event(), threading.Event()

    def last(operation: str, arguments: tuple[Any, ...]) -> None:
        if operation == "compare_set" and arguments[1:] == (b"0", b"1"):  # the outcome is there
            again.wait(LONG)

    def comes_again(operation: str, arguments: tuple[Any, ...]) -> None:
        if operation == "compare_set" and arguments[0].endswith("0/0/result") and closed:
            again.set()
            erased.wait(LONG)

    closed: list[int] = []

    def first() -> Rendezvous:
        its_store = Watched(store, comes_again)
        meet(its_store, "c", 0, 2, timeout=LONG, hello={}).close()
        closed.append(0)
        return meet(its_store, "c", 0, 2, timeout=LONG, hello={})

    def second() -> Rendezvous:
        eventually(lambda: store.check(posts([0])))
        meet(Watched(store, last), "c", 1, 2, timeout=LONG, hello={}).close()
        erased.set()
        return meet(store, "c", 1, 2, timeout=LONG, hello={})

    members = outcomes([first, second])
    assert again.is_set()
    assert all(isinstance(member, Rendezvous) for member in members), members
    close_all(members)
    assert store.num_keys() == 1


def test_a_member_that_reads_the_posts_while_another_one_completes() -> None:
    """Rank 0, which is counted twice, takes itself for the last one, as rank 2 does."""
    store, over = HashStore(), threading.Barrier(3)
    lost, again, there, reads, raced = (threading.Event() for _ in range(5))

    def first(operation: str, arguments: tuple[Any, ...]) -> None:
        if operation == "check" and not lost.is_set():
            lost.set()
            raise RuntimeError("recv failed")
        if operation == "add" and lost.is_set():
            again.set()
            there.wait(LONG)  # all posts are there
        if operation == "multi_get" and not reads.is_set():
            reads.set()
            over.wait(LONG)  # the others have met
            raced.set()

    def third(operation: str, arguments: tuple[Any, ...]) -> None:
        if operation == "add":
            there.set()
            reads.wait(LONG)

    def counted_twice() -> Rendezvous:
        watched = Watched(store, first)
        (error,) = meet_all(watched, 3, ranks=[0])
        assert isinstance(error, BackendError)
        while not store.check(["unicomm/c/world/0/0/1"]):
            time.sleep(0.01)
        return meet(watched, "c", 0, 3, timeout=LONG, hello={})

    def comes(rank: int, after: threading.Event, its_store: Any) -> Rendezvous:
        after.wait(LONG)
        member = meet(its_store, "c", rank, 3, timeout=LONG, hello={})
        over.wait(LONG)
        return member

    members = outcomes(
        [counted_twice, partial(comes, 1, lost, store), partial(comes, 2, again, Watched(store, third))]
    )
    assert raced.is_set()
    assert len({member.uid for member in members}) == 1
    assert exchange_all(members, [b"0", b"1", b"2"]) == [[b"0", b"1", b"2"]] * 3
    close_all(members)
    assert store.num_keys() == 1


def test_all_or_none_in_any_order_of_events() -> None:
    # Deadlines of a few milliseconds, delays between any two store operations, members that leave: whatever
    # happens, a meeting and an exchange succeed on all members or on none, and peace follows.
    size, rounds = 3, 40
    store = HashStore()
    successes: list[set[str]] = [set() for _ in range(size)]

    def live(rank: int) -> None:
        choice = random.Random(rank)

        def delay(operation: str, arguments: tuple[Any, ...]) -> None:
            if choice.random() < 0.1:
                time.sleep(choice.random() * 0.002)

        for _ in range(rounds):
            with contextlib.suppress(CommError):
                limit = 0.001 + choice.random() * 0.02
                hello = {"backend": "shm" if choice.random() < 0.95 else "gloo"}
                member = meet(Watched(store, delay), "c", rank, size, timeout=limit, hello=hello)  # type: ignore[arg-type]
                with member:
                    successes[rank].add(member.uid)
                    if choice.random() < 0.1:
                        member.abort("enough")
                    assert member.exchange("x", b"%d" % rank) == [b"0", b"1", b"2"]
                    successes[rank].add(f"exchange in {member.uid}")

    assert outcomes([partial(live, rank) for rank in range(size)]) == [None] * size
    assert successes[0] == successes[1] == successes[2]
    # Who was not there when the others disagreed for the last time hears of it now, and they wait in vain.
    first = meet_all(store, size, timeout=10.0)
    if not all(isinstance(m, Rendezvous) for m in first):
        assert any(isinstance(m, MismatchError) for m in first), first
        assert all(isinstance(m, (MismatchError, CommTimeoutError)) for m in first), first
    close_all([m for m in first if isinstance(m, Rendezvous)])
    members = meet_all(store, size)
    assert all(isinstance(m, Rendezvous) for m in members), members
    assert len({m.uid for m in members}) == 1
    close_all(members)
    calls = [f"unicomm-waits-in/{rank}" for rank in range(size)]  # stay after a failure
    assert store.num_keys() == 1 + sum(store.check([call]) for call in calls)


def _lost_peer() -> None:
    raise PeerLostError("rank 2 is gone", culprits=[2], dead=[2])


def test_no_member_succeeds_after_one_whose_peer_is_gone():
    """The last member comes after another one has raised: that one has put its error into the store."""
    store = HashStore()
    with pytest.raises(PeerLostError, match="rank 2 is gone"):
        meet(store, "c", 0, 2, timeout=LONG, hello={}, check_peers=_lost_peer)
    with pytest.raises(PeerLostError, match="rank 2 is gone") as raised:
        meet(store, "c", 1, 2, timeout=LONG, hello={})
    assert raised.value.culprits == (2,)  # and not the one that has told it


def test_a_member_raises_what_its_own_connections_tell():
    """Another member has left because of a lost peer, of which this one hears a little later."""
    looks = iter([None, None])

    def check_peers() -> None:
        if next(looks, "lost") == "lost":
            _lost_peer()

    store = HashStore()
    rendezvous = meet_pair(store)
    rendezvous._check_peers = check_peers
    with pytest.raises(PeerLostError) as raised:
        rendezvous.exchange("a", b"")
    rendezvous.close()
    assert raised.value.culprits == (2,)


def meet_pair(store: Any) -> Rendezvous:
    """Member 1 of a meeting whose member 0 has left its next step because of a lost peer."""
    members = meet_all(store, 2)
    members[0]._check_peers = _lost_peer
    with pytest.raises(PeerLostError):
        members[0].exchange("a", b"")
    return members[1]


def test_a_member_with_the_outcome_needs_the_store_no_longer(monkeypatch):
    """The member that holds the store has read the outcome, gone on, and ended the store."""
    members = meet_all(HashStore(), 2)

    def gone(keys: Any) -> None:
        raise BackendError("the store failed")

    for member in members:
        monkeypatch.setattr(member._client, "delete", gone)
    results = outcomes([partial(member.exchange, "a", b"x") for member in members])
    assert results == [[b"x", b"x"]] * 2
    assert all(member._failure is None for member in members)


def test_a_loss_that_becomes_known_soon_is_waited_for():
    """After a link was cut, the connections to a host end one after the other, the store's first."""
    looks = iter([None] * 3)

    def check_peers() -> None:
        if next(looks, "lost") == "lost":
            _lost_peer()

    with pytest.raises(PeerLostError):
        await_cause(check_peers, LONG)
    await_cause(lambda: None, 0.0)
