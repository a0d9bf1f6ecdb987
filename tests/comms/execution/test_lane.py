"""Messages of a process group: side by side, over one by one, in their place between other operations."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from tests.comms import inside
from tests.comms.calls import check_sum
from tests.comms.inside import post
from unicomm import (
    AbortedError,
    CommTimeoutError,
    Communicator,
    InvalidArgumentError,
    MismatchError,
    NotReadyError,
    PeerLostError,
    ReduceOp,
    UnsupportedError,
    WorkStatus,
    new_comm,
)
from unicomm.comms.execution import message_queue as lane
from unicomm.comms.execution.message_queue import ANY_RANK
from unicomm.testing import run_ranks

LARGE = 3_000_000  # elements: more than any transport holds
both_backends = pytest.mark.parametrize("backend", ["shm", "gloo", "tcp"])


def send(comm: Communicator, tensor: torch.Tensor, dst: int):
    return post(comm, "send", tensor, dst, None)


def recv(comm: Communicator, tensor: torch.Tensor, src: int = ANY_RANK):
    return post(comm, "recv", tensor, src, None)


@both_backends
def test_a_receive_joins_sends_that_are_under_way(backend, eventually):
    """Everybody is stuck in a send when the receives are called that end it, of however large a ring."""

    def program(comm: Communicator) -> None:
        me, n = comm.get_rank(), comm.get_size()
        out = torch.empty(LARGE)
        first = send(comm, torch.full((LARGE,), float(me)), (me + 1) % n)
        # By now its receiver may have come and gone.
        eventually(lambda: first.status is not WorkStatus.NOT_STARTED)
        second = recv(comm, out, (me - 1) % n)
        first.wait()
        second.wait()
        assert bool((out == (me - 1) % n).all())

    run_ranks(program, 3, backend=backend)


@both_backends
def test_each_is_over_when_it_is(backend, raised):
    """Waiting for one message does not wait for another, whether the worker runs them or who waits."""
    go = threading.Event()

    def program(comm: Communicator) -> None:
        if comm.get_rank() == 0:
            early, late = torch.zeros(2), torch.zeros(3)
            second, first = recv(comm, late, 1), recv(comm, early, 2)
            first.wait()
            assert early.tolist() == [2.0, 2.0]
            assert not second.is_completed()  # which has the worker run it
            assert type(raised(second.wait, 0.01)) is CommTimeoutError
            go.set()
            second.wait()
            assert late.tolist() == [1.0] * 3
        elif comm.get_rank() == 1:
            assert go.wait(20)
            send(comm, torch.ones(3), 0).wait()
        else:
            send(comm, torch.full((2,), 2.0), 0).wait()

    run_ranks(program, 3, backend=backend)


@both_backends
def test_nobody_has_to_wait(backend, eventually):
    """A message that nobody waits for goes out all the same."""
    there = threading.Event()

    def program(comm: Communicator) -> None:
        if comm.get_rank() == 0:
            send(comm, torch.ones(3), 1)
            assert there.wait(20)
        else:
            out, got = torch.zeros(3), []
            recv(comm, out, 0).add_done_callback(lambda work: got.append(work.status))
            eventually(lambda: got)
            assert got == [WorkStatus.COMPLETED]
            assert out.tolist() == [1.0] * 3
            there.set()

    run_ranks(program, 2, backend=backend)


@both_backends
def test_waiting_for_one_message_in_two_threads(backend):
    def program(comm: Communicator) -> None:
        if comm.get_rank() == 0:
            outs = [torch.zeros(2), torch.zeros(2)]
            works = [recv(comm, out, 1) for out in outs]
            threads = [threading.Thread(target=w.wait, args=(20,)) for w in reversed(works)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(20)
                assert not thread.is_alive()
            assert torch.stack(outs).tolist() == [[1.0, 1.0], [2.0, 2.0]]
        else:
            for value in (1.0, 2.0):
                send(comm, torch.full((2,), value), 0).wait()

    run_ranks(program, 2, backend=backend)


@both_backends
def test_any_rank(backend):
    """Receives from any rank, several at once, between sends and beside those from a certain rank."""

    def program(comm: Communicator) -> None:
        me, n = comm.get_rank(), comm.get_size()
        works = [send(comm, torch.full((2,), float(me)), r) for r in range(n) if r != me]
        outs = [torch.zeros(2) for _ in range(n - 1)]
        taken = [recv(comm, out) for out in outs]
        for work in [*works, *taken]:
            work.wait()
        assert sorted(w.peer for w in taken) == [r for r in range(n) if r != me]
        for work, out in zip(taken, outs, strict=True):
            assert out.tolist() == [float(work.peer)] * 2
        check_sum(comm)

    run_ranks(program, 3, backend=backend)


def test_messages_go_to_receives_in_the_order_of_the_calls():
    def program(comm: Communicator) -> None:
        if comm.get_rank() == 0:
            works = [send(comm, torch.full((i + 1,), float(i)), 1) for i in range(4)]
        else:
            outs = [torch.zeros(i + 1) for i in range(4)]
            works = [recv(comm, out, ANY_RANK if i % 2 else 0) for i, out in enumerate(outs)]
        for work in works:
            work.wait()
        if comm.get_rank() == 1:
            assert [out.tolist() for out in outs] == [[float(i)] * (i + 1) for i in range(4)]

    run_ranks(program, 2)


@both_backends
def test_other_operations_keep_their_place(backend):
    """A collective runs after the messages that were called before it and before those that come later."""

    def program(comm: Communicator) -> None:
        me, x, out = comm.get_rank(), torch.ones(4), torch.zeros(4)
        a = recv(comm, out, 1) if me == 0 else send(comm, torch.full((4,), 5.0), 0)
        comm.all_reduce(out if me == 0 else x * 0, ReduceOp.SUM, False)
        assert a.is_completed()
        assert out.tolist() == ([5.0] * 4 if me == 0 else [0.0] * 4)
        works = [comm.all_reduce(x, ReduceOp.SUM, True)]
        works += [recv(comm, out, 1) if me == 0 else send(comm, x, 0)]
        works += [comm.all_reduce(out if me == 0 else x, ReduceOp.SUM, True)]
        for work in reversed(works):
            work.wait()
        assert (out if me == 0 else x).tolist() == [4.0] * 4

    run_ranks(program, 2, backend=backend)


def test_the_fast_path_is_back_afterwards():
    def program(comm: Communicator) -> None:
        me, out = comm.get_rank(), torch.zeros(4)
        (recv(comm, out, 1) if me == 0 else send(comm, torch.ones(4), 0)).wait()
        assert inside.fast_path(comm).all_reduce(out, ReduceOp.SUM, False, None, None).seq == 1

    run_ranks(program, 2)


def test_a_refused_message_is_its_own_trouble(raised):
    def program(comm: Communicator) -> None:
        if comm.get_rank() == 0:
            works = [send(comm, torch.ones(n), 1) for n in (2, LARGE, 4)]
        else:
            works = [recv(comm, torch.zeros(n), 0) for n in (2, 5, 4)]
        errors = [raised(w.wait) if i == 1 else w.wait() for i, w in enumerate(works)]
        assert errors[0] is errors[2] is None
        assert type(errors[1]) is MismatchError
        assert errors[1].seq == 2
        check_sum(comm)

    run_ranks(program, 2)


@both_backends
def test_callbacks(backend, raised):
    """A callback may send the next message; it must not wait for one that its thread has to move."""

    called = threading.Event()

    def program(comm: Communicator) -> None:
        if comm.get_rank() == 1:
            send(comm, torch.ones(2), 0).wait()
            assert called.wait(20)
            send(comm, torch.ones(3), 0)
            send(comm, torch.ones(4), 0)
            return
        seen, tensors = [], [torch.zeros(n) for n in (2, 3, 4)]

        def callback(_):
            seen.append(raised(second.wait))
            seen.append(recv(comm, tensors[2], 1))
            called.set()

        first, second = recv(comm, tensors[0], 1), recv(comm, tensors[1], 1)
        first.add_done_callback(callback)
        first.wait()
        second.wait()
        assert type(seen[0]) is NotReadyError
        seen[1].wait()
        assert [t.tolist() for t in tensors] == [[1.0] * n for n in (2, 3, 4)]

    run_ranks(program, 2, backend=backend)


def test_bad_arguments_are_refused_before_anything_happens(raised):
    def program(comm: Communicator) -> None:
        assert type(raised(send, comm, torch.ones(2), comm.get_rank())) is InvalidArgumentError
        assert type(raised(send, comm, torch.ones(2), 7)) is InvalidArgumentError
        assert type(raised(send, comm, torch.ones(2), ANY_RANK)) is InvalidArgumentError
        assert type(raised(recv, comm, torch.ones(2, 2).T[:1])) is InvalidArgumentError
        assert inside.executor(comm).messages is None
        check_sum(comm)

    run_ranks(program, 2)


def test_only_some_backends_receive_from_any_rank(raised):
    with new_comm("fake", torch.device("cpu"), rank=0, size=4) as comm:
        send(comm, torch.ones(2), 1).wait()
        assert type(raised(recv, comm, torch.ones(2))) is UnsupportedError


@both_backends
def test_a_deadline_ends_all_of_them(backend, raised):
    def program(comm: Communicator) -> list[type]:
        if comm.get_rank() == 1:
            finished.wait(20)
            return []
        works = [post(comm, "recv", torch.zeros(2), 1, 0.2), recv(comm, torch.zeros(3), 1)]
        errors = [raised(w.wait) for w in works]
        assert errors[0].op == "recv"
        finished.set()
        return [type(e) for e in [*errors, raised(comm.barrier, False)]]

    finished = threading.Event()
    assert run_ranks(program, 2, backend=backend)[0] == [CommTimeoutError] * 3


def test_a_peer_that_leaves_is_named(raised):
    def program(comm: Communicator) -> None:
        if comm.get_rank() == 0:
            errors = [raised(w.wait) for w in (recv(comm, torch.zeros(2), 1), recv(comm, torch.zeros(2), 2))]
            assert [type(e) for e in errors] == [PeerLostError] * 2
            assert list(errors[0].culprits) == [1]
            gone.set()
        elif comm.get_rank() == 2:
            assert gone.wait(20)

    gone = threading.Event()
    run_ranks(program, 3)


def test_abort_ends_them(raised, eventually):
    def program(comm: Communicator) -> None:
        if comm.get_rank() == 0:
            work = recv(comm, torch.zeros(2), 1)
            eventually(lambda: work.status is WorkStatus.INPROGRESS)
            comm.abort()
            assert type(raised(work.wait)) is AbortedError
            assert type(raised(recv, comm, torch.zeros(2), 1)) is AbortedError
        else:
            assert type(raised(recv(comm, torch.zeros(2), 0).wait)) is AbortedError

    run_ranks(program, 2)


def test_finalize_waits_for_them_or_says_so(raised):
    def program(comm: Communicator) -> None:
        if comm.get_rank() == 0:
            out = torch.zeros(2)
            work = recv(comm, out, 1)
            comm.finalize()
            assert work.is_completed()
            assert out.tolist() == [1.0, 1.0]
        else:
            send(comm, torch.ones(2), 0)
            comm.finalize()

    def stuck(comm: Communicator) -> None:
        if comm.get_rank() == 0:
            work = recv(comm, torch.zeros(2), 1)
            error = raised(comm.finalize, 0.1)
            assert type(error) is CommTimeoutError
            assert "send/recv" in str(error)
            assert type(raised(work.wait)) is AbortedError
            over.set()
        else:
            assert over.wait(20)

    run_ranks(program, 2)
    over = threading.Event()
    run_ranks(stuck, 2)


def test_ranks_that_begin_at_once_share_one_watcher(monkeypatch):
    """Of two, one took the lanes that the other had counted, and ended by an IndexError."""
    made = []

    class SlowToMake(threading.Thread):
        def __init__(self, *args, **options) -> None:
            made.append(self)
            time.sleep(0.05)
            super().__init__(*args, **options)

        def start(self) -> None:
            pass

    watcher = lane._HandOver()
    callers = [threading.Thread(target=watcher._rouse) for _ in range(8)]
    monkeypatch.setattr(lane.threading, "Thread", SlowToMake)
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(made) == 1


def test_a_lane_that_finds_no_thread_does_not_end_the_others(monkeypatch, raised, eventually):
    def no_thread(*_) -> None:
        raise RuntimeError("can't start new thread")

    def without(comm: Communicator) -> None:
        if comm.get_rank() == 0:
            with monkeypatch.context() as patch:
                patch.setattr(inside.executor(comm), "submit", no_thread)
                lost = recv(comm, torch.zeros(2), 1)
                eventually(lambda: lost.status is WorkStatus.ERROR)
            assert "can't start new thread" in str(raised(lost.wait))

    def program(comm: Communicator) -> None:
        if comm.get_rank() == 0:
            out = torch.zeros(2)
            work = recv(comm, out, 1)
            eventually(lambda: work.status is WorkStatus.COMPLETED)  # which leaves it to the watcher
            assert out.tolist() == [1.0, 1.0]
        else:
            send(comm, torch.ones(2), 0).wait()

    run_ranks(without, 2)
    run_ranks(program, 2)


def test_without_a_watcher_messages_go_to_the_worker(monkeypatch):
    """A watcher that could not start was taken for one: what nobody waited for was never sent."""

    def no_memory(_) -> None:
        raise OSError("Cannot allocate memory")

    watcher, arrived = lane._HandOver(), threading.Event()
    monkeypatch.setattr(lane, "_hand_over", watcher)

    def program(comm: Communicator) -> None:
        if comm.get_rank() == 0:
            with monkeypatch.context() as patch:
                patch.setattr(lane, "start", no_memory)
                sent = send(comm, torch.ones(2), 1)
            assert arrived.wait(30)
            sent.wait()
            send(comm, torch.ones(2), 1).wait()
        else:
            for _ in range(2):
                out = torch.zeros(2)
                recv(comm, out, 0).wait()
                assert out.tolist() == [1.0, 1.0]
                arrived.set()

    run_ranks(program, 2, backend="gloo")
    assert watcher._thread is not None  # of the later messages
