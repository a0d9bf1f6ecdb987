"""Messages within and between hosts, together: their order for each pair, lanes, sizes and failures."""

import threading

import pytest
import torch

import unicomm
from unicomm.backends.hosts.messages import BothExchange
from unicomm.c10d.process_group import UnicommProcessGroup
from unicomm.comms.backend import Completed, Exchange
from unicomm.comms.operations.call import Message
from unicomm.testing import run_ranks

pytestmark = pytest.mark.usefixtures("between")

LAYOUT = {"hosts": "a,b,a,b"}
N = 4


def ranks(program, **more):
    return run_ranks(program, N, backend="auto", hints=LAYOUT, **more)


@pytest.mark.parametrize("count", [1, 300_000])
def test_order_for_each_pair(count):
    """A batch with several messages to and from everyone arrives in order, whichever way each goes."""

    def program(comm):
        me, batch, got = comm.get_rank(), comm.batch_op_create(), []
        for turn in range(3):
            for other in range(N):
                if other != me:
                    batch.send(torch.full((count,), float(10 * me + turn)), other)
                    got.append((torch.zeros(count), float(10 * other + turn)))
                    batch.recv(got[-1][0], other)
        batch.issue(False)
        assert all(torch.all(tensor == expected) for tensor, expected in got)

    ranks(program)


def test_lane_runs_near_and_far_messages_side_by_side():
    """Receives that are posted first finish last: none holds up another, whichever way it goes."""

    def program(comm):
        me, group = comm.get_rank(), UnicommProcessGroup(comm)
        if me == 0:
            got = {r: torch.zeros(5) for r in (1, 2, 3)}
            works = {r: group.recv([got[r]], r, 0) for r in (1, 2, 3)}
            for r in (3, 2, 1):  # the near one, rank 2, in the middle
                group.send([torch.ones(1)], r, 0).wait()
                works[r].wait()
                assert torch.all(got[r] == r)
        else:
            word = torch.zeros(1)
            group.recv([word], 0, 0).wait()
            group.send([torch.full((5,), float(me))], 0, 0).wait()
        comm.barrier(False)

    ranks(program)


@pytest.mark.parametrize("is_far", [False, True])
def test_an_interrupt_while_a_part_opens_is_kept(is_far):
    """Else a message that is posted just then waits until an earlier one is over, which may wait for it."""

    class Part(Exchange):
        def __init__(self):
            both.interrupt()  # as by another thread that posts a message now
            self.runs = 0

        def add(self, messages):
            pass

        def run(self, timeout, limit, given) -> list[Completed]:
            self.runs += 1
            return []

    opened = []

    def part():
        opened.append(Part())
        return opened[0]

    message = Message(False, 1, torch.zeros(1), 0)
    both = BothExchange(
        near=(part, None),
        far=(part, None),
        place=lambda message: (is_far, message),
        limited=lambda given: None,
        counted=lambda message: None,
        beside=lambda messages: None,
        patience=float,
    )
    both.add([message])
    assert both.run(60, 60, 60) == []
    assert [p.runs for p in opened] == [0], "the interrupt was lost"
    both.run(60, 60, 60)
    assert [p.runs for p in opened] == [1]


def test_lane_of_many():
    def program(comm):
        me, group = comm.get_rank(), UnicommProcessGroup(comm)
        got = [(torch.zeros(1000), r, turn) for turn in range(5) for r in range(N) if r != me]
        works = [group.recv([tensor], r, 0) for tensor, r, _ in got]
        works += [group.send([torch.full((1000,), float(10 * me + turn))], r, 0) for _, r, turn in got]
        for work in reversed(works):
            work.wait()
        assert all(torch.all(tensor == 10 * r + turn) for tensor, r, turn in got)

    ranks(program)


def test_a_lane_has_left_when_the_communicator_ends():
    """Over UCX, its thread would else use a worker that is gone: a crash in about every fifteenth turn."""

    def program(comm):
        me, group = comm.get_rank(), UnicommProcessGroup(comm)
        others = [r for r in range(N) if r != me] * 5
        works = [group.recv([torch.zeros(1000)], r, 0) for r in others]
        works += [group.send([torch.ones(1000)], r, 0) for r in others]
        for work in reversed(works):
            work.wait()

    for _ in range(10):
        ranks(program)


@pytest.mark.parametrize("peer", [1, 2])
def test_a_message_that_does_not_come(peer):
    over = threading.Barrier(N)

    def program(comm):
        comm.barrier(False)
        said = None
        if comm.get_rank() == 0:
            with pytest.raises(unicomm.CommTimeoutError) as caught:
                comm.recv(torch.zeros(3), peer, False, timeout=0.5)
            said = caught.value.culprits
        over.wait(60)
        return said

    assert ranks(program)[0] == (peer,)


def test_lane_says_who_is_late():
    over = threading.Barrier(N)

    def program(comm):
        comm.barrier(False)
        said = None
        if comm.get_rank() == 0:
            comm.set_timeout(0.5)
            group = UnicommProcessGroup(comm)
            works = [group.recv([torch.zeros(3)], peer, 0) for peer in (1, 2)]
            with pytest.raises(unicomm.CommTimeoutError) as caught:
                works[0].wait()
            said = caught.value
        over.wait(60)
        return said

    said = ranks(program)[0]
    assert said.culprits in ((1,), (2,), (1, 2))
    assert said.message.startswith("timed out after 0.5 s: "), said


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("late", [1, 2])
def test_who_sends_the_message_that_is_overdue_is_late(late, first):
    """Of two messages, one within the host and one between hosts: the other one has more time."""
    over = threading.Barrier(N)

    def program(comm):
        comm.barrier(False)
        said = None
        if comm.get_rank() == 0:
            group, works = UnicommProcessGroup(comm), {}
            for peer, seconds in [(late, 0.5), (3 - late, 60)][:: 1 if first else -1]:
                comm.set_timeout(seconds)
                works[peer] = group.recv([torch.zeros(3)], peer, 0)
            with pytest.raises(unicomm.CommTimeoutError) as caught:
                works[late].wait()
            said = caught.value.culprits
        over.wait(60)
        return said

    assert ranks(program)[0] == (late,)


def test_sizes_of_near_messages_are_compared():
    def program(comm):
        if comm.get_rank() == 0:
            comm.send(torch.ones(3), 2, False)
        if comm.get_rank() == 2:
            with pytest.raises(unicomm.MismatchError, match=r"rank 2: recv\(float32\[4\], from rank 0\)"):
                comm.recv(torch.ones(4), 0, False)
        comm.barrier(False)

    ranks(program)


def test_any_source_is_refused():
    def program(comm):
        with pytest.raises(unicomm.UnsupportedError, match="cannot receive from any rank"):
            UnicommProcessGroup(comm).recv_anysource([torch.zeros(1)], 0)

    ranks(program)
