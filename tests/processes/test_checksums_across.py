"""A bit of one rank's memory flips: named within that step, and found again in the rings of the runs."""

import json
import sys

import pytest

from tests.backends.mpi.mpi_jobs import NAMES, mpiexec
from tests.processes.forked_interpreters import run
from tests.processes.rank_processes import PROGRAMS
from unicomm.flight_recorder.analysis.analyze import analyze
from unicomm.flight_recorder.analysis.diff import compare
from unicomm.flight_recorder.table.load import load

pytestmark = pytest.mark.processes
STEP = 3  # of checksums.py; each step has an all_reduce and an all_gather_single
SEQ = 2 * STEP - 1
PLACES = [("shm", 3), ("gloo", 3), ("abb", 3), ("abab", 4)]
REDUCTIONS = ["ordinary", "reproducible"]


def checked(errors, size, victim, line):
    """All ranks were told within the step: rank, operation, number and line."""
    for rank, error in enumerate(errors):
        assert (error["type"], error["step"]) == ("SilentCorruptionError", STEP), error
        assert (error["op"], error["seq"], error["rank"]) == ("all_reduce", SEQ, rank)
        assert error["culprits"] == [victim], error
        assert f"checksums.py:{line}" in error["text"]
        assert f"rank {victim}: checksum" in error["text"]
    assert len(errors) == size


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(("place", "size"), PLACES)
def test_a_result_with_a_flipped_bit(start, rings, place, size, reduction):
    job = start("checksums.py", size, place, "result", 1, reduction)
    line = job.next("line")[0]["all_reduce"]
    checked(job.next("error"), size, 1, line)
    job.tell()
    assert set(job.end()) == {1}
    report = analyze(load([rings]))
    assert report.main.verdict.value == "silent-corruption", report.findings
    assert (report.main.culprits, report.main.seq_num, report.main.operation) == ([1], SEQ, "all_reduce")
    assert f"checksums.py:{line}" in report.main.sentence
    assert {f.verdict.value for f in report.findings} <= {"silent-corruption", "alive-but-slow"}, (
        report.findings
    )


def test_two_ranks_are_both_named(start, rings):
    job = start("checksums.py", 2, "shm", "result", 0)
    job.next("line")
    for error in job.next("error"):
        assert error["culprits"] == [0, 1]
        assert "no majority" in error["text"]
    job.tell()
    job.end()
    main = analyze(load([rings])).main
    assert (main.verdict.value, main.culprits) == ("silent-corruption", [0, 1])
    assert "no majority" in main.sentence


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.timeout(330)
def test_on_mpi(name, tmp_path):
    for reduction in REDUCTIONS:
        rings = tmp_path / reduction
        rings.mkdir(mode=0o700)
        settings = {"UNICOMM_TRACE_DIR": str(rings), "UNICOMM_TRACE_KEEP": "always"}
        ended = mpiexec(name, 3, PROGRAMS / "checksums.py", "mpi", "result", "2", reduction, env=settings)
        line = ended.by_rank("line")[0]["all_reduce"]
        checked(ended.by_rank("error"), 3, 2, line)
        main = analyze(load([rings])).main
        assert (main.verdict.value, main.culprits, main.seq_num) == ("silent-corruption", [2], SEQ)
        healthy = mpiexec(name, 3, PROGRAMS / "checksums.py", "mpi", "none", "0", reduction)
        assert len({said["sum"] for said in healthy.by_rank("weights")}) == 1, healthy.text


def test_under_torch_distributed_with_a_tensor_that_is_not_contiguous(start, rings):
    job = start("checksums.py", 3, "torch", "result", 2)
    line = job.next("line")[0]["all_reduce"]
    for error in job.next("error"):
        assert (error["op"], error["culprits"]) == ("all_reduce", [2])
        assert f"checksums.py:{line}" in error["text"]
    job.tell()
    job.end()
    assert analyze(load([rings])).main.culprits == [2]


@pytest.fixture(scope="module")
def command():
    """Runs `unicomm` with these arguments and returns (exit code, output)."""

    def call(*arguments):
        done = run([sys.executable, "-m", "unicomm", *map(str, arguments)], within=120)
        return done.returncode, done.stdout

    return call


def finished(start, folder, *arguments, size=3):
    folder.mkdir(mode=0o700)
    settings = {"UNICOMM_TRACE_DIR": str(folder), "UNICOMM_TRACE_KEEP": "always"}
    job = start("checksums.py", size, *arguments, settings=settings)
    line = job.next("line")[0]["all_reduce"]
    sums = {said["sum"] for said in job.next("weights")}
    assert job.end() == [0] * size
    return line, sums


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("place", ["shm", "gloo", "abb"])
def test_where_two_runs_part(start, tmp_path, command, place, reduction):
    good, bad, again = (tmp_path / name for name in ("good", "bad", "again"))
    line, right = finished(start, good, place, "none", 0, reduction)
    _, wrong = finished(start, bad, place, "input", 2, reduction)
    _, same = finished(start, again, place, "none", 0, reduction)
    assert right == same != wrong
    assert len(right) == 1

    code, text = command("trace", "diff", good, again)
    assert code == 0, text
    assert "the data of" in text
    code, text = command("trace", "diff", good, bad, "--json")
    first = json.loads(text)["data"]["first"]
    assert code == 1
    assert (first["input_ranks"], first["output_ranks"]) == ([2], [0, 1, 2])
    assert (first["group"], first["seq_num"]) == ("main", SEQ)
    assert first["operation"].startswith("all_reduce float32[5000]")
    assert first["where"].endswith(f"checksums.py:{line}")
    _, text = command("trace", "diff", good, bad)
    assert "rank 2" in text
    assert "the input differs" in " ".join(text.split())
    # Each run by itself is good.
    assert analyze(load([bad])).main.verdict.value in ("all-good", "alive-but-slow")


def test_reproducible_runs_have_the_same_data_on_every_backend(start, tmp_path):
    folders = [tmp_path / place for place in ("shm", "gloo", "abb")]
    sums = [finished(start, folder, folder.name, "none", 0, "reproducible")[1] for folder in folders]
    assert sums[0] == sums[1] == sums[2]
    first, *others = (load([folder]) for folder in folders)
    for other in others:
        data = compare(first, other).data
        assert data.first is None
        assert data.compared > 20


def test_a_message_with_a_flipped_bit(start, tmp_path):
    folder = tmp_path / "run"
    finished(start, folder, "shm", "message", 1)
    main = analyze(load([folder])).main
    assert (main.verdict.value, main.culprits, main.operation) == ("silent-corruption", [0, 1], "send")
    assert main.seq_num == STEP
