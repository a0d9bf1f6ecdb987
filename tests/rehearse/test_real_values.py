"""Rehearsals with real values: what ranks receive is what others have sent, and who waits for ever ends."""

import time

import pytest
import torch
import torch.distributed as dist

import unicomm
from unicomm.flight_recorder.analysis.verdict import Verdict
from unicomm.rehearse.forecast.topology import load
from unicomm.rehearse.rehearsal import MOST_REAL, rehearse
from unicomm.rehearse.values import turns

pytestmark = pytest.mark.processes
RANKS, PATIENCE = 4, 60.0


def rehearsed(program, ranks=RANKS, **more):
    return rehearse(program, ranks, real_values=True, patience=PATIENCE, **more)


def test_collectives_have_their_results():
    def program():
        dist.init_process_group("gloo")
        rank, size = dist.get_rank(), dist.get_world_size()
        own = torch.tensor([rank + 1.0, 10.0 * rank])
        for op, expected in (
            (dist.ReduceOp.SUM, [10.0, 60.0]),
            (dist.ReduceOp.MAX, [4.0, 30.0]),
            (dist.ReduceOp.MIN, [1.0, 0.0]),
            (dist.ReduceOp.PRODUCT, [24.0, 0.0]),
            (dist.ReduceOp.AVG, [2.5, 15.0]),
        ):
            x = own.clone()
            dist.all_reduce(x, op)
            assert x.tolist() == expected, (op, x)
        x = own.clone()
        dist.reduce(x, 2)
        assert x.tolist() == ([10.0, 60.0] if rank == 2 else own.tolist())
        x = own.bfloat16()
        dist.all_reduce(x)
        assert x.tolist() == [10.0, 60.0]
        x = own.clone()
        dist.broadcast(x, 3)
        assert x.tolist() == [4.0, 30.0]
        parts = [torch.empty(2) for _ in range(size)]
        dist.all_gather(parts, own)
        assert [part[0].item() for part in parts] == [1.0, 2.0, 3.0, 4.0]
        dist.gather(own, parts if rank == 1 else None, 1)
        mine = torch.empty(2)
        dist.scatter(mine, parts if rank == 1 else None, 1)
        assert torch.equal(mine, own)
        out = torch.empty(1)
        dist.reduce_scatter_tensor(out, torch.arange(4.0) * (rank + 1))
        assert out.item() == 10.0 * rank
        counts = [1, 0, 2, 1]
        taken = [counts[rank]] * size
        received = torch.empty(sum(taken))
        dist.all_to_all_single(received, torch.full((4,), float(rank)), taken, counts)
        assert received.tolist() == [float(r) for r in range(size) for _ in range(counts[rank])]
        dist.barrier()

    done = rehearsed(program)
    assert done.good, (done.report.findings, done.output)


def test_objects_messages_and_own_communicators():
    def program():
        dist.init_process_group("gloo")
        rank, size = dist.get_rank(), dist.get_world_size()
        names = [None] * size
        dist.all_gather_object(names, "x" * rank)
        assert names == ["", "x", "xx", "xxx"]
        got = torch.empty(2)
        if rank == 0:
            senders = {dist.recv(got) for _ in range(size - 1)}
            assert senders == {1, 2, 3}
        else:
            dist.send(torch.full((2,), float(rank)), 0)
        works = [dist.irecv(got, rank ^ 1, tag=5), dist.isend(torch.full((2,), rank + 0.5), rank ^ 1, tag=5)]
        for work in works:
            work.wait()
        assert got[0].item() == (rank ^ 1) + 0.5
        with unicomm.new_comm("auto", "cpu", name="own") as comm:
            x = torch.tensor([rank])
            comm.all_reduce(x, unicomm.ReduceOp.PREMUL_SUM(2), async_op=False)
            assert x.item() == 12

    done = rehearsed(program)
    assert done.good, (done.report.findings, done.output)


def test_asynchronous_operations_are_awaited_in_any_order():
    def program():
        dist.init_process_group("gloo")
        rank, size = dist.get_rank(), dist.get_world_size()
        a, b = dist.new_group(list(range(size))), dist.new_group(list(range(size)))
        x, y = torch.ones(2), torch.full((2,), float(rank))
        works = [dist.all_reduce(x, group=a, async_op=True), dist.all_reduce(y, group=b, async_op=True)]
        for work in works if rank % 2 else reversed(works):
            work.wait()
        assert (x[0].item(), y[0].item()) == (4.0, 6.0)

    assert rehearsed(program).good


def test_control_flow_is_the_programs_own():
    def program():
        dist.init_process_group("gloo")
        left = torch.tensor([dist.get_rank() + 1])
        for _ in range(10):
            most = left.clone()
            dist.all_reduce(most, dist.ReduceOp.MAX)
            if most <= 0:
                return
            left -= 1
        raise AssertionError("the loop does not end")

    done = rehearsed(program)
    assert done.good, (done.report.findings, done.output)
    assert len(done.table) == 5 * RANKS
    assert not any("depends on received data" in remark.message for remark in done.report.remarks)


def test_ranks_that_wait_for_ever_end_and_are_explained():
    def program():
        dist.init_process_group("gloo")
        x = torch.ones(3)
        if dist.get_rank() == 2:
            return
        dist.all_reduce(x)
        raise AssertionError("nobody comes here")

    finding = rehearsed(program).report.findings[0]
    assert (finding.verdict, finding.culprits) == (Verdict.NEVER_JOINED, [2])


def test_sends_do_not_wait_so_that_the_play_decides():
    def program():
        dist.init_process_group("gloo")
        peer, got = dist.get_rank() ^ 1, torch.empty(2)
        dist.send(torch.ones(2), peer)
        dist.recv(got, peer)
        assert got.tolist() == [1.0, 1.0]

    done = rehearsed(program)
    assert done.report.findings[0].verdict is Verdict.WAIT_CYCLE
    assert done.output == "" or "Error" not in done.output


def test_a_mismatch_ends_the_ranks():
    def program():
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(3 if dist.get_rank() else 2))

    finding = rehearsed(program).report.findings[0]
    assert (finding.verdict, finding.culprits) == (Verdict.SIZE_MISMATCH, [0])


def test_one_rank_runs_at_a_time(tmp_path):
    def program():
        dist.init_process_group("gloo")
        for _ in range(20):
            inside = tmp_path / "inside"
            inside.touch(exist_ok=False)
            sum(range(10000))
            inside.unlink()
            dist.all_reduce(torch.ones(1))

    done = rehearsed(program)
    assert done.good, (done.report.findings, done.output)


def test_a_rank_that_does_not_end_is_killed():
    def good():
        dist.init_process_group("gloo")
        dist.barrier()

    def program():
        dist.init_process_group("gloo")
        while dist.get_rank() == 1:
            pass
        dist.barrier()

    began = time.monotonic()
    assert rehearsed(good, 2).good
    patience = max(3.0, 5 * (time.monotonic() - began))  # rank 0 must end in it, also on a busy machine
    done = rehearse(program, 2, real_values=True, patience=patience)
    assert done.unusable.startswith("rank 1 did not end in time")


def decides_by_received_data():
    dist.init_process_group("gloo")
    least = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(least, dist.ReduceOp.MIN)
    for _ in range(int(least)):
        dist.barrier()


@pytest.mark.parametrize(
    ("ranks", "more", "real"),
    [
        (4, {}, True),
        (MOST_REAL, {}, True),
        (MOST_REAL + 1, {}, False),
        (4, {"meta": True}, False),
        (4, {"topology": load("cpu")}, False),
        (4, {"real_values": False}, False),
    ],
)
def test_few_ranks_have_real_values_by_default(ranks, more, real):
    """With made-up values each rank takes its own number for the least."""
    done = rehearse(decides_by_received_data, ranks, patience=PATIENCE, **more)
    assert done.good is real


def test_values_that_are_to_be_saved_are_real(tmp_path):
    done = rehearse(
        decides_by_received_data, MOST_REAL + 1, save_values=tmp_path / "values.json", patience=PATIENCE
    )
    assert done.good


def test_it_ends_when_memory_runs_out(monkeypatch):
    """All ranks are alive at once; the machine must not kill something else."""
    monkeypatch.setattr(turns, "available_memory", lambda: 0.01)

    def program():
        dist.init_process_group("gloo")
        time.sleep(30)

    done = rehearse(program, 2, patience=PATIENCE)
    assert "memory was running out" in done.unusable
    assert "--values made-up" in done.unusable


def test_the_memory_that_is_available():
    assert 0.0 < turns.available_memory() <= 1.0


def test_a_sample_has_no_real_values():
    with pytest.raises(ValueError, match="real values need all ranks"):
        rehearse(lambda: None, 4, sample=True, real_values=True)
