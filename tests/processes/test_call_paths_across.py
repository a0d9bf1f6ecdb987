"""Call paths of real DDP and FSDP2 programs, read by another process while one rank sleeps."""

import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.commands import clean_environment, torchrun
from unicomm.flight_recorder.analysis.analyze import analyze
from unicomm.flight_recorder.ring.reader import read_folder
from unicomm.flight_recorder.table.load import load

pytestmark = pytest.mark.processes

PROGRAM = Path(__file__).parent / "programs" / "wrapped.py"
LINES = PROGRAM.read_text().splitlines()


def line_of(text):
    return next(number for number, line in enumerate(LINES, 1) if text in line)


@pytest.fixture(params=["ddp", "fsdp2"])
def job(request, rings):
    env = clean_environment() | {
        "UNICOMM_TRACE_DIR": str(rings),
        "TORCH_DISTRIBUTED_USE_TORCHCOMMS": "1",
        "UNICOMM_BACKEND": "shm",
    }
    job = subprocess.Popen(
        [*torchrun(2), str(PROGRAM), request.param],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert "asleep" in job.stdout.readline()
    yield request.param
    job.send_signal(signal.SIGTERM)
    job.wait(60)


def test_wrappers(job, rings):
    deadline = time.monotonic() + 30
    while True:
        report = analyze(load([rings]), stuck_after=0.3)
        if report.main.culprits or time.monotonic() > deadline:
            break
    steps = {line_of("loss = model("), line_of("loss.backward()"), line_of("return self.norm")}
    wrapper = {"ddp": "DDP", "fsdp2": "FSDP"}[job]
    # The sleeping rank is blamed, at the line of the victim's call, which is the user's.
    assert report.main.culprits == [1]
    victim = next(c for c in report.main.call_paths if c.ranks == [0])
    own = victim.path[victim.user]
    assert (own.file, own.line) == (str(PROGRAM), line_of("loss = model(")), victim
    assert [f.library for f in victim.path[: victim.user]] in ([wrapper], [wrapper, wrapper])
    functions = [f.function for f in victim.path[victim.user :]]
    assert functions == ["step", "train", "main", "<module>"]
    assert victim.path[victim.user + 2].line == line_of("train(model, 1)")
    # In all records of the steps the user's line is one of the program's, however torch came there.
    read, remarks = read_folder(rings)
    assert not remarks
    assert len(read) == 2
    for ring in read:
        own_lines = {ring.frame(record).line for record in ring.records}
        assert {ring.frame(record).file for record in ring.records} == {str(PROGRAM)}
        assert own_lines & steps
        libraries = {f.library for record in ring.records for f in ring.call_path(record)}
        assert wrapper in libraries
        assert "torch" not in libraries
        assert len(ring.frames) < 100
