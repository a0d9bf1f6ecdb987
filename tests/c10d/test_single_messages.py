"""Messages and barriers of a process group in one native call, beside the general way."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests import recorded
from tests.eventually import eventually
from unicomm import CommTimeoutError, Communicator, MismatchError, PeerLostError
from unicomm.c10d.calls import short
from unicomm.c10d.compat import ranks_of_groups
from unicomm.c10d.process_group import UnicommProcessGroup
from unicomm.c10d.process_group_work import DONE
from unicomm.comms.operations.table import BY_CODE
from unicomm.testing import run_ranks

Program = Callable[[UnicommProcessGroup], None]


def on_groups(program: Program, ranks: int = 2, short_way: bool = True) -> None:
    """Runs `program` on the group of each rank, which torch knows. Ranks are threads."""

    def on_rank(comm: Communicator) -> None:
        group = UnicommProcessGroup(comm)
        if not short_way:
            comm._engine.single = None
        ranks_of_groups()[group] = {r: r for r in range(comm.get_size())}
        try:
            program(group)
        finally:
            del ranks_of_groups()[group]

    run_ranks(on_rank, ranks)


def send(group, x, tag=0):
    dist.send(x, group_dst=1 - group.rank(), group=group, tag=tag)


def recv(group, x, tag=0):
    dist.recv(x, group_src=1 - group.rank(), group=group, tag=tag)


def opened_queue(group) -> bool:
    return group.get_comm()._engine.executor.messages is not None


@pytest.mark.parametrize("short_way", [True, False])
def test_messages_of_any_size_and_tag_arrive_and_are_recorded_alike(short_way):
    chosen = random.Random(11)
    sizes = [chosen.choice([0, 1, 5, 5000, 40_000, 300_000]) for _ in range(60)]

    def program(group: UnicommProcessGroup) -> None:
        me = group.rank()
        for at, size in enumerate(sizes):
            mine = torch.full((size,), at, dtype=torch.int32)
            got = torch.full((size,), -1, dtype=torch.int32)
            if at % 4 == 3:  # in the other order of tags, and not waited for at once
                works = [group.send([mine + tag], 1 - me, tag) for tag in (1, 2)]
                for tag in (2, 1):
                    works.append(group.recv([got], 1 - me, tag))
                    works[-1].wait()
                    assert got.tolist() == [at + tag] * size
                for work in works:
                    work.wait()
                    assert work.source_rank() == 1 - me
            elif (at + me) % 2:
                send(group, mine, at)
                recv(group, got, at)
            else:
                recv(group, got, at)
                send(group, mine, at)
            if at % 4 != 3:
                assert got.tolist() == [at] * size
            if at % 10 == 0:
                dist.barrier(group)
        found = recorded.of(group.get_comm())
        messages = [r for r in found if BY_CODE[int(r["op"])].name in ("send", "recv")]
        for kind in ("send", "recv"):
            of_kind = [r for r in messages if BY_CODE[int(r["op"])].name == kind]
            assert [int(r["seq"]) for r in of_kind] == list(range(1, 76)), kind
        assert {int(r["peer"]) for r in messages} == {1 - me}
        assert {int(r["flags"]) for r in messages} == {3, 11}  # asynchronous messages; received ones
        assert {int(r["state"]) for r in found} == {3}
        assert len({int(r["op_id"]) for r in found}) == len(found)
        assert all(r["created_ns"] <= r["started_ns"] <= r["completed_ns"] for r in found)

    on_groups(program, short_way=short_way)


def test_what_needs_no_other_rank_needs_no_queue():
    def program(group: UnicommProcessGroup) -> None:
        x = torch.ones(3)
        comm = group.get_comm()
        send(group, x)
        work = group.send([x], 1 - group.rank(), 0)
        assert work.is_completed()
        assert work.result() == [x]
        comm.barrier()
        recv(group, x)
        assert group.recv([x], 1 - group.rank(), 0).is_completed()
        options = dist.BarrierOptions()
        options.asyncOp = False
        assert group.barrier(options) is DONE
        assert group.barrier(opts=options) is DONE
        options.timeout = timedelta(seconds=20)
        assert group.barrier(options) is not DONE
        assert comm._engine.executor.messages is None

    on_groups(program)


def test_a_receive_that_waits_long_goes_on_in_the_queue():
    groups = {}

    def program(group: UnicommProcessGroup) -> None:
        groups[group.rank()] = group
        group.get_comm().barrier()
        x = torch.zeros(3)
        if group.rank() == 1:
            eventually(lambda: opened_queue(groups[0]))
            send(group, x + 1)
        else:
            recv(group, x)
            assert x.tolist() == [1.0] * 3
            [record] = [r for r in recorded.of(group.get_comm()) if r["peer"] == 1]
            assert (record["seq"], record["flags"], record["state"]) == (1, 11, 3)
        group.get_comm().barrier()
        send(group, x)  # the fast path is free again
        recv(group, x)

    on_groups(program)


OTHERS = {
    "send": lambda group, x: dist.send(x, group_dst=1, group=group, tag=1),
    "a long send": lambda group, x: dist.send(x.repeat(1_000_000), group_dst=1, group=group, tag=1),
    "irecv": lambda group, x: dist.irecv(x, group_src=1, group=group, tag=1).wait(),
    "all_reduce": lambda group, x: dist.all_reduce(x, group=group),
    "barrier": lambda group, x: dist.barrier(group),
    "communicator's send": lambda group, x: group.get_comm().send(x, 1),
    "communicator's broadcast": lambda group, x: group.get_comm().broadcast(x, 0),
    "asynchronous": lambda group, x: group.get_comm().broadcast(x, 0, async_op=True).wait(),
    "a hook": lambda group, x: group.get_comm().register_pre_hook(lambda *_: None),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_receive_that_waits_gives_way_to_operations_of_other_threads(name):
    """Rank 1 answers one thread of rank 0 only once it has met another thread."""
    partner = {
        "irecv": lambda group, x: send(group, x, 1),
        "a hook": lambda group, x: None,
        "communicator's send": lambda group, x: group.get_comm().recv(x, 0),
    }
    waits, left = threading.Event(), threading.Event()

    def program(group: UnicommProcessGroup) -> None:
        comm = group.get_comm()
        comm.barrier()
        x = torch.zeros(3)
        if group.rank() == 1:
            waits.wait(60)
            if "send" in name and "communicator" not in name:
                recv(group, x.repeat(1_000_000) if "long" in name else x, 1)
            else:
                partner.get(name, OTHERS[name])(group, x)
            left.wait(60)
            send(group, x + 5, 2)
            return
        comm._engine.single.patience = 1e6
        answer = torch.zeros(3)
        receiver = threading.Thread(target=recv, args=(group, answer, 2), daemon=True)
        receiver.start()
        eventually(comm._engine.fast.running)
        waits.set()
        OTHERS[name](group, x)
        eventually(lambda: not comm._engine.fast.running())
        left.set()
        receiver.join(60)
        assert answer.tolist() == [5.0] * 3

    on_groups(program)


def test_a_receive_waits_for_all_chunks_of_a_message():
    """One that went to the queue after the first chunk took 95 us instead of 20 for 64 KiB."""

    def program(group: UnicommProcessGroup) -> None:
        group.get_comm()._engine.single.patience = 1e6
        for turn in range(100):
            mine = torch.full((75_000,), turn, dtype=torch.int32)
            if turn % 2 == group.rank():
                send(group, mine)
            else:
                got = torch.zeros_like(mine)
                recv(group, got)
                assert torch.equal(got, mine)
        assert not opened_queue(group)

    on_groups(program)


def test_an_abort_ends_a_receive_that_waits(raised):
    def program(group: UnicommProcessGroup) -> None:
        comm = group.get_comm()
        comm.barrier()
        if group.rank() == 1:
            eventually(comm._engine.backend._group.failed)
            return
        comm._engine.single.patience = 1e6
        errors = []
        receiver = threading.Thread(target=lambda: errors.append(raised(recv, group, torch.zeros(3))))
        receiver.daemon = True
        receiver.start()
        eventually(comm._engine.fast.running)
        comm.abort()
        receiver.join(60)
        assert "abort" in str(errors[0])

    on_groups(program)


@pytest.mark.parametrize("short_way", [True, False])
def test_errors_name_the_same_culprits(short_way, raised):
    def mismatch(group: UnicommProcessGroup) -> None:
        x = torch.zeros(3 + group.rank())
        if group.rank() == 0:
            send(group, x)
            group.get_comm().barrier()
        else:
            group.get_comm().barrier()  # the message has arrived
            error = raised(recv, group, x)
            assert type(error) is MismatchError
            assert (error.op, error.seq, error.culprits) == ("recv", 1, (0, 1))
            [record] = [r for r in recorded.of(group.get_comm()) if r["flags"] & 8]
            assert (record["seq"], record["state"]) == (1, 4)

    def late(group: UnicommProcessGroup) -> None:
        group.set_timeout(timedelta(seconds=0.2))
        if group.rank() == 0:
            error = raised(recv, group, torch.zeros(3))
            assert type(error) is CommTimeoutError
            assert (error.op, error.seq, tuple(error.culprits)) == ("recv", 1, (1,))
        else:
            eventually(group.get_comm()._engine.backend._group.failed)

    def left(group: UnicommProcessGroup) -> None:
        if group.rank() == 0:
            error = raised(recv, group, torch.zeros(3))
            assert type(error) is PeerLostError
            assert (error.op, tuple(error.culprits)) == ("recv", (1,))
            error = raised(send, group, torch.zeros(3))
            assert type(error) is PeerLostError

    def twice(group: UnicommProcessGroup) -> None:
        assert "oneself" in str(raised(group.send, [torch.zeros(3)], group.rank(), 0))
        assert "tag" in str(raised(group.send, [torch.zeros(3)], 1 - group.rank(), 1 << 31))
        assert "range" in str(raised(group.recv, [torch.zeros(3)], 7, 0))

    for program in (mismatch, late, left, twice):
        on_groups(program, short_way=short_way)


def test_an_end_of_the_communicator_while_a_receive_is_handed_over(raised):
    """The record that the native path began ends with the error."""

    def program(group: UnicommProcessGroup) -> None:
        comm = group.get_comm()
        comm.barrier()
        if group.rank() == 1:
            eventually(comm._engine.backend._group.failed)
            return
        issue = comm._engine.issue

        def aborted(op):
            comm.abort()
            return issue(op)

        comm._engine.issue = aborted
        assert "abort" in str(raised(recv, group, torch.zeros(3)))
        [record] = [r for r in recorded.of(comm) if r["peer"] == 1]
        assert record["state"] == 4

    on_groups(program)


def test_a_receive_that_nobody_waits_for_yet_has_begun_but_not_started():
    """Its record has the number of the call, and the queue starts it."""

    def program(group: UnicommProcessGroup) -> None:
        comm, peer, x = group.get_comm(), 1 - group.rank(), torch.zeros(3)
        comm.barrier()
        if group.rank() == 1:
            eventually(comm._engine.backend._group.failed)
            return
        issue, seen = comm._engine.issue, []

        def looked(op):
            [record] = [r for r in recorded.of(comm) if r["peer"] == peer]
            seen.append((int(record["seq"]), int(record["state"]), int(record["started_ns"])))
            return issue(op)

        comm._engine.issue = looked
        dist.irecv(x, group_src=peer, group=group)
        assert seen == [(1, 1, 0)]
        comm.abort()

    on_groups(program)


def test_hooks_and_other_calls_have_the_general_way():
    def program(group: UnicommProcessGroup) -> None:
        seen = []
        comm, x = group.get_comm(), torch.zeros(3)
        with comm.register_pre_hook(lambda name, op_id, args: seen.append((name, args.seq))):
            works = [group.send([x], 1 - group.rank(), 0), group.recv([x], 1 - group.rank(), 0)]
            for work in works:
                work.wait()
            dist.barrier(group)
        assert [name.name for name, _ in seen] == ["send", "recv", "barrier"]
        group.send((x,), 1 - group.rank(), 0).wait()  # a tuple
        group.recv((x,), 1 - group.rank(), 0).wait()

    on_groups(program)


def test_only_torchs_blocking_functions_wait_at_once():
    """What a caller that does something in between gets is no shared Work."""

    def program(group: UnicommProcessGroup) -> None:
        x, peer = torch.zeros(3), 1 - group.rank()
        first = dist.isend(x, group_dst=peer, group=group)
        second = dist.irecv(x, group_src=peer, group=group)
        assert first is not DONE
        assert second is not DONE
        first.wait()
        second.wait()
        assert (first.source_rank(), second.source_rank()) == (peer, peer)
        future = second.get_future()
        assert future.wait() == [x]
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x, group=group, group_peer=peer),
                dist.P2POp(dist.irecv, x.clone(), group=group, group_peer=peer),
            ]
        )
        for work in works:
            work.wait()

    on_groups(program)
    assert len(short._STARTS) == 2
    assert len(short._WAITS) == 2
