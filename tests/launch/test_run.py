"""`unicomm run` on one host: it is torchrun, and when ranks fail, it says why."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from unicomm.flight_recorder.folder import private_folder
from unicomm.flight_recorder.readers import load
from unicomm.flight_recorder.table import ENDED, KILLED, RUNNING
from unicomm.launch import run, run_folder

PROGRAMS = Path(__file__).parent / "programs"
WITHIN = 100.0  # a hang, not a slow machine
_FOREIGN = ("UNICOMM_", "TORCH", "PET_", "OMPI_", "PMI", "SLURM_", "MASTER_", "LOCAL_", "RANK", "WORLD_SIZE")


def start(*arguments, **more):
    """`unicomm run`, in a process group of its own."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}
    return subprocess.Popen(
        [sys.executable, "-m", "unicomm", "run", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env | {"OMP_NUM_THREADS": "1"} | more,
        start_new_session=True,
    )


@pytest.fixture
def launch():
    """`launch(...)`: a started `unicomm run`; nothing of it is left after the test."""
    started = []

    def make(*arguments, **more):
        started.append(start(*arguments, **more))
        return started[-1]

    yield make
    for process in started:
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=WITHIN)


def end(process):
    """(exit code, stdout, stderr) at its end."""
    out, err = process.communicate(timeout=WITHIN)
    return process.returncode, out, err


def folder_of(err):
    """Where the rings are, as it was said."""
    return Path(re.search(r"^rings of this host: (.*)$", err, re.MULTILINE).group(1))


def states(folder):
    return {source.rank: source.process for source in load([folder]).sources}


def own_folders(process):
    """What a launcher's process has in the user's private folder."""
    return list(private_folder().glob(f"run-*-{process.pid}-*"))


def line_of(text):
    source = (PROGRAMS / "faulty.py").read_text().splitlines()
    return next(i for i, line in enumerate(source, 1) if text in line)


# --- it is torchrun -----------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize("code", [0, 3])
def test_options_and_arguments_are_passed_on(launch, code, tmp_path):
    """Options of torchrun and of unicomm in any order; what stands behind the program is the program's."""
    process = launch(
        *("--rdzv-id=my-job", "--backend", "gloo", "--nproc_per_node=2", "--tee", "3", "--log-dir", tmp_path),
        *(PROGRAMS / "environment.py", code, "--backend=mine", "--no-hub", "--help"),
    )
    status, out, err = end(process)
    assert status == (1 if code else 0), err
    said = [json.loads(line.partition(":")[2]) for line in out.splitlines() if "argv" in line]
    assert sorted(one["RANK"] for one in said)[0] == "0"
    for one in said:
        assert one["argv"] == [str(code), "--backend=mine", "--no-hub", "--help"]
        assert one["WORLD_SIZE"] == "2"
        assert one["UNICOMM_BACKEND"] == "gloo"
        assert one["TORCH_DISTRIBUTED_USE_TORCHCOMMS"] == "1"
        assert f"-{process.pid}-" in one["UNICOMM_TRACE_DIR"]
        assert one["UNICOMM_JOB_TOKEN"] is None
    assert list(tmp_path.glob("*/attempt_0/0/stdout.log"))
    assert ("ChildFailedError" in err) == bool(code)
    assert ("Nothing was recorded" in err) == bool(code)
    for folder in own_folders(process):
        assert code, f"{folder} was left"
        run_folder.shutil.rmtree(folder)


def test_help_teaches(capsys):
    with pytest.raises(SystemExit) as ended:
        run.main(["--help"])
    assert ended.value.code == 0
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
        (["--hub-port", "70000", "x.py"], "no port"),
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


@pytest.mark.processes
def test_a_killed_rank(launch, tmp_path):
    process = launch("--nproc-per-node=3", "--trace-dir", tmp_path, PROGRAMS / "faulty.py", "killed", 1)
    code, _, err = end(process)
    assert code == 1
    summary, _, verdict = err.partition("unicomm: what the flight recorder tells")
    assert "Root Cause (first observed failure)" in summary
    assert "process-dead" in verdict
    assert "Rank 1 was killed before all_reduce #4" in verdict
    assert f"faulty.py:{line_of('the line that the others wait at')}" in " ".join(verdict.split())
    folder = folder_of(err)
    assert folder.is_relative_to(tmp_path)
    assert states(folder)[1] == KILLED
    assert f"unicomm trace analyze {folder}" in err
    # Nothing else is kept, and nobody is left.
    assert not own_folders(process)
    assert not any(str(process.pid) in note.folder for note in run_folder.running_hubs())


@pytest.mark.processes
def test_a_rank_that_raises_and_a_restart(launch, tmp_path):
    """The verdict on each failed attempt stands where it failed; what counts is the end."""
    process = launch(
        *("--nproc-per-node=2", "--max-restarts=1", "--trace-dir", tmp_path, "--no-hub"),
        *(PROGRAMS / "faulty.py", "raises", 1),
    )
    code, out, err = end(process)
    assert code == 0, err
    assert "rank 0 is done, UnicommProcessGroup" in out
    assert "the first time only" in err
    assert err.count("what the flight recorder tells") == 1
    verdict = err.partition("what the flight recorder tells")[2]
    assert "culprits   rank 1" in verdict
    [kept] = tmp_path.iterdir()
    assert {"0", "1", "failed-0"} <= {path.name for path in kept.iterdir()}
    assert set(states(kept / "failed-0")) == {0, 1}
    assert states(kept / "1") == {0: ENDED, 1: ENDED}


@pytest.mark.processes
def test_a_hung_rank_and_a_hub_that_is_stopped(launch, tmp_path, eventually):
    """The others time out. The hub answers nothing, and the verdict comes all the same."""
    pytest.importorskip("zmq")
    process = launch(
        *("--nproc-per-node=2", "--hub-port=0", "--trace-dir", tmp_path),
        *(PROGRAMS / "faulty.py", "hangs", 0, tmp_path / "pid"),
    )
    reader = threading.Thread(target=process.stdout.read, daemon=True)
    reader.start()
    eventually((tmp_path / "pid").exists, WITHIN)
    [hub] = [note for note in run_folder.running_hubs() if note.folder.startswith(str(tmp_path))]
    os.kill(hub.pid, signal.SIGSTOP)
    err = process.stderr.read()
    assert process.wait(WITHIN) == 1
    verdict = " ".join(err.partition("what the flight recorder tells")[2].split())
    assert "blocked-outside-the-communicator" in verdict
    assert "culprits rank 0" in verdict
    assert f"pid {(tmp_path / 'pid').read_text()}" in verdict
    assert states(folder_of(err)) == {0: RUNNING, 1: ENDED}
    assert not Path(f"/proc/{hub.pid}").exists()


@pytest.mark.processes
def test_the_live_view_and_a_launcher_that_is_told_to_stop(launch, tmp_path, eventually):
    """As a scheduler does with a job that hangs: what the ranks did stands in the log."""
    pytest.importorskip("zmq")
    process = launch(
        *("--nproc-per-node=2", "--hub-port=0", "--trace-dir", tmp_path),
        *(PROGRAMS / "faulty.py", "waits", 1, tmp_path / "pid"),
    )
    eventually((tmp_path / "pid").exists, WITHIN)
    [hub] = [note for note in run_folder.running_hubs() if note.folder.startswith(str(tmp_path))]

    def look():
        top = [sys.executable, "-m", "unicomm", "trace", "top", f"--connect=localhost:{hub.port}", "--json"]
        done = subprocess.run(top, capture_output=True, text=True, timeout=WITHIN, check=False)
        jobs = json.loads(done.stdout)["jobs"] if done.returncode == 0 else []
        return jobs and {r["rank"]: r["waits_for"] for r in jobs[0]["ranks"]} == {0: [1], 1: []}

    eventually(look, WITHIN)
    os.kill(hub.pid, signal.SIGKILL)  # nobody needs it
    process.send_signal(signal.SIGTERM)
    code, _, err = end(process)
    assert code == 1
    assert "SignalException" in err
    assert states(folder_of(err)) == {0: RUNNING, 1: RUNNING}


# --- folders --------------------------------------------------------------------------------------------


def test_folders_of_the_past_are_cleaned(tmp_path):
    for _ in range(12):
        run_folder.RunFolder(tmp_path).close(keep=True)
    running = run_folder.RunFolder(tmp_path)
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
