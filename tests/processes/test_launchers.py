"""Ranks of every launcher find each other, and every operation is right among real processes."""

import json
import os
import signal
import subprocess

import pytest

from tests import ROOT
from tests.commands import clean_environment, torchrun
from tests.ports import free_port
from tests.processes.rank_processes import PROGRAMS

pytestmark = pytest.mark.processes

WITHIN = 250.0  # seconds: interpreters start from scratch, and each imports torch

# What each launcher tells its ranks, as far as it is read, where all of them are on one host.
LAUNCHERS = {
    "Open MPI": {
        "OMPI_COMM_WORLD_RANK": "{rank}",
        "OMPI_COMM_WORLD_SIZE": "{size}",
        "OMPI_COMM_WORLD_LOCAL_RANK": "{rank}",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "{size}",
        "PMIX_NAMESPACE": "prterun-host-1@1",
        "PMIX_RANK": "{rank}",
    },
    "PMI": {
        "PMI_RANK": "{rank}",
        "PMI_SIZE": "{size}",
        "MPI_LOCALRANKID": "{rank}",
        "MPI_LOCALNRANKS": "{size}",
    },
    "PALS": {
        "PALS_RANKID": "{rank}",
        "PMI_SIZE": "{size}",
        "PALS_LOCAL_RANKID": "{rank}",
        "PALS_LOCAL_SIZE": "{size}",
        "PALS_APID": "7d1c9c9c",
    },
    "Slurm": {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "{rank}",
        "SLURM_LOCALID": "{rank}",
        "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_TASKS": "{size}",
        "SLURM_STEP_TASKS_PER_NODE": "{size}",
    },
}
PLAIN = {"TORCHCOMM_RANK": "{rank}", "TORCHCOMM_SIZE": "{size}"}


def run(command, rings, **settings):
    """Runs a command to its end; what it printed on stdout. Its process group is killed at the deadline."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment() | {"UNICOMM_TRACE_DIR": str(rings)} | settings,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=WITHIN)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"{command} did not end within {WITHIN:g} s\n{out}\n{err}")
    assert process.returncode == 0, f"exit code {process.returncode}\n{out}\n{err}"
    return out


def check_conformance(events, size, backends):
    assert sorted((said["backend"], said["rank"]) for said in events) == sorted(
        (backend, rank) for backend in backends for rank in range(size)
    )
    for said in events:
        assert said["event"] == "conforms"
        assert said["size"] == size
        assert said["operations"] == 19
        assert said["fewest"] >= 10


@pytest.mark.parametrize("ranks", [2, 4])
def test_torchrun(rings, ranks):
    out = run([*torchrun(ranks), str(PROGRAMS / "conform.py"), "shm", "gloo"], rings)
    check_conformance([json.loads(line) for line in out.splitlines()], ranks, ["shm", "gloo"])
    assert not list(rings.glob("*.ucring"))


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launchers_of_one_host_need_no_address(start, launcher):
    """The ranks meet by a file; nothing but the launcher's own variables is set."""
    template = json.dumps(LAUNCHERS[launcher])
    job = start("launcher.py", 1, 3, template, PROGRAMS / "conform.py", "shm", "gloo", environments=[{}])
    assert job.end(60) == [0], job
    check_conformance(job[0].events, 3, ["shm", "gloo"])


@pytest.mark.parametrize("launcher", ["Open MPI", "Slurm", "TORCHCOMM_RANK"])
def test_launchers_with_an_address(start, launcher):
    """Rank 0 hosts the store where MASTER_ADDR and MASTER_PORT say."""
    template = LAUNCHERS.get(launcher, PLAIN) | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    arguments = [2, json.dumps(template), PROGRAMS / "conform.py", "shm", "gloo"]
    job = start("launcher.py", 1, *arguments, environments=[{}])
    assert job.end(60) == [0], job
    check_conformance(job[0].events, 2, ["shm", "gloo"])


def test_training_under_torchrun(rings, tmp_path):
    check_training(tmp_path, lambda *args: run([*torchrun(2), *args], rings), "shm")


def test_training_over_gloo(start, tmp_path):
    def launch(script, *arguments):
        job = start("launcher.py", 1, 2, json.dumps(LAUNCHERS["PMI"]), script, *arguments, environments=[{}])
        assert job.end(60) == [0], job

    check_training(tmp_path, launch, "gloo")


def check_training(tmp_path, launch, backend):
    result = tmp_path / "result.json"
    launch(str(ROOT / "examples" / "digits.py"), "--epochs=4", f"--backend={backend}", f"--result={result}")
    figures = json.loads(result.read_text())
    assert figures["ranks"] == 2
    assert figures["identical"]
    assert len(figures["losses"]) == 4
    assert figures["losses"][-1] < figures["losses"][0] / 2
    assert figures["accuracy"] > 0.9
