"""Replays of graphs in the profiler: their events and rows, and what is made of them, over the double."""

from __future__ import annotations

import json

import pytest
import torch
from double_graphs import Together
from old_torch import OLD_TORCH
from torch.profiler import ProfilerActivity, profile

import unicomm
from unicomm import Communicator
from unicomm.comms.execution.profiling import events as profiling
from unicomm.flight_recorder.recording import writer
from unicomm.flight_recorder.ring.reader import REPLAYED, read_ring
from unicomm.profiler import events, merge, read_events, report
from unicomm.testing import run_ranks

SUM = unicomm.ReduceOp.SUM


def rows() -> list[dict]:
    table = profiling.finished[-1].table
    found = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    return [row | {"rank": table["groups"][row["group"]]["rank"]} for row in found]


def tag(row: dict) -> tuple:
    return (row["op"], row["seq_num"], row["captured_seq"], row["replay"])


def test_each_replay_has_a_row_and_so_have_its_operations(double):
    together = Together(2)

    def program(comm: Communicator) -> None:
        x, y, out = torch.ones(4), torch.ones(2, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.bfloat16)

        def body() -> None:
            comm.all_reduce(x, SUM, False)
            comm.all_gather_single(out, y, False)

        comm.barrier(False)
        graph = together.capture(comm, body)
        graph.replay()
        graph.replay()
        comm.all_reduce(x, SUM, False)
        assert comm._engine.executor.drain(30)

    with profile(activities=[ProfilerActivity.CPU]):
        run_ranks(program, 2, backend=double)
    for rank in (0, 1):
        mine = [row for row in rows() if row["rank"] == rank]
        assert [tag(row) for row in mine] == [
            ("barrier", 1, 0, 0),
            ("all_reduce", 2, 2, -1),
            ("all_gather_single", 3, 3, -1),
            ("replay", 4, 2, 1),
            ("all_reduce", 4, 2, 1),
            ("all_gather_single", 5, 3, 1),
            ("replay", 6, 2, 2),
            ("all_reduce", 6, 2, 2),
            ("all_gather_single", 7, 3, 2),
            ("all_reduce", 8, 0, 0),
        ]
        whole, reduced, gathered = mine[3:6]
        assert (reduced["in_elements"], reduced["dtype"], reduced["bytes"]) == (4, "float32", 16)
        assert (gathered["in_elements"], gathered["out_elements"], gathered["dtype"]) == (2, 4, "bfloat16")
        assert (whole["bytes"], whole["in_elements"], whole["out_elements"]) == (24, 6, 8)
        for row in mine[3:9]:
            assert (row["state"], row["is_async"]) == (3, 1)
            assert 0 < row["issued_ns"] <= row["completed_ns"]
            assert row["started_ns"] <= row["completed_ns"]
        # Nothing is known of an operation's place in its replay.
        for replay in (mine[3:6], mine[6:9]):
            times = [(row["started_ns"], row["completed_ns"]) for row in replay]
            assert times == times[:1] * 3
    # The numbers are the recorder's.
    records = read_ring(writer._recorder.path).records
    replayed = sorted(int(r["seq"]) for r in records if int(r["flags"]) & REPLAYED)
    assert replayed == sorted(r["seq_num"] for r in rows() if r["replay"] > 0 and r["op"] != "replay")


@pytest.fixture
def recorded(double, tmp_path):
    """A profiler and its trace of one rank that captured before the recording, and replayed twice in it."""
    found = {}

    def program(comm: Communicator) -> None:
        x, part = torch.ones(4), torch.ones(3)

        def body() -> None:
            comm.broadcast(x, 0, False)
            comm.reduce_scatter_single(part, part, SUM, False)

        graph = Together(1).capture(comm, body)
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as prof:
            graph.replay()
            comm._engine.executor.drain(30)
            graph.replay()
            comm._engine.executor.drain(30)
        found["prof"] = prof
        found["replay without a profiler"] = graph.replay()
        prof.export_chrome_trace(str(tmp_path / "rank0.json"))
        comm._engine.executor.drain(30)

    run_ranks(program, 1, backend=double)
    return found["prof"], tmp_path / "rank0.json"


def test_replays_are_events_of_torchs_profiler(recorded):
    prof, _ = recorded
    seen = [e for e in prof.events() if e.name.startswith("unicomm::")]
    names = ["unicomm::replay", "unicomm::broadcast", "unicomm::reduce_scatter_single"]
    assert [e.name for e in seen] == names * 2
    said = [(e.kwinputs["seq_num"], e.kwinputs["captured_seq"], e.kwinputs["replay"]) for e in seen]
    assert said == [(3, 1, 1), (3, 1, 1), (4, 2, 1), (5, 1, 2), (5, 1, 2), (6, 2, 2)]
    for launch, *inside in (seen[:3], seen[3:]):  # the launch has its operations in it
        for e in inside:
            assert launch.time_range.start <= e.time_range.start
            assert e.time_range.end <= launch.time_range.end


def test_the_trace_says_what_the_profiler_says(recorded):
    prof, path = recorded
    found = events(prof)
    if not OLD_TORCH:  # it tells less of its events than it writes
        assert read_events(path) == found
    assert [(e.op, e.seq_num, e.captured_seq, e.replay, e.captured) for e in found[:3]] == [
        ("replay", 3, 1, 1, False),
        ("broadcast", 3, 1, 1, False),
        ("reduce_scatter_single", 4, 2, 1, False),
    ]
    assert (found[1].root, found[1].bytes, found[2].root, found[2].bytes) == (0, 16, None, 12)
    assert all(e.duration_ns > 0 and e.state == "completed" for e in found)


def test_messages_of_a_replay_are_numbered_for_their_pair(double):
    together = Together(2)

    def program(comm: Communicator) -> None:
        peer = 1 - comm.get_rank()
        out, into = torch.ones(3), torch.zeros(3)

        def body() -> None:
            batch = comm.batch_op_create()
            batch.send(out, peer)
            batch.recv(into, peer)
            batch.issue(False)

        graph = together.capture(comm, body)
        graph.replay()
        assert comm._engine.executor.drain(30)

    with profile(activities=[ProfilerActivity.CPU]):
        run_ranks(program, 2, backend=double)
    mine = [row for row in rows() if row["rank"] == 0 and row["replay"] > 0]
    # Without a collective the ranks have no number of the replay in common.
    assert [(*tag(row), row["peer"]) for row in mine] == [
        ("replay", 0, 0, 1, -1),
        ("send", 2, 1, 1, 1),
        ("recv", 2, 1, 1, 1),
    ]
    assert mine[0]["batch"] == 0
    assert mine[1]["batch"] == mine[2]["batch"] > 0


def test_a_launch_that_fails_is_a_replay_that_failed(double, monkeypatch):
    def program(comm: Communicator) -> None:
        graph = Together(1).capture(comm, lambda: comm.all_reduce(torch.ones(4), SUM, False))
        graph._graph = None  # what the device does not know
        with profile(activities=[ProfilerActivity.CPU]), pytest.raises(AssertionError):
            graph.replay()

    run_ranks(program, 1, backend=double)
    assert [(*tag(row), row["state"]) for row in rows()] == [
        ("replay", 2, 1, 1, 4),
        ("all_reduce", 2, 1, 1, 4),
    ]


def test_a_graph_that_becomes_a_part_of_another_counts_for_that(double):
    def program(comm: Communicator) -> None:
        x = torch.ones(4)
        inner = Together(1).capture(comm, lambda: comm.all_reduce(x, SUM, False))
        outer = Together(1).capture(comm, inner.replay)
        with profile(activities=[ProfilerActivity.CPU]):
            inner.replay()
            outer.replay()
            inner.replay()
            comm._engine.executor.drain(30)

    run_ranks(program, 1, backend=double)
    assert [tag(row) for row in rows() if row["op"] != "replay"] == [
        ("all_reduce", 2, 1, 1),
        ("all_reduce", 3, 1, 1),
        ("all_reduce", 4, 1, 2),
    ]


@pytest.fixture
def late(double, tmp_path):
    """A trace of two ranks, a replay of which rank 1 began 5 ms late: with times that were put there."""
    together = Together(2)

    def program(comm: Communicator) -> None:
        x = torch.ones(4)

        def body() -> None:
            comm.all_reduce(x, SUM, False)
            comm.all_reduce(x, SUM, False)

        graph = together.capture(comm, body)
        for _ in range(2):
            graph.replay()
        assert comm._engine.executor.drain(30)

    with profile(activities=[ProfilerActivity.CPU]) as prof:
        run_ranks(program, 2, backend=double)
    path = tmp_path / "both.json"
    prof.export_chrome_trace(str(path))
    trace = json.loads(path.read_text())
    table = trace["unicomm"]
    at = {name: i for i, name in enumerate(table["columns"])}
    for row in table["rows"]:
        if row[at["replay"]] > 0:
            begin = table["started_ns"] + row[at["replay"]] * 20_000_000
            rank = table["groups"][row[at["group"]]]["rank"]
            row[at["issued_ns"]] = begin
            row[at["started_ns"]] = begin + 5_000_000 * (rank == 1 and row[at["replay"]] == 2)
            row[at["completed_ns"]] = begin + 9_000_000
    table["stopped_ns"] = table["started_ns"] + 100_000_000
    path.write_text(json.dumps(trace))
    return path


def test_the_rank_that_begins_a_replay_late_is_named(late):
    found = report([late])
    first = found.delays[0]
    assert (first.rank, first.op, first.late_ns, first.cost_ns) == (1, "replay", 5_000_000, 5_000_000)
    by_op = {o.op: o for o in found.operations}
    assert set(by_op) == {"replay", "all_reduce (in replays)", "all_reduce (captured)"}
    whole, parts, captured = (
        by_op[op] for op in ("replay", "all_reduce (in replays)", "all_reduce (captured)")
    )
    assert (whole.count, parts.count, captured.count) == (2, 4, 2)
    assert (whole.time_ns, whole.waiting_ns, whole.most_skew_ns) == (15_500_000, 2_500_000, 5_000_000)
    assert (parts.time_ns, parts.waiting_ns, parts.most_skew_ns, parts.late_rank) == (0, 0, 0, -1)
    assert whole.bus_bandwidth == 0  # it does more than to communicate
    assert [r.operations for r in found.ranks] == [4, 4]
    assert [r.communicating_ns for r in found.ranks] == [18_000_000, 13_000_000]


@pytest.mark.parametrize("ending", ["json", "pftrace"])
def test_the_timeline_shows_replays_and_joins_them(late, tmp_path, ending):
    out = tmp_path / f"merged.{ending}"
    done = merge([late], out)
    assert done.flows == 2
    if ending == "pftrace":
        pytest.importorskip("perfetto")
        assert b"unicomm::replay" in out.read_bytes()
        return
    trace = json.loads(out.read_text())["traceEvents"]
    slices = [e for e in trace if e.get("cat") == "unicomm" and e["name"].startswith("unicomm::")]
    assert {e["name"] for e in slices} == {"unicomm::replay"}
    assert sorted((e["args"]["replay"], e["args"]["captured_seq"], e["args"]["seq_num"]) for e in slices) == [
        (1, 1, 3),
        (1, 1, 3),
        (2, 1, 5),
        (2, 1, 5),
    ]
    waits = [e["dur"] for e in trace if e.get("name") == "waiting"]
    assert waits == [5000]
