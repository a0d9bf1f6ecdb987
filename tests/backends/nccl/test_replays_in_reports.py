"""Reports of rings alone, of a job that replays graphs: each replay's time is given once."""

from __future__ import annotations

import io
import json
import pickle

import pytest
import torch
from rich.console import Console

import unicomm
from tests import recorded
from tests.mocks.nccl.graphs import Together
from tests.mocks.nccl.kinds import streams_of
from unicomm import Communicator
from unicomm.flight_recorder.formats import torch_dump as formats
from unicomm.flight_recorder.ring.reader import REPLAY, REPLAYED, read_ring
from unicomm.flight_recorder.table.load import load
from unicomm.profiler import report
from unicomm.profiler.figures_text import render
from unicomm.profiler.operation_columns import from_recorder
from unicomm.testing import drain, run_ranks

SUM = unicomm.ReduceOp.SUM
MS = 5.0  # that a replay's stream is busy in between, so that a replay has a time


def job(comm: Communicator, together: Together) -> None:
    """A call, a graph of three operations replayed twice, one of messages (alone: a broadcast), a call."""
    peer = (comm.get_rank() + 1) % comm.get_size()
    x, out, y = torch.ones(4), torch.zeros(4 * comm.get_size()), torch.zeros(3)
    streams = streams_of(comm)

    def steps() -> None:
        comm.all_reduce(x, SUM, False)
        streams.sleep(MS)
        comm.all_gather_single(out, x, False)
        comm.all_reduce(x, SUM, False)

    def messages() -> None:
        if comm.get_size() == 1:
            comm.broadcast(y, 0, False)
        else:
            batch = comm.batch_op_create()
            batch.send(torch.ones(3), peer)
            batch.recv(y, peer)
            batch.issue(False)
        streams.sleep(MS)

    comm.all_reduce(x, SUM, False)
    graphs = [together.capture(comm, body) for body in (steps, messages)]
    for at in (0, 0, 1):  # with nothing between them
        graphs[at].replay()
    comm.all_reduce(x, SUM, False)
    drain(comm)


def test_a_replays_time_is_given_once(mock_nccl):
    together = Together(2)
    run_ranks(lambda comm: job(comm, together), 2, backend=mock_nccl)
    path = recorded.path()
    found = report([path])
    by_op = {o.op: o for o in found.operations}
    # Of messages: all that were sent, and their bytes.
    assert {op: (o.count, o.bytes, o.timed) for op, o in by_op.items()} == {
        "replay": (4, 2 * (16 + 32 + 16) + 24, True),  # two of collectives; that of messages on each rank
        "all_reduce": (2, 32, True),
        "all_reduce (in replays)": (4, 64, False),
        "all_gather_single (in replays)": (2, 64, False),
        "send (in replays)": (2, 24, False),
        "recv (in replays)": (2, 24, False),
        "all_reduce (captured)": (2, 32, False),
        "all_gather_single (captured)": (1, 32, False),
        "send (captured)": (2, 24, False),
        "recv (captured)": (2, 24, False),
    }
    ring = read_ring(path)
    taken = {}
    for comm in ring.comms:
        records = ring.records[ring.records["comm"] == comm.index]
        heads = records[(records["flags"] & REPLAY) != 0]
        assert len(heads) == 3
        assert ((heads["flags"] & REPLAYED) != 0).all()
        lasted = heads["completed_ns"].astype(int) - heads["started_ns"].astype(int)
        assert (lasted > 0).all()
        taken[comm.rank] = int(lasted.sum())
    whole = by_op["replay"]
    assert whole.time_ns == sum(taken.values()) // 2
    assert whole.bus_bandwidth == 0
    assert all(o.time_ns == o.waiting_ns == o.median_ns == 0 for o in found.operations if not o.timed)
    # All that is said of time adds up to what each rank communicated.
    total = sum(r.communicating_ns for r in found.ranks)
    assert abs(2 * sum(o.time_ns for o in found.operations) - total) < 9  # means are rounded
    for rank in found.ranks:
        called = ring.records[[ring.comms[i].rank == rank.rank for i in ring.records["comm"]]]
        called = called[(called["flags"] & (REPLAYED | 16)) == 0]
        lasted = (called["completed_ns"].astype(int) - called["started_ns"].astype(int)).sum()
        assert rank.communicating_ns == taken[rank.rank] + lasted
        assert rank.operations == 2 + 6 + 2
    assert {d.op for d in found.delays} <= {"replay", "all_reduce"}
    # The replays of two ranks are compared, and their operations stand beneath.
    assert whole.late_rank >= 0
    order = [o.op for o in found.operations]
    assert all("(" in op for op in order[order.index("replay") + 1 :][:8])
    out = io.StringIO()
    Console(file=out, width=100).print(render(found))
    (line, *_) = [text for text in out.getvalue().splitlines() if "all_reduce (in replays)" in text]
    assert " ns" not in line


@pytest.mark.parametrize("form", ["json", "pickle"])
def test_dumps_say_the_same(mock_nccl, tmp_path, form):
    run_ranks(lambda comm: job(comm, Together(1)), 1, backend=mock_nccl)
    ring = recorded.ring()
    dump = tmp_path / ("rank0.json" if form == "json" else "rank_0")
    if form == "json":
        dump.write_text(json.dumps(formats.to_dict(ring)))
    else:
        dump.write_bytes(pickle.dumps(formats.to_dict(ring)))

    def told(path: object) -> list[tuple]:
        return [(o.op, o.timed, o.count, o.bytes, o.time_ns) for o in report([path]).operations]

    assert told(dump) == told(recorded.path())
    assert ("replay", True, 3) in [row[:3] for row in told(dump)]


def test_a_replay_of_which_a_part_is_left(mock_nccl):
    """A ring that has begun anew has lost the first records of a replay."""
    run_ranks(lambda comm: job(comm, Together(1)), 1, backend=mock_nccl)
    table = load([recorded.path()])
    whole = from_recorder(table)
    first = int((whole.replay > 0).argmax())
    assert (whole.replay[whole.whole_replay] == [1, 2, 3]).all()
    for name in ("rank", "group", "call", "seq", "peer", "state", "flags"):
        setattr(table, name, getattr(table, name)[first + 1 :])
    for name in ("created_ns", "started_ns", "completed_ns"):
        setattr(table, name, getattr(table, name)[first + 1 :])
    rest = from_recorder(table)
    assert (rest.replay[rest.whole_replay] == [1, 2, 3]).all()
    assert rest.seq[rest.whole_replay].tolist() == [
        int(whole.seq[whole.whole_replay][0]) + 1,
        *whole.seq[whole.whole_replay][1:].tolist(),
    ]
