"""Reports of a real job in which one rank is late, of rings instead of traces, and the single figures."""

import io
import json
import os
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from torch._C._distributed_c10d import HashStore
from typer.testing import CliRunner

from benchmarks import profile_merge as generator
from tests.commands import torchrun
from tests.processes.forked_interpreters import run
from tests.profiler.traces import decode, load, named, operations
from unicomm import ReduceOp
from unicomm.flight_recorder.recording.writer import recorder_path
from unicomm.launch.cli import app
from unicomm.profiler import TraceError, figures_html, merge, report
from unicomm.profiler.figures import _union
from unicomm.profiler.figures_text import render
from unicomm.testing import run_ranks

PROGRAM = Path(__file__).parent / "programs" / "ddp.py"
LATE, SECONDS = 2, 0.2


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Traces of 4 ranks of DDP under the switch."""
    folder = tmp_path_factory.mktemp("ddp")
    env = {"OMP_NUM_THREADS": "1", "TORCH_DISTRIBUTED_USE_TORCHCOMMS": "1", "UNICOMM_TRACE_KEEP": "always"}
    env["UNICOMM_TRACE_DIR"] = str(folder / "rings")
    (folder / "rings").mkdir(mode=0o700)
    done = run([*torchrun(4), PROGRAM, folder, LATE, SECONDS], within=200, env=os.environ | env)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    told = [json.loads((folder / f"told{r}").read_text()) for r in range(4)]
    return folder, [folder / f"rank{r}.json" for r in range(4)], told


@pytest.mark.processes
@pytest.mark.timeout(240)
def test_each_gradient_bucket_has_one_flow_through_all_ranks(trained, tmp_path):
    _, paths, told = trained
    buckets = len(told[0]["reduced"]) // 6
    assert buckets >= 3
    assert len(told[0]["reduced"]) == 6 * buckets
    assert all(t["reduced"] == told[0]["reduced"] and t["all_async"] for t in told)
    assert told[0]["kinds"] == [["shm", "default_pg"]]
    done = merge(paths, tmp_path / "m.json")
    assert done.ranks == [0, 1, 2, 3]
    trace = load(tmp_path / "m.json")
    made = operations(trace)
    assert len(made) == 4 * 6 * buckets
    at = {(e["pid"], e["tid"], e["ts"]): e for e in made}
    flows = {}
    for e in trace["traceEvents"]:
        if e.get("cat") == "collective" and e["name"] == "unicomm::all_reduce":
            flows.setdefault(e["id"], []).append(at[e["pid"], e["tid"], e["ts"]])
    assert len(flows) == 6 * buckets
    assert all(sorted(s["pid"] for s in steps) == [1, 2, 3, 4] for steps in flows.values())
    assert (
        sorted({s["args"]["seq_num"] for s in steps}.pop() for steps in flows.values()) == told[0]["reduced"]
    )
    merge(paths, tmp_path / "m.pftrace")
    decoded = decode(tmp_path / "m.pftrace")
    assert len(decoded.flows) >= 6 * buckets
    assert {p for p in decoded.processes if p} == {e["args"]["name"] for e in named(trace)}
    issued = [e for e in trace["traceEvents"] if e.get("cat") == "issue" and e["ph"] == "s"]
    assert len(issued) == len(made)


@pytest.mark.processes
@pytest.mark.timeout(240)
def test_the_late_rank_is_named_with_its_delay(trained):
    folder, paths, told = trained
    reduced, slow = told[0]["reduced"], told[0]["slow"]
    # By the programs' own clocks, for which a busy machine is as late as for the report.
    posted = np.asarray([t["posted"] for t in told])[:, slow]
    others = np.delete(posted, LATE, axis=0)
    assert min(posted[LATE] - np.max(others, axis=0)) >= SECONDS * 1e9
    typical = np.median(others, axis=0)
    expected = dict(zip([reduced[i] for i in slow], posted[LATE] - typical, strict=True))
    for inputs in (paths, [folder / "rings"]):
        # The rings hold the start of the program too, where ranks are late for reasons of their own.
        delays = [d for d in report(inputs).delays if d.op == "all_reduce" and d.seq in expected]
        assert [d.rank for d in delays] == [LATE] * len(slow)
        # A rank may lose its core between its own look at the clock and the recorder's, but not often.
        assert np.median([abs(d.late_ns / expected[d.seq] - 1) for d in delays]) < 0.1
        assert all(d.cost_ns > 2 * d.late_ns for d in delays)  # three ranks waited
    cost = Counter()
    for d in report(paths).delays:
        cost[d.rank] += d.cost_ns
    assert cost.most_common(1)[0][0] == LATE
    traced = next(o for o in report(paths).operations if o.op == "all_reduce")
    assert traced.count == len(told[0]["reduced"])
    assert traced.unfinished == 0
    assert traced.overlap is not None
    assert traced.bus_bandwidth > 0
    assert traced.bytes == 6 * 6 * (64 * 64 + 64) * 4  # steps x layers


def test_figures_of_a_known_job(tmp_path):
    paths = generator.generate(tmp_path, 4, 400, 0.2, late=2)
    found = report(paths)
    assert found.delays[0].rank == 2
    assert found.delays[0].late_ns == pytest.approx(3_000_000, rel=0.01)
    assert found.delays[0].cost_ns == pytest.approx(9_000_000, rel=0.01)
    assert [(o.op, o.count, o.bytes, o.ranks) for o in found.operations] == [
        ("all_reduce", 40, 40 * 4096, 4)
    ] * 2
    for one in found.operations:
        # They leave 20 us after the last arrival: 2 (n-1)/n x bytes / time.
        assert one.bus_bandwidth == pytest.approx(1.5 * 4096 / 20e-6, rel=0.2)
        assert one.time_ns == one.waiting_ns + one.transfer_ns
        assert one.overlap == 0
    assert max(o.most_skew_ns for o in found.operations) == pytest.approx(3_000_000, rel=0.01)
    assert sum(r.last for r in found.ranks) == pytest.approx(1)
    assert [r.operations for r in found.ranks] == [80] * 4


def test_a_union_of_intervals():
    busy = _union(np.asarray([10, 12, 30, 50]), np.asarray([20, 15, 40, 60]))
    begin, end = np.asarray([0, 11, 15, 18, 65]), np.asarray([5, 13, 35, 55, 70])
    assert busy.within(begin, end).tolist() == [0, 2, 10, 17, 0]
    none = _union(np.zeros(0, np.int64), np.zeros(0, np.int64))
    assert none.within(begin, end).tolist() == [0] * 5


def test_messages_are_matched(tmp_path):
    """A receive waits for its send; a send does not wait."""

    def rank(comm):
        x = torch.ones(1000)
        if comm.get_rank() == 0:
            comm.recv(x, 1, False)
        else:
            comm.send(x, 0, False)

    prof = torch.profiler.profile()
    prof.start()
    run_ranks(rank, 2, store=HashStore())
    prof.stop()
    prof.export_chrome_trace(str(tmp_path / "a.json"))
    found = report([tmp_path / "a.json"])
    by_op = {o.op: o for o in found.operations}
    assert by_op["send"].waiting_ns == 0
    assert (by_op["recv"].count, by_op["recv"].bytes, by_op["recv"].late_rank) == (1, 4000, -1)
    assert [r.rank for r in found.ranks] == [0, 1]


def test_rings_need_no_profiler():
    def rank(comm):
        for _ in range(5):
            comm.all_reduce(torch.ones(256), ReduceOp.SUM, False)

    run_ranks(rank, 3, name="rings-of-report")
    found = report([recorder_path()])
    (mine,) = [o for o in found.operations if o.group == "rings-of-report"]
    assert (mine.op, mine.count, mine.bytes, mine.ranks, mine.overlap) == ("all_reduce", 5, 5 * 1024, 3, None)


def test_the_command(tmp_path):
    paths = [str(p) for p in generator.generate(tmp_path, 3, 100, 0.2, late=1)]
    page = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["profile", "report", *paths, "--html", str(page)])
    assert done.exit_code == 0, done.output
    assert "rank 1 came 3" in done.output.replace("\n", " ")
    text = page.read_text()
    assert "all_reduce" in text
    assert "Rank 1 makes the others wait" in text
    assert "rank 1 came 3" in text
    assert "default-src 'none'" in text
    assert not re.search(r"https?://|url\(['\"]?[^#]|@import|fetch\(| src=| href=", text)
    done = CliRunner().invoke(app, ["profile", "report", *paths, "--json"])
    data = json.loads(done.stdout)
    assert data["delays"][0]["rank"] == 1
    assert {"group", "op", "bus_bandwidth", "skew_ns", "late_rank"} <= set(data["operations"][0])


def test_the_page_of_64_ranks_is_small(tmp_path):
    """Also where the job has more operations and delays than the page shows."""
    found = report(generator.generate(tmp_path, 64, 100, 0.2, late=2))
    page = figures_html.page(found)
    assert len(page.encode()) < 120_000
    assert len(re.findall(r'class="target"', page)) == 2 * 64  # a column of each rank in both charts
    one = found.operations[0]
    found.operations = [replace(one, op=f"operation_{i}", group=f"a group {i}") for i in range(400)]
    page = figures_html.page(found)
    assert "The first 256 of 400" in page
    assert len(page.encode()) < 500_000


def test_thousands_of_ranks_are_sampled_in_the_chart(tmp_path):
    found = report(generator.generate(tmp_path, 3, 100, 0.2, late=1))
    one = found.ranks[0]
    found.ranks = [replace(one, rank=r, cost_ns=10**12 if r == 1717 else r) for r in range(3000)]
    page = figures_html.page(found)
    assert "128 of 3,000 ranks are drawn" in page
    assert "rank 1717: the others wait 16.7 min for it" in page
    assert "Rank 1717 makes the others wait" in page
    assert len(page.encode()) < 500_000


def test_a_job_in_which_nobody_waits_long(tmp_path):
    found = report(generator.generate(tmp_path, 3, 100, 0.2, late=1))
    for rank in found.ranks:
        rank.cost_ns = found.span_ns // 1000
    page = figures_html.page(found)
    assert "card verdict good" in page
    assert "No rank holds the others up" in page
    found.delays = []
    page = figures_html.page(found)
    assert "no rank waits for another" in page
    assert "The largest delays" not in page


def test_names_from_traces_cannot_become_elements(tmp_path):
    found = report(generator.generate(tmp_path, 3, 100, 0.2, late=1))
    evil = "<script>alert(1)</script>"
    found.source, found.remarks = evil, [evil]
    for one in found.operations:
        one.op = one.group = evil
    for delay in found.delays:
        delay.op = delay.group = evil
    assert evil not in figures_html.page(found)
    assert figures_html.page(found).count("&lt;script&gt;") > 10


def test_the_text_fits_a_terminal(tmp_path):
    """On a terminal of 80 columns and in a pipe, no name and no figure is cut."""
    paths = generator.generate(tmp_path, 3, 100, 0.2, late=1)
    out = io.StringIO()
    Console(file=out, width=80).print(render(report(paths)))
    text = out.getvalue()
    assert "\u2026" not in text
    for word in ("all_reduce", "group0", "waiting", "bus/s", "late rank", "overlap", "cost others", "3 ms"):
        assert word in text


def test_nothing_to_report(tmp_path):
    with pytest.raises(TraceError, match="does not exist"):
        report([tmp_path / "none"])
    with pytest.raises(TraceError, match="no trace of unicomm, ring or dump"):
        report([tmp_path])
    (tmp_path / "a.json").write_text('{"traceEvents": []}')
    with pytest.raises(TraceError, match="holds no table"):
        report([tmp_path / "a.json"])
    done = CliRunner().invoke(app, ["profile", "report", str(tmp_path / "a.json")])
    assert done.exit_code == 2
