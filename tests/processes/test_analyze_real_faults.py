"""Faults in running jobs: the analyzer reads the ranks' rings while they hang, are stopped or are dead."""

import json
import signal
import sys
import time

import pytest

from tests.processes.forked_interpreters import run
from tests.processes.waits import slowdown
from tests.wait_tables import waits
from unicomm.flight_recorder.analysis.analyze import analyze
from unicomm.flight_recorder.table.load import load

pytestmark = pytest.mark.processes


def report_of(rings, verdict, affected, within=20.0, group=None):
    """Returns the first report with this verdict, so many ranks and this group, or the last one."""
    deadline = time.monotonic() + within
    while True:
        report = analyze(load([rings]), stuck_after=0.3)
        main = report.main
        complete = len(main.culprits) + len(main.victims) >= affected and group in (None, main.group)
        if (main.verdict.value == verdict and complete) or time.monotonic() > deadline:
            return report


FAULTS = [
    ("never", "blocked-outside-the-communicator", [2]),
    ("operation", "wrong-operation", [2]),
    ("elements", "size-mismatch", [2]),
    ("dtype", "dtype-mismatch", [2]),
    ("root", "root-mismatch", [2]),
    ("reduction", "reduction-mismatch", [2]),
    ("cycle", "wait-cycle-across-groups", [0, 1]),
    ("crossed", "wait-cycle-across-groups", [0, 1]),
    ("queued", "wait-cycle-across-groups", [0, 1]),
    ("lone", "unmatched-send-or-recv", [2]),
]


@pytest.mark.parametrize(("fault", "verdict", "culprits"), FAULTS)
def test_injected(start, rings, fault, verdict, culprits):
    job = start("injected.py", 4, fault, 2)
    line = job.next("ready")[0]["line"]
    job.tell()
    job.next("calling")
    report = report_of(rings, verdict, 4)
    assert (report.main.verdict.value, report.main.culprits) == (verdict, culprits), report.findings
    # On a busy machine a rank may be slow besides, and then the report is right to say so.
    assert {f.verdict.value for f in report.findings} - {"alive-but-slow"} == {verdict}
    assert report.findings[0] is report.main
    if fault == "never":
        assert report.main.victims == [0, 1, 3]
        assert f"injected.py:{line}" in report.main.sentence
        assert str(job[2].pid) in " ".join(report.main.next_steps)
    if fault == "cycle":
        assert {e.group for e in report.main.edges} == {"main", "pair"}
        assert all("injected.py:" in e.where for e in report.main.edges)


def test_a_healthy_job(start, rings):
    job = start("injected.py", 3, "nothing", 0)
    job.next("ready")
    good = {
        "all-good",
        "alive-but-slow",
    }  # a rank may be slow on a busy machine, and then it is right to say so
    assert {f.verdict.value for f in analyze(load([rings])).findings} <= good
    job.tell()
    job.next("calling")
    job.next("done")
    assert {f.verdict.value for f in analyze(load([rings])).findings} <= good


@pytest.mark.parametrize(("number", "verdict"), [("SIGKILL", "process-dead"), ("SIGSTOP", "process-stopped")])
def test_a_rank_is_lost_and_the_command_names_it(start, rings, number, verdict):
    """Rank, operation and line within five seconds of the fault; more where cores have more to run."""
    job = start("injected.py", 4, "never", 1)
    line = job.next("ready")[0]["line"]
    job.tell()
    job.next("calling")
    struck = time.monotonic()
    job[1].signal(signal.Signals[number])
    found = report_of(rings, verdict, 4).main
    assert time.monotonic() - struck < 5 * slowdown()
    assert (found.verdict.value, found.culprits, found.operation) == (verdict, [1], "all_reduce")
    assert found.victims == [0, 2, 3]
    assert f"injected.py:{line}" in found.sentence
    command = [
        sys.executable,
        "-m",
        "unicomm",
        "trace",
        "analyze",
        str(rings),
        "--json",
        "--stuck-after",
        "0",
    ]
    done = run(command)
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["verdict"] == verdict
    if number == "SIGSTOP":
        job[1].signal(signal.SIGCONT)


def test_a_timeout_that_was_caught_is_over(start, rings, eventually):
    """The first operation failed by rank 0; now rank 2 is missing in another communicator."""
    job = start("injected.py", 3, "caught", 2)
    job.next("ready")
    job.tell()
    job.next("calling")
    job.next("created")
    eventually(lambda: waits(job[1].pid))
    job[2].tell()  # gives up half a second later
    for rank in job.but(0):
        rank.next("caught")
    job[0].tell()
    job.next("together")
    # Until ranks 0 and 1 have issued the operation of the other one, the first failure is what they wait in.
    report = report_of(rings, "blocked-outside-the-communicator", 3, group="other")
    assert [(f.group, f.culprits, f.victims) for f in report.findings] == [("other", [2], [0, 1])]


def test_after_the_timeout(start, rings, eventually):
    """All but the guilty rank have given up."""
    job = start("injected.py", 3, "never", 0, 1.0)
    job.next("ready")
    job.tell()
    job.next("calling")
    eventually(lambda: waits(job[1].pid))
    job[2].tell()  # gives up a second later
    for rank in job.but(0):
        rank.next("error")
    report = report_of(rings, "blocked-outside-the-communicator", 3)
    assert report.main.culprits == [0]
    assert any("timeout" in line for line in report.main.evidence)
