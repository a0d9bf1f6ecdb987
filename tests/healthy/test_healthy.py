"""Some runs of `make healthy`: legal programs without a finding, and a broken one with a finding."""

import shutil
import sys
import time

import pytest

from tests import ROOT
from tests.commands import clean_environment
from tests.healthy import conductor
from tests.healthy.legal import COLLECTIVES, Program
from tests.healthy.rank import OPERATIONS
from tests.processes.forked_interpreters import run
from tests.processes.rank_processes import ForkServer, Job, agent_environments, new_store
from unicomm.flight_recorder.analysis.analyze import analyze
from unicomm.flight_recorder.analysis.verdict import Finding, Report, Verdict
from unicomm.flight_recorder.table.load import load

FEW = [range(1, 5), range(1001, 1005)]


@pytest.fixture(scope="module")
def server():
    server = ForkServer()
    yield server
    server.close()


def test_programs_are_legal_and_differ():
    seen, shapes = set(), set()
    for seed in range(100):
        program = Program.of(seed)
        assert program == Program.of(seed)
        shapes.add((program.backend, program.size))
        made = {0}
        for step in program.steps:
            seen.add(step.what)
            if step.what == "split":
                made.add(step.group)
            assert step.group in made
            members = program.groups[step.group]
            assert len(set(members)) == len(members) >= 2
            assert step.root < len(members)
            assert all(a != b and max(a, b) < len(members) for a, b in step.pairs)
    assert seen == {*COLLECTIVES, "message", "batch", "split", "finalize", "wait"}
    assert set(COLLECTIVES) == set(OPERATIONS)
    assert len(shapes) == 6


def play(server, seed, kept):
    """Plays a seed, up to three times if nothing is found but slow ranks.

    A busy machine makes ranks slow, but not in each run. A false finding comes again, as the program does.
    """
    for _ in range(3):
        run = conductor.play(server, seed, kept)
        if {verdict for _, verdict, _, _ in run.findings} != {Verdict.SLOW.value}:
            break
        shutil.rmtree(kept / f"seed{seed}")
    return run


@pytest.mark.processes
@pytest.mark.parametrize("seeds", FEW, ids=str)
def test_nothing_is_found(server, seeds, tmp_path):
    runs = [play(server, seed, tmp_path) for seed in seeds]
    assert [run.findings for run in runs] == [[]] * len(runs)
    assert all(run.analyses == 4 and run.operations > 20 for run in runs)
    assert not list(tmp_path.iterdir())


@pytest.mark.processes
def test_a_program_that_is_not_legal_is_found(server, tmp_path):
    """The same ranks, but one leaves out a step: the runs above could fail."""
    rings = tmp_path / "rings"
    rings.mkdir(mode=0o700)
    store = new_store()
    base = clean_environment() | {"UNICOMM_TRACE_DIR": str(rings), "PYTHONPATH": str(ROOT)}
    environments = agent_environments(Program.of(2).size, store, base)
    with Job(server, str(conductor.RANK), ["2", "broken"], environments, store) as job:
        job.next("running")
        deadline = time.monotonic() + 30
        not_yet = (Verdict.GOOD, Verdict.SLOW)  # on a busy machine a rank may be slow before the job is stuck
        while (report := analyze(load([rings]), stuck_after=0.3)).main.verdict in not_yet:
            assert time.monotonic() < deadline, report
    assert report.main.verdict is not Verdict.SLOW


def test_a_run_with_a_finding_is_counted(tmp_path, capsys):
    bad = conductor.Run(7, 2, "shm", 2)
    bad.judge("over", Report([Finding(Verdict.GOOD)], present=2, entries=5))
    assert not bad.findings
    bad.judge("ended", Report([Finding(Verdict.SLOW, [1], sentence="late")], present=2, entries=9))
    bad.judge("dumps", Report([Finding(Verdict.GOOD)], present=1, missing=[1]))
    assert [f[:3] for f in bad.findings] == [
        ("ended", "alive-but-slow", [1]),
        ("dumps", "no ring of some ranks", [1]),
    ]
    assert (bad.analyses, bad.operations) == (3, 9)
    said = conductor.summary([bad, conductor.Run(8, 3, "gloo", 2, 4, 90)])
    assert said.startswith("2 runs (1 over gloo, 1 over shm), 7 analyses, 99 operations")
    assert said.endswith("1 runs with a finding")


@pytest.mark.processes
def test_the_command_goes_on_where_it_stopped(tmp_path):
    log = tmp_path / "runs.jsonl"
    command = [sys.executable, "-m", "tests.healthy.conductor", "--seed", "11", "--log", log]
    assert "1 runs" in run([*command, "--runs", "1"], nests=True).stdout
    first = log.read_text()
    done = run([*command, "--runs", "2"], nests=True)
    assert done.returncode == 0, done.stdout
    assert log.read_text().startswith(first)
    assert len(log.read_text().splitlines()) == 2
