"""Two hosts of which one is read: its ranks are innocent, and the other host's ranks are unknown."""

import json
import signal
import sys
import time

import pytest

from tests.commands import clean_environment
from tests.processes.forked_interpreters import run
from tests.processes.rank_processes import agent_environments, new_store
from unicomm.flight_recorder.analysis.analyze import analyze
from unicomm.flight_recorder.table.load import load

pytestmark = pytest.mark.processes

HOST = 2  # ranks on a host


@pytest.fixture
def hosts(start, tmp_path):
    """Starts four ranks as a launcher does on two hosts, each with its own folder of rings."""
    folders = [tmp_path / f"host{i}" for i in (0, 1)]
    for folder in folders:
        folder.mkdir(mode=0o700)
    store = new_store()
    environments = agent_environments(4, store, clean_environment())
    for rank, environment in enumerate(environments):
        environment["LOCAL_RANK"] = str(rank % HOST)
        environment["LOCAL_WORLD_SIZE"] = str(HOST)
        environment["UNICOMM_TRACE_DIR"] = str(folders[rank // HOST])
    yield start("injected.py", None, "never", 2, environments=environments), folders
    del store


def report_of(folders, verdict, within=20.0):
    """The report as soon as it has the verdict, or the last one in time."""
    deadline = time.monotonic() + within
    while True:
        report = analyze(load(folders), stuck_after=0.3)
        if report.main.verdict.value == verdict or time.monotonic() > deadline:
            return report


def test_one_host_is_read(hosts):
    job, (here, there) = hosts
    job.next("ready")
    job.tell()
    job.next("calling")
    report = report_of([here], "not-read")
    main = report.main
    assert (main.verdict.value, main.culprits, main.victims) == ("not-read", [], [0, 1])
    assert report.not_read == [2, 3]
    assert main.sentence.startswith("Ranks 2, 3 were not read. ")
    assert "not-read: ranks 2, 3" in " ".join(r.message for r in report.remarks)
    done = run([sys.executable, "-m", "unicomm", "trace", "analyze", here, "--json", "--stuck-after", "0.3"])
    assert done.returncode == 1
    assert json.loads(done.stdout)["input"]["not_read"] == [2, 3]
    both = report_of([here, there], "blocked-outside-the-communicator")
    assert (both.main.verdict.value, both.main.culprits) == ("blocked-outside-the-communicator", [2])
    assert both.not_read == []


def test_a_rank_of_the_other_host_dies(hosts):
    """The ranks that were read lose it and raise: none of them is the culprit, and rank 3 is not dead."""
    job, (here, there) = hosts
    job.next("ready")
    job.tell()
    job.next("calling")
    job[2].signal(signal.SIGKILL)
    for rank in job.but(2):
        rank.next("error")
    main = report_of([here], "not-read").main
    assert (main.verdict.value, main.culprits, main.victims) == ("not-read", [], [0, 1])
    assert any("the connection to at least one of them was lost" in line for line in main.evidence)
    both = report_of([here, there], "process-dead").main
    assert (both.verdict.value, both.culprits) == ("process-dead", [2])


def test_a_ring_that_is_missing_on_a_host_that_was_read(hosts):
    """Its rank left no ring although its neighbour did: it is suspected."""
    job, (here, there) = hosts
    job.next("ready")
    job.tell()
    job.next("calling")
    [gone] = there.glob("*rank00002-*.ucring")
    gone.unlink()
    report = report_of([here, there], "never-joined")
    assert (report.main.verdict.value, report.main.culprits) == ("never-joined", [2])
    assert report.not_read == []
    assert report.missing == [2]
