"""reconfigure: attempts that fail."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from tests.comms import inside
from tests.comms.membership.casts import LONG
from unicomm import (
    AbortedError,
    CommTimeoutError,
    Communicator,
    MismatchError,
    NotReadyError,
    PeerLostError,
    ReduceOp,
)
from unicomm.comms.execution import message_queue
from unicomm.comms.membership.reconfigure_session import ReconfigureSession

SUM = ReduceOp.SUM
REAL = ["shm", "gloo", "tcp"]


@pytest.mark.parametrize("there", [[0, 2], [2], [1, 2]], ids=str)
def test_who_did_not_come_is_named(there, cast, raised):
    ranks = cast("shm", 4)
    ranks.become([0, 1, 2])
    handles = ranks.handles
    errors = ranks.play(there, lambda comm, _: raised(comm.reconfigure, 7, handles, 1.5))
    for i, error in errors.items():
        assert type(error) is CommTimeoutError
        assert error.culprits == tuple(r for r in range(4) if r not in there), error
        assert (error.op, error.comm, error.rank) == ("reconfigure", "cast", i)
        after = raised(ranks.comms[i].barrier, False)
        assert type(after) is CommTimeoutError
        assert "the last reconfiguration failed" in after.message
        assert raised(ranks.comms[i].reconfigure, 7, handles).message.startswith("uuid=7 was used")
    ranks.become([3, 2, 1, 0])


@pytest.mark.parametrize("backend", REAL)
def test_messages_posted_at_the_last_moment_end(backend, cast, monkeypatch):
    """Another thread posts one when the epoch's messages have been ended, before it refuses more."""
    monkeypatch.setattr(message_queue._hand_over, "watch", lambda queue: None)  # too late for the epoch
    ranks = cast(backend, 2)
    ranks.become([0, 1])
    engine, works = inside.engine(ranks.comms[0]), []
    retire = engine.retire

    def post_and_retire(reason: Any) -> None:
        receive = threading.Thread(
            target=lambda: works.append(inside.post(ranks.comms[0], "recv", torch.zeros(3), 1))
        )
        receive.start()
        receive.join(LONG)
        retire(reason)

    engine.retire = post_and_retire
    ranks.become([1, 0])
    (work,) = works
    assert work.is_completed()
    with pytest.raises(AbortedError):
        work.wait()


def test_attempts_do_not_mix(cast, raised):
    """Two ranks wait in one attempt for a third, which goes on in another with one of its own."""
    ranks = cast("gloo", 4)

    def act(comm: Communicator, i: int) -> Any:
        if i < 2:
            return raised(comm.reconfigure, 1, ranks.handles[:3], 2.0)
        comm.reconfigure(2, ranks.handles[2:])
        ranks.check(comm, i, [2, 3])
        return None

    found = ranks.play([0, 1, 2, 3], act)
    assert found[2] is found[3] is None, found
    for error in (found[0], found[1]):
        assert type(error) is CommTimeoutError
        assert error.culprits == (2,)


def test_the_lists_differ(cast, raised):
    ranks = cast("shm", 3)
    lists = {0: ranks.handles, 1: ranks.handles, 2: [ranks.handles[i] for i in (0, 2, 1)]}
    errors = ranks.play([0, 1, 2], lambda comm, i: raised(comm.reconfigure, 1, lists[i]))
    assert {type(error) for error in errors.values()} == {MismatchError}
    assert "different init_handles" in errors[0].message
    ranks.become([0, 1, 2])


def test_the_hints_differ(cast, raised):
    ranks = cast("shm", 2)
    errors = ranks.play(
        [0, 1],
        lambda comm, i: raised(comm.reconfigure, 1, ranks.handles, None, {"slot_bytes": f"{8 << i}K"}),
    )
    assert {type(error) for error in errors.values()} == {MismatchError}
    ranks.become([0, 1])


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("backend", REAL)
def test_a_rank_gives_up_meanwhile(backend, victim, cast, raised):
    """The others are told who, and succeed in the next attempt."""
    ranks = cast(backend, 4)
    ranks.become([0, 1, 2])
    handles = ranks.handles  # of whom number 3 does not come
    entered = threading.Barrier(4)

    def act(comm: Communicator, i: int) -> Any:
        if i == 3:
            entered.wait(LONG)
            while ranks.comms[victim]._dynamic.session is None:
                pass
            ranks.comms[victim].abort()
            return None
        entered.wait(LONG)
        return raised(comm.reconfigure, 7, handles, LONG)

    errors = ranks.play([0, 1, 2, 3], act)
    assert type(errors[victim]) is AbortedError
    for i in {0, 1, 2} - {victim}:
        assert type(errors[i]) in (AbortedError, PeerLostError), errors[i]
        assert errors[i].culprits == (victim,)
    ranks.become([1, 0, 2, 3])


def test_who_is_gone_is_known_at_once(cast, raised):
    ranks = cast("shm", 3)
    for gone, left in ((1, [0, 2]), (0, [2])):
        ranks.comms[gone].finalize()
        errors = ranks.play(left, lambda comm, _, g=gone: raised(comm.reconfigure, 10 + g, ranks.handles))
        for error in errors.values():
            assert type(error) is PeerLostError
            assert gone in error.dead
    ranks.become([2])


def test_one_call_at_a_time(cast, raised):
    ranks = cast("shm", 2)
    comm = ranks.comms[0]
    inside: list[Any] = []

    def again(name: Any, *_: Any) -> None:
        if name.value == "reconfigure":
            inside.append(raised(comm.reconfigure, 8, ranks.handles))

    with comm.register_pre_hook(again):
        ranks.become([0, 1])
    assert {type(error) for error in inside} == {NotReadyError}
    assert "another thread" in inside[0].message


def test_finalize_ends_an_attempt(cast, raised):
    ranks = cast("shm", 2)

    def act(comm: Communicator, i: int) -> Any:
        if i == 0:
            return raised(comm.reconfigure, 1, ranks.handles)
        while ranks.comms[0]._dynamic.session is None:
            pass
        return ranks.comms[0].finalize()

    assert type(ranks.play([0, 1], act)[0]) is AbortedError


def test_a_hook_that_refuses(cast):
    """Nothing has happened by then."""
    ranks = cast("shm", 2)
    ranks.become([0, 1])

    def refuse(name: Any, *_: Any) -> None:
        if name.value == "reconfigure":
            raise ValueError("not now")

    handle = ranks.comms[0].register_pre_hook(refuse)
    with pytest.raises(ValueError, match="not now"):
        ranks.comms[0].reconfigure(7, ranks.handles)
    handle.remove()
    ranks.play([0, 1], lambda comm, _: comm.barrier(False))


def test_a_first_rank_that_does_not_invite_is_named(cast, raised, monkeypatch):
    """All ranks have come, but the first one has not invited the other by its deadline."""
    ranks, invite, late = cast("gloo", 2), ReconfigureSession._invite, threading.Event()

    def invite_late(session: ReconfigureSession) -> Any:
        assert late.wait(LONG)
        return invite(session)

    def play(comm: Communicator, i: int) -> Any:
        try:
            return raised(comm.reconfigure, 7, ranks.handles, LONG if i == 0 else 1.0)
        finally:
            if i == 1:
                late.set()

    monkeypatch.setattr(ReconfigureSession, "_invite", invite_late)
    error = ranks.play([0, 1], play)[1]
    assert type(error) is CommTimeoutError
    assert error.culprits == (0,), error
    assert "rank 0 did not come" in error.message
