"""Long messages of ranks that read each other's memory where it lies."""

from __future__ import annotations

import os
import resource
import threading

import pytest
import torch

from tests.comms import inside
from tests.eventually import eventually
from unicomm import CommError, InvalidArgumentError, MismatchError, WorkStatus, _core, new_comm
from unicomm.testing import run_ranks

MIB = 1 << 20
READ = {"one_copy": "on"}


def read_in_place(comm):
    return inside.engine(comm).backend._group.direct_operations


def test_a_process_proves_that_it_can_be_read():
    at, word = _core.proof_of_reading()
    assert _core.can_read(os.getpid(), (at, word))
    assert not _core.can_read(os.getpid(), (at, word ^ 2))
    assert not _core.can_read(os.getpid(), (0, word))
    assert not _core.can_read(0x3FFFFFFF, (at, word))


@pytest.mark.parametrize("hints", [READ, {"one_copy": "off"}, {}])
@pytest.mark.parametrize("ranks", [2, 3])
def test_long_messages_are_read_if_wanted(hints, ranks):
    def program(comm):
        me = comm.get_rank()
        x, y = torch.full((MIB,), me, dtype=torch.int32), torch.zeros(MIB, dtype=torch.int32)
        batch = comm.batch_op_create().send(x, (me + 1) % ranks).recv(y, (me - 1) % ranks)
        batch.issue()
        assert (y == (me - 1) % ranks).all()
        short = torch.zeros(1000)
        comm.batch_op_create().send(short, (me + 1) % ranks).recv(short.clone(), (me - 1) % ranks).issue()
        return read_in_place(comm)

    assert run_ranks(program, ranks, hints=hints) == [int(hints == READ)] * ranks


def test_messages_of_others_do_not_wake_a_rank_that_waits():
    messages = 5000

    def program(comm):
        x = torch.zeros(1)
        if comm.get_rank() == 2:
            before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
            comm.barrier(False)
            return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before
        for _ in range(messages):
            for sender in (0, 1):
                if comm.get_rank() == sender:
                    comm.send(x, 1 - sender, False)
                else:
                    comm.recv(x, sender, False)
        comm.barrier(False)
        return 0

    assert run_ranks(program, 3)[2] < messages / 10


def test_a_hint_that_is_none_is_refused():
    with pytest.raises(InvalidArgumentError, match="one_copy"):
        new_comm("shm", torch.device("cpu"), hints={"one_copy": "perhaps"})


def test_messages_that_run_side_by_side_are_read_into_the_tensors_with_their_tags():
    """One that arrives before its receive is read into memory of its own."""

    def program(comm):
        peer = 1 - comm.get_rank()
        sent = [torch.full((MIB,), tag, dtype=torch.int32) for tag in range(3)]
        got = [torch.zeros(MIB, dtype=torch.int32) for _ in sent]
        engine, post = inside.engine(comm), inside.point_to_point.post
        works = [post(engine, "send", x, peer, None, tag) for tag, x in enumerate(sent)]
        works += [post(engine, "recv", got[tag], peer, None, tag) for tag in (2, 0, 1)]
        for work in works:
            work.wait()
        assert all((y == tag).all() for tag, y in enumerate(got))
        assert read_in_place(comm) == 3

    run_ranks(program, 2, hints=READ)


def test_a_message_that_does_not_fit_is_refused_and_the_next_one_is_read():
    def program(comm):
        x, y = torch.ones(MIB), torch.zeros(MIB + 1)
        with pytest.raises(MismatchError):
            comm.send(x, 1) if comm.get_rank() == 0 else comm.recv(y, 0)
        comm.send(x, 1) if comm.get_rank() == 0 else comm.recv(y[1:], 0)
        assert comm.get_rank() == 0 or y.sum() == MIB
        assert read_in_place(comm) == comm.get_rank()

    run_ranks(program, 2, hints=READ)


def test_what_is_read_after_the_sender_gave_up_is_an_error():
    """The sender uses its tensor again, or frees it, as soon as it is told of the abort."""
    aborted = threading.Event()

    def program(comm):
        x = torch.ones(8 * MIB)
        if comm.get_rank() == 0:
            work = comm.send(x, 1, async_op=True)
            eventually(lambda: work.status is WorkStatus.INPROGRESS)
            comm.abort()
            with pytest.raises(CommError):
                work.wait()
            x.fill_(2)
            del x
            aborted.set()
            return
        aborted.wait(60)
        with pytest.raises(CommError, match="abort"):
            comm.recv(x, 0)

    run_ranks(program, 2, hints=READ)
