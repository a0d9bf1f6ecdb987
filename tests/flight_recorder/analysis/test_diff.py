"""Comparing two runs."""

import json
import math
import os
import pickle

import pytest
import torch
from typer.testing import CliRunner

from tests.flight_recorder.reports.test_html import table_of
from tests.flight_recorder.rings import ALL_REDUCE, BROADCAST, RECV, SEND, write_ring
from unicomm.flight_recorder.analysis.diff import compare
from unicomm.flight_recorder.formats import torch_dump as formats
from unicomm.flight_recorder.reports.diff_text import render
from unicomm.flight_recorder.ring.reader import read_ring
from unicomm.flight_recorder.table.load import load
from unicomm.launch.cli import app


def run(ranks=4, operations=6, wrong=None, records=64, size=8, group="main"):
    """All-reduces. `wrong` maps (rank, number) to what stands there instead; None ends the rank's run."""
    wrong = wrong or {}

    def program(recorder, rank):
        comm = recorder.add_comm(group, "shm", "u", f"0-{ranks - 1}", rank, ranks)
        for seq in range(1, operations + 1):
            op, n, root = wrong.get((rank, seq), (ALL_REDUCE, size, -1)) or (None, 0, 0)
            if op is None:
                return
            x = [torch.ones(n)]
            recorder.finish(recorder.begin(comm, op, seq, seq, x, x, int(op == ALL_REDUCE), root))

    return table_of(program, ranks, records)


def text_of(diff):
    from rich.console import Console

    console = Console(width=200, file=open(os.devnull, "w"), record=True)  # noqa: SIM115
    console.print(render(diff))
    return console.export_text()


def test_the_same():
    found = compare(run(), run())
    assert found.same
    assert found.compared == 24
    assert [(c.call, c.a_count, c.b_count) for c in found.changes] == [("all_reduce float32[8] SUM", 24, 24)]
    assert "The runs are the same: 24 operations" in text_of(found)


def test_the_first_operation_that_differs():
    found = compare(run(), run(wrong={(2, 4): (BROADCAST, 8, 1), (2, 5): (ALL_REDUCE, 9, -1)}))
    [difference] = found.differences
    assert (difference.ranks, difference.group, difference.seq_num) == ([2], "main", 4)
    assert difference.a == "all_reduce float32[8] SUM"
    assert difference.b == "broadcast float32[8] root 1"
    assert difference.a_where == difference.b_where
    assert difference.a_where.startswith(__file__)
    assert not found.same
    text = text_of(found)
    assert "rank 2, #4 of 'main'" in text
    assert "broadcast float32[8] root 1" in text


def test_ranks_that_differ_in_the_same_way_are_one():
    found = compare(run(), run(size=9))
    [difference] = found.differences
    assert difference.ranks == [0, 1, 2, 3]
    assert difference.seq_num == 1
    found = compare(run(), run(wrong={(r, 3 if r < 2 else 5): (ALL_REDUCE, 7, -1) for r in range(4)}))
    assert [(d.ranks, d.seq_num) for d in found.differences] == [([0, 1], 3), ([2, 3], 5)]


@pytest.mark.parametrize("flip", [False, True])
def test_a_run_that_ends_sooner(flip):
    runs = [run(), run(wrong={(1, 5): None})]
    found = compare(*(runs[::-1] if flip else runs))
    [difference] = found.differences
    assert (difference.ranks, difference.seq_num) == ([1], 5)
    texts = (difference.a, difference.b)
    assert (texts[::-1] if flip else texts) == ("all_reduce float32[8] SUM", "")
    assert "no such operation" in text_of(found)


def test_groups_and_ranks_of_one_run_only():
    found = compare(run(ranks=3, group="tp"), run(ranks=3, group="dp"))
    assert {(d.group, bool(d.a), bool(d.b)) for d in found.differences} == {
        ("tp", True, False),
        ("dp", False, True),
    }
    found = compare(run(ranks=2), run(ranks=3))
    assert (found.only_a, found.only_b) == ([], [2])
    assert "only in B: rank 2" in text_of(found)


def test_wrapped_rings_are_compared_where_both_still_have_records():
    found = compare(run(ranks=1, operations=100, records=16), run(ranks=1, operations=100, records=64))
    assert found.same
    assert found.compared == 16


def test_messages_are_compared_by_pair():
    def program(second):
        def fill(recorder, rank):
            comm = recorder.add_comm("main", "shm", "u", "0-2", rank, 3)
            for peer in {0: (1, 2), 1: (0,), 2: (0,)}[rank]:
                for seq, n in ((1, 8), (2, second if peer == 2 or rank == 2 else 8)):
                    x = [torch.ones(n)]
                    if rank == 0:
                        recorder.finish(recorder.begin(comm, SEND, seq, 1, x, [], peer=peer, flags=2))
                    else:
                        recorder.finish(recorder.begin(comm, RECV, seq, 1, [], x, peer=0, flags=2 | 8))

        return table_of(fill, 3)

    assert compare(program(8), program(8)).same
    found = compare(program(8), program(5))
    assert {(d.ranks[0], d.peer, d.seq_num) for d in found.differences} == {(0, 2, 2), (2, 0, 2)}
    assert "with rank 2" in text_of(found)


def test_times():
    a, b = run(ranks=2), run(ranks=2)
    for table, took in ((a, 1000), (b, 3000)):
        table.completed_ns[:] = table.started_ns + took
    b.completed_ns[0] += 10_000_000  # an outlier moves the sum and not the median
    [change] = compare(a, b).changes
    assert (change.a_median_ns, change.b_median_ns, change.ratio) == (1000, 3000, 3)
    assert change.b_total_ns - change.a_total_ns == 12 * 2000 + 10_000_000
    assert "+200%" in text_of(compare(a, b))
    changes = compare(a, run(ranks=2, size=9)).changes
    assert all(math.isnan(c.ratio) for c in changes)


def test_a_ring_against_a_dump_of_the_same_run(tmp_path):
    """Torch's format knows neither reduction nor root, so these are no difference."""
    for rank in range(2):
        recorder = write_ring(tmp_path / f"{rank}.ucring", rank, 2, 5)
        record = recorder.begin(0, BROADCAST, 6, 6, [torch.ones(3)], [torch.ones(3)], 0, 1)
        recorder.finish(record)
        dump = tmp_path / "dumps" / f"rank_{rank}"
        dump.parent.mkdir(exist_ok=True)
        dump.write_bytes(pickle.dumps(formats.to_dict(read_ring(tmp_path / f"{rank}.ucring"))))
    rings, dumps = load(tmp_path.glob("*.ucring")), load([tmp_path / "dumps"])
    found = compare(rings, dumps)
    assert found.same, found.differences
    assert found.compared == 12


def test_command(tmp_path):
    for name, operations in (("a", 5), ("b", 4)):
        (tmp_path / name).mkdir()
        for rank in range(2):
            write_ring(tmp_path / name / f"{rank}.ucring", rank, 2, operations)
    call = CliRunner().invoke
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert call(app, ["trace", "diff", a, a]).exit_code == 0
    done = call(app, ["trace", "diff", a, b, "--json"])
    assert done.exit_code == 1
    data = json.loads(done.stdout)
    assert data["same"] is False
    assert data["differences"][0]["seq_num"] == 5
    (tmp_path / "nothing").mkdir()
    done = call(app, ["trace", "diff", a, str(tmp_path / "nothing")])
    assert done.exit_code == 2
    assert "no dump or ring" in done.stderr


@pytest.mark.parametrize("entries", [0, 2])
def test_a_run_that_completed_nothing(entries, tmp_path):
    """It hangs in its first operation, or was read before it."""
    one = {"process_group": ["0", "default_pg"], "profiling_name": "nccl:all_reduce", "state": "scheduled"}
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    many = [one | {"collective_seq_id": seq, "record_id": seq} for seq in range(1, entries + 1)]
    path = tmp_path / "rank_0.json"
    path.write_text(json.dumps({"version": "2.10", "pg_config": config, "entries": many}))
    hanging, good = load([path]), run(ranks=2)
    for a, b in ((hanging, good), (good, hanging), (hanging, hanging)):
        assert compare(a, b).same == (a is b)
        assert text_of(compare(a, b))
