"""Graphs over the mock NCCL: operations that are captured, and the records of their replays."""

from __future__ import annotations

import threading

import pytest
import torch

import unicomm
from tests import recorded
from tests.mocks.nccl.graphs import HostGraph, Together, check_life
from tests.mocks.nccl.kinds import of as of_kind
from tests.mocks.nccl.kinds import streams_of
from tests.old_torch import OLD_TORCH
from unicomm import Communicator
from unicomm.comms.errors import CommTimeoutError, NotReadyError
from unicomm.comms.execution.device import graphs
from unicomm.flight_recorder.analysis.analyze import analyze
from unicomm.flight_recorder.analysis.verdict import Verdict
from unicomm.flight_recorder.ring import record_text as words
from unicomm.flight_recorder.ring.reader import CAPTURED, P2P, REPLAYED
from unicomm.flight_recorder.table.load import load
from unicomm.testing import drain, run_ranks

SUM = unicomm.ReduceOp.SUM


def finish(comm: Communicator) -> None:
    drain(comm)


def of(comm_rank: int):
    """The ring, and the records of one rank."""
    ring = recorded.ring()
    index = next(c.index for c in ring.comms if c.rank == comm_rank)
    return ring, ring.records[ring.records["comm"] == index]


def test_replays_run_and_are_recorded_anew(mock_nccl):
    together = Together(2)

    def program(comm: Communicator) -> None:
        x, y = torch.ones(4), torch.full((2,), float(comm.get_rank() + 1))
        out = torch.zeros(4)

        def body() -> None:
            comm.all_reduce(x, SUM, False)
            comm.all_gather_single(out, y, False)

        graph = together.capture(comm, body)
        assert x.tolist() == [1.0] * 4  # a capture runs nothing
        for _ in range(3):
            graph.replay()
        comm.all_reduce(x, SUM, False)
        finish(comm)
        assert x.tolist() == [16.0] * 4
        assert out.tolist() == [1.0, 1.0, 2.0, 2.0]

    run_ranks(program, 2, backend=mock_nccl)
    for rank in (0, 1):
        ring, records = of(rank)
        assert [int(r["seq"]) for r in records] == list(range(1, 10))
        assert [int(r["flags"]) & (CAPTURED | REPLAYED) for r in records] == [16] * 2 + [32] * 6 + [0]
        assert [ring.op(r) for r in records] == ["all_reduce", "all_gather_single"] * 4 + ["all_reduce"]
        assert {int(r["state"]) for r in records} == {3}
        assert len({ring.frame(r).line for r in records[::2]}) == 2  # replays are where the capture was
        assert "captured by a graph" in words.arguments(ring, records[0])
        assert "in a graph's replay" in words.arguments(ring, records[2])
        assert words.arguments(ring, records[2]).startswith("float32[4] SUM")
    found = analyze(load([recorded.path()])).main.verdict
    assert found in (
        Verdict.GOOD,
        Verdict.SLOW,
    )  # the ranks' numbers match; one of the two may have been slow


def test_a_branch_is_joined_by_wait(mock_nccl, raised):
    together = Together(2)

    def program(comm: Communicator) -> None:
        x = torch.ones(4)
        works = []

        def body() -> None:
            work = comm.all_reduce(x, SUM, True)
            assert not work.is_completed()
            assert type(raised(work.wait_blocking)) is NotReadyError
            work.wait()
            comm.all_reduce(x, SUM, False)
            works.append(work)

        graph = together.capture(comm, body)
        graph.replay()
        finish(comm)
        assert x.tolist() == [4.0] * 4
        assert works[0]._held == ()

    run_ranks(program, 2, backend=mock_nccl)


def test_a_branch_that_is_not_joined_fails_the_capture_and_nothing_else(mock_nccl, raised):
    together = Together(2)

    def program(comm: Communicator) -> None:
        x = torch.ones(4)
        error = raised(lambda: together.capture(comm, lambda: comm.all_reduce(x, SUM, True)))
        assert "904" in str(error)
        again = together.capture(comm, lambda: comm.all_reduce(x, SUM, False))
        again.replay()
        comm.all_reduce(x, SUM, True).wait_blocking()
        assert x.tolist() == [4.0] * 4

    run_ranks(program, 2, backend=mock_nccl)


def test_a_replay_follows_what_was_issued_before(mock_nccl):
    together = Together(2)

    def program(comm: Communicator) -> None:
        x = torch.ones(4)
        graph = together.capture(comm, lambda: comm.all_reduce(x, SUM, False))
        streams = streams_of(comm)
        with streams.use(streams.new()):
            streams.sleep(100)
            before = comm.all_reduce(x, SUM, True)
        graph.replay()  # on another stream than that of the operation before
        after = comm.all_reduce(x, SUM, True)
        after.wait_blocking()
        assert before.is_completed()
        assert x.tolist() == [8.0] * 4

    run_ranks(program, 2, backend=mock_nccl)


def test_messages_of_a_graph_are_numbered_for_their_pair(mock_nccl):
    together = Together(2)

    def program(comm: Communicator) -> None:
        peer = 1 - comm.get_rank()
        out, into = torch.full((3,), float(comm.get_rank())), torch.zeros(3)

        def body() -> None:
            batch = comm.batch_op_create()
            batch.send(out, peer)
            batch.recv(into, peer)
            batch.issue(False)

        graph = together.capture(comm, body)
        graph.replay()
        graph.replay()
        finish(comm)
        assert into.tolist() == [float(peer)] * 3

    run_ranks(program, 2, backend=mock_nccl)
    _, records = of(0)
    assert len(records) == 6
    assert all(int(r["flags"]) & P2P for r in records)
    assert sorted(int(r["seq"]) for r in records) == [1, 1, 2, 2, 3, 3]


def test_one_sided_operations_of_a_graph_take_no_number():
    """Not all ranks have them, so collectives behind them would be numbered differently."""

    class Numbers:
        next_seq = iter(range(8, 99)).__next__

    class Recorder:
        def begin_again(self, shape: bytes, seq: int, op_id: int, flags: int) -> int:
            return 100 + seq

    one = graphs.Captured(None, "put", 1.0, [b"put"], [0], ())
    all_ = graphs.Captured(None, "all_reduce", 1.0, [b"all_reduce"], [7], ())
    begun = graphs.begin_records(Numbers(), Recorder(), [one, all_, one])
    assert begun == ([100, 108, 100], [[0], [8], [0]], [8], [])


def test_a_rank_that_does_not_replay_is_named(mock_nccl, raised):
    together, over = Together(2), threading.Event()

    def program(comm: Communicator) -> None:
        comm.set_timeout(1)
        x = torch.ones(4)

        def body() -> None:
            comm.all_reduce(x, SUM, False)
            comm.all_reduce(x, SUM, False)

        graph = together.capture(comm, body)
        if comm.get_rank() == 1:
            assert over.wait(60)
            return
        graph.replay()
        error = raised(lambda: comm.all_reduce(x, SUM, True, timeout=30).wait_blocking())
        over.set()
        assert (type(error), error.culprits) == (CommTimeoutError, (1,))
        assert "timed out after 1 s: rank 1 had not arrived" in error.message

    run_ranks(program, 2, backend=mock_nccl)


def test_a_graph_of_an_ended_communicator_is_not_launched(mock_nccl, raised):
    launched = []

    def program(comm: Communicator) -> HostGraph:
        x = torch.ones(4)
        return Together(1).capture(comm, lambda: (comm.all_reduce(x, SUM, False), launched.append(x)))

    graph = run_ranks(program, 1, backend=mock_nccl)[0]
    error = raised(graph.replay)
    assert type(error) is NotReadyError
    assert "finalized" in error.message
    assert launched[0].tolist() == [1.0] * 4


@pytest.mark.parametrize("backend", ["nccl-new", "nccl-old", "rccl-old"])
def test_calls_that_happen_once_are_refused_in_a_capture(backend, fresh_recorder):
    """As over the SHMEM libraries' mocks: tests/processes/programs/shmem.py."""
    of_kind(backend)
    together = Together(2)

    def program(comm: Communicator) -> None:
        check_life(comm, lambda body: together.capture(comm, body))
        x = torch.ones(4)
        comm.all_reduce(x, SUM, True).wait_blocking()
        assert x.tolist() == [2.0] * 4

    run_ranks(program, 2, backend=backend)


@pytest.mark.parametrize("connected", [False, True], ids=["vacant", "connected"])
def test_reconfigure_is_refused_in_a_capture(mock_nccl, raised, connected):
    ranks = {"rank": 0, "size": 1} if connected else {}
    comm = unicomm.new_comm(mock_nccl, "cpu", enable_reconfigure=True, **ranks)
    handles, errors = [comm.get_init_handle()], []
    with HostGraph(of_kind(mock_nccl).device_streams(comm.get_device())).capture():
        errors.append(raised(comm.reconfigure, 1, handles))
    assert (type(errors[0]), errors[0].op) == (unicomm.UnsupportedError, "reconfigure")
    assert "before the capture begins" in errors[0].hint
    comm.reconfigure(1, handles)  # the number was not used
    assert (comm.get_rank(), comm.get_size()) == (0, 1)
    comm.finalize()


def test_a_graph_without_operations_of_ours_is_left_alone(mock_nccl):
    def program(comm: Communicator) -> None:
        streams = streams_of(comm)
        graph = Together(1).capture(comm, lambda: streams.sleep(0))
        assert "_unicomm_operations" not in vars(graph)
        graph.replay()
        graph.reset()

    run_ranks(program, 1, backend=mock_nccl)


def test_torchs_graphs_have_what_is_followed():
    for graph_class in (torch.cuda.CUDAGraph, *(() if OLD_TORCH else (torch.accelerator.Graph,))):
        for name in ("capture_begin", "capture_end", "reset", "replay"):
            assert callable(getattr(graph_class, name)), (graph_class, name)
            assert name in vars(graph_class)  # written in Python, so that it can be wrapped


def test_following_twice_is_following_once():
    before = HostGraph.replay
    graphs.follow(HostGraph)
    assert HostGraph.replay is before
