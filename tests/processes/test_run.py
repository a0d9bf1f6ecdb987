"""`unicomm run` on one host: it is torchrun, and when ranks fail, it says why."""

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests import commands
from tests.commands import clean_environment
from tests.processes.rank_processes import PROGRAMS
from unicomm.flight_recorder.analysis.analyze import STUCK_AFTER
from unicomm.flight_recorder.table.load import load
from unicomm.flight_recorder.table.table import ENDED, KILLED, RUNNING
from unicomm.launch.run import job_folder as run_folder
from unicomm.launch.run import launcher as run

pytestmark = pytest.mark.processes

WITHIN = 100.0  # a hang, not a slow machine
FAULTS = PROGRAMS / "torch_faults.py"
FORKED = ("--run-path", "--start-method=fork")  # ranks that need not import torch


@pytest.fixture
def launch(start, tmp_path):
    """`launch(...)`: `unicomm run ...`; ends with the test, and its ranks with it."""
    started = []

    def make(*arguments):
        started.append(start("unicomm_run.py", None, *arguments, environments=[{}])[0])
        return started[-1]

    yield make
    for process in started:
        if process.exit_code is None:
            process.signal(signal.SIGTERM)
            process.end(WITHIN)


def ended(process):
    """(exit code, what was said) at its end."""
    return process.end(WITHIN), process.complaints


def folder_of(said):
    """Where the rings are, as it was said."""
    return Path(re.search(r"^rings of this host: (.*)$", said, re.MULTILINE).group(1))


def verdict_of(said):
    return " ".join(said.partition("what the flight recorder tells")[2].replace("│", " ").split())


def states(folder):
    return {source.rank: source.process for source in load([folder]).sources}


def hub_of(rings, eventually):
    """It says where it is once it listens, which may be after the ranks have begun."""

    def found():
        return [note for note in run_folder.running_hubs() if note.folder.startswith(str(rings))]

    eventually(found, WITHIN)
    [hub] = found()
    return hub


def line_of(text):
    source = FAULTS.read_text().splitlines()
    return next(i for i, line in enumerate(source, 1) if text in line)


# --- it is torchrun -----------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 3])
def test_options_and_arguments_are_passed_on(launch, rings, code, tmp_path):
    """Options of torchrun and of unicomm in any order; what stands behind the program is the program's."""
    process = launch(
        *("--rdzv-id=my-job", "--backend", "gloo", "--nproc_per_node=2", "--tee", "3", "--log-dir", tmp_path),
        *(PROGRAMS / "told.py", code, "--backend=mine", "--no-hub", "--help"),
    )
    status, said = ended(process)
    assert status == code, said
    told = [json.loads(line.partition("]:")[2]) for line in said.splitlines() if '"argv"' in line]
    # Of two that fail, the second may be ended before it says anything.
    assert {"0", "1"} >= {one["RANK"] for one in told} != set()
    assert code or len(told) == 2
    for one in told:
        assert one["argv"] == [str(code), "--backend=mine", "--no-hub", "--help"]
        assert one["WORLD_SIZE"] == "2"
        assert one["UNICOMM_BACKEND"] == "gloo"
        assert one["TORCH_DISTRIBUTED_USE_TORCHCOMMS"] == "1"
        assert Path(one["UNICOMM_TRACE_DIR"]).parent.parent == rings
        assert one["UNICOMM_JOB_TOKEN"] is None
    assert list(tmp_path.glob("*/attempt_0/0/stdout.log"))
    assert ("ChildFailedError" in said) == bool(code)
    assert (f"ended with exit code {code} before importing torch" in said) == bool(code)
    assert len(list(rings.iterdir())) == bool(code)


def test_a_torch_that_loads_no_backends_is_told(start):
    environment = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    arguments = ("--nproc_per_node=1", PROGRAMS / "told.py", 0)
    status, said = ended(start("unicomm_run.py", None, *arguments, environments=[environment])[0])
    assert status == 0, said
    assert "torch.distributed stays as it is: TORCH_DEVICE_BACKEND_AUTOLOAD=0" in said


def test_help_teaches(capsys):
    with pytest.raises(SystemExit) as at_once:
        run.main(["--help"])
    assert at_once.value.code == 0
    shown = capsys.readouterr().out
    for text in (
        "examples:",
        "--nnodes",
        "--rdzv-endpoint",
        "--backend",
        "--no-hub",
        "--trace-dir",
        "exit code:",
    ):
        assert text in shown
    assert all(len(line) <= 110 for line in run._EXAMPLES.splitlines())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--backend", "shn", "x.py"], "did you mean 'shm'"),
        (["--hub-port", "70000", "x.py"], "not a port"),
        (["--interface", "nonesuch0", "x.py"], "interface 'nonesuch0'"),
        (["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "a:b:c", "x.py"], "a:b:c"),
        (["--trace-dir", "/proc/nowhere/else", "x.py"], "/proc/nowhere"),
    ],
)
def test_bad_options_are_told_before_anything_starts(arguments, said, capsys, monkeypatch):
    monkeypatch.setattr(run, "HubProcess", None)
    assert run.main(arguments) == run.UNUSABLE
    assert said in capsys.readouterr().err


def test_a_weak_token(capsys, monkeypatch):
    pytest.importorskip("zmq")
    monkeypatch.setenv("UNICOMM_JOB_TOKEN", "weak")
    assert run.main(["x.py"]) == run.UNUSABLE
    assert "openssl rand" in capsys.readouterr().err


# --- ranks that fail ------------------------------------------------------------------------------------


def test_a_killed_rank(launch, rings):
    code, said = ended(launch("--nproc-per-node=3", FAULTS, "killed", 1))
    assert code == 128 + signal.SIGKILL
    assert "Root Cause (first observed failure)" in said.partition("what the flight recorder tells")[0]
    verdict = verdict_of(said)
    assert "process-dead" in verdict
    assert "Rank 1 was killed by SIGKILL after all_reduce #3" in verdict
    assert f"torch_faults.py:{line_of('the line that the others wait at')}" in verdict
    folder = folder_of(said)
    assert states(folder)[1] == KILLED
    assert f"unicomm trace analyze {folder}" in verdict
    assert [folder.parent] == list(rings.iterdir())
    assert not [note for note in run_folder.running_hubs() if note.folder == str(folder.parent)]


def test_a_rank_that_raises_and_a_restart(launch, tmp_path):
    """The verdict on each failed attempt stands where it failed; what counts is the end."""
    kept = tmp_path / "kept"
    process = launch(
        *("--nproc-per-node=2", "--max-restarts=1", "--trace-dir", kept, "--no-hub", *FORKED),
        *(FAULTS, "raises", 1),
    )
    code, said = ended(process)
    assert code == 0, said
    assert "rank 0 is done, UnicommProcessGroup" in said
    assert said.count("what the flight recorder tells") == 1
    assert "culprits rank 1" in verdict_of(said)
    [folder] = kept.iterdir()
    assert {"0", "1", "failed-0"} <= {path.name for path in folder.iterdir()}
    assert set(states(folder / "failed-0")) == {0, 1}
    assert states(folder / "1") == {0: ENDED, 1: ENDED}


def test_ranks_that_use_no_communicator_are_not_called_correct(launch, tmp_path):
    """Such as those of a program that chose torch's own Gloo, whose errors are consequences."""
    program = tmp_path / "train.py"
    program.write_text(
        "import torch\n"
        "raise RuntimeError('[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 10000ms for recv')"
    )
    code, said = ended(launch("--nproc-per-node", 1, program))
    assert code == 1
    assert verdict_of(said).endswith(
        "Nothing was recorded: no rank had created a communicator. The error above is the cause."
    )


def test_a_hung_rank_and_a_hub_that_is_stopped(launch, rings, tmp_path, eventually):
    """The others time out. The hub answers nothing, and the verdict comes all the same."""
    pytest.importorskip("zmq")
    process = launch("--nproc-per-node=2", "--hub-port=0", *FORKED, FAULTS, "hangs", 0, tmp_path / "pid")
    eventually((tmp_path / "pid").exists, WITHIN)
    hub = hub_of(rings, eventually)
    os.kill(hub.pid, signal.SIGSTOP)
    code, said = ended(process)
    assert code == 1
    verdict = verdict_of(said)
    assert "blocked-outside-the-communicator" in verdict
    assert "culprits rank 0" in verdict
    assert f"pid {(tmp_path / 'pid').read_text()}" in verdict
    assert states(folder_of(said)) == {0: RUNNING, 1: ENDED}
    assert not Path(f"/proc/{hub.pid}").exists()


def test_the_live_view_and_a_launcher_that_is_told_to_stop(launch, rings, tmp_path, eventually):
    """As a scheduler does with a job that hangs: what the ranks did stands in the log."""
    pytest.importorskip("zmq")
    process = launch("--nproc-per-node=2", "--hub-port=0", *FORKED, FAULTS, "waits", 1, tmp_path / "pid")
    eventually((tmp_path / "pid").exists, WITHIN)
    hub = hub_of(rings, eventually)

    def look():
        top = [sys.executable, "-m", "unicomm", "trace", "top", f"--connect=localhost:{hub.port}", "--json"]
        done = commands.run(top, within=WITHIN, env=clean_environment())
        jobs = json.loads(done.stdout)["jobs"] if done.returncode == 0 else []
        if not jobs or {r["rank"]: r["waits_for"] for r in jobs[0]["ranks"]} != {0: [1], 1: []}:
            return False
        return jobs[0]["ranks"][0]["operation"]["seconds"] > STUCK_AFTER

    eventually(look, WITHIN)
    os.kill(hub.pid, signal.SIGKILL)  # nobody needs it
    process.signal(signal.SIGTERM)
    code, said = ended(process)
    assert code == 128 + signal.SIGTERM
    assert "the launcher was stopped by SIGTERM" in said
    assert states(folder_of(said)) == {0: RUNNING, 1: RUNNING}
    assert "blocked-outside-the-communicator" in verdict_of(said)


# --- folders --------------------------------------------------------------------------------------------


def test_folders_of_the_past_are_cleaned(tmp_path):
    for _ in range(12):
        run_folder.JobFolder(tmp_path).close(keep=True)
    running = run_folder.JobFolder(tmp_path)
    old = sorted(tmp_path.glob("run-*"))[-2]
    os.utime(old, (1, 1))
    (tmp_path / "run-of-somebody").mkdir()  # no lock: not ours
    run_folder.clean(tmp_path)
    left = set(tmp_path.iterdir())
    assert running.path in left
    assert tmp_path / "run-of-somebody" in left
    assert len(left) <= 8 + 2
    running.close(keep=False)
    assert not running.path.exists()
