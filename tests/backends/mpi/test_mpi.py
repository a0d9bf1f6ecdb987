"""The backend `mpi` under the mpiexec of each MPI wheel, many cases for each start."""

from __future__ import annotations

import json

import pytest

from tests.backends.mpi.mpi_jobs import NAMES, ROOT, WITHIN, alone, library, mpiexec
from unicomm.testing import conformance

pytestmark = [pytest.mark.processes, pytest.mark.timeout(WITHIN + 30)]


@pytest.mark.parametrize("name", NAMES)
def test_what_works_and_what_fails(name):
    ended = mpiexec(name, 4, "mpi_cases.py")
    failed = [line for line in ended.said if line["event"] == "failed"]
    assert not failed, ended.text + "\n".join(
        f"rank {f['rank']}, {f['case']}:\n{f['traceback']}" for f in failed
    )
    assert ended.code == 0, ended.text
    cases = [line["case"] for line in ended.by_rank("passed")]
    assert len(set(cases)) > 15
    assert len(cases) == 4 * len(set(cases)), cases
    conforms = ended.by_rank("conforms")
    assert sorted(line["size"] for line in conforms) == [2] * 2 + [3] * 3 + [4] * 4
    assert min(line["cases"] for line in conforms) > 20
    options = ended.by_rank("option")
    assert len(options) == 4 * len(conformance.OPTIONS)
    assert min(line["cases"] for line in options) > 9
    assert {line["name"] for line in options if line["differs"]} >= {
        option for option in conformance.OPTIONS if option.startswith("wire=")
    }
    assert len({(line["name"], line["sum"]) for line in options}) == len(conformance.OPTIONS)
    for line in ended.by_rank("timeout"):
        assert "rank 2 had not arrived" in line["text"]
        assert "mpi_faults.py" in line["text"]


@pytest.mark.parametrize("when", ["in an operation", "between operations"])
def test_a_killed_rank(when, tmp_path):
    """The others are told who is gone, and end, though MPI_Finalize would wait for it.

    Hydra ends all ranks when it sees one killed, whatever its options; so each is the child of a shell, which
    ends when both of the others have spoken.
    """
    wait = f"for i in $(seq 1200); do [ -e {tmp_path}/0 ] && [ -e {tmp_path}/1 ] && break; sleep 0.05; done"
    shell = ["sh", "-c", f'"$@"; code=$?; {wait}; exit $code', "sh"]
    options = ["-disable-auto-cleanup"]
    ended = mpiexec("MPICH", 3, "mpi_killed.py", str(tmp_path), when, options=options, within=shell)
    errors = ended.by_rank("error")
    assert [(e["rank"], e["type"], e["culprits"]) for e in errors] == [
        (0, "PeerLostError", [2]),
        (1, "PeerLostError", [2]),
    ], ended.text


@pytest.mark.parametrize("name", NAMES)
def test_several_hosts_without_an_address(name):
    """As if: on one, which the ranks are not told. The process managers are the real ones."""
    ended = mpiexec(name, 2, "mpi_bootstrap.py", "launcher")
    assert ended.code == 0, ended.text
    met = ended.by_rank("met")
    assert [line["backend"] for line in met if line["rank"] == 1] == ["gloo", "shm", "mpi", "gloo"]
    assert [line["mpi"] for line in met if line["rank"] == 1] == [False, False, True, True]
    assert len(met) == 8
    assert len({line["host"] for line in met}) == 1


@pytest.mark.parametrize(("name", "by"), [("MPICH", "unicomm"), ("Open MPI", "program")])
def test_several_hosts_that_only_mpi_joins(name, by):
    """Initialised by the program, and left as it was, or by unicomm, which finalizes it."""
    ended = mpiexec(name, 2, "mpi_bootstrap.py", by)
    assert ended.code == 0, ended.text
    assert [line["backend"] for line in ended.by_rank("met")] == ["gloo", "mpi"] * 2
    assert all(line["mpi"] for line in ended.by_rank("met"))


def test_a_pmix_server_that_is_gone(tmp_path):
    code = """
import unicomm
for _ in range(2):
    try:
        unicomm.new_comm("gloo", "cpu", timeout=60)
    except unicomm.BackendError as error:
        print(error)
"""
    environment = {
        **library("Open MPI").environment,
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "PMIX_RANK": "1",
        "PMIX_NAMESPACE": "gone@1",
        "PMIX_SERVER_TMPDIR": str(tmp_path),
        **{f"PMIX_SERVER_URI{v}": "gone@0.0;tcp4://127.0.0.1:9" for v in ("2", "21", "3", "4", "41")},
    }
    ended = alone(code, environment)
    assert ended.code == 0, ended.text
    assert ended.text.count("by the process manager (PMIx): PMIx_Init: ") == 2
    assert "set MASTER_ADDR to the host of rank 0" in ended.text


@pytest.mark.parametrize("name", NAMES)
def test_an_unchanged_program(name, tmp_path):
    """Started by mpiexec as it is: no RANK, no WORLD_SIZE, no MASTER_ADDR."""
    pytest.importorskip("sklearn")
    env = {"TORCH_DISTRIBUTED_USE_TORCHCOMMS": "1", "UNICOMM_BACKEND": "mpi"}
    result = tmp_path / "result.json"
    options = ("--epochs", "1", "--batch", "64", "--width", "64", "--result", str(result))
    ended = mpiexec(name, 2, ROOT / "examples" / "ddp.py", *options, env=env)
    assert ended.code == 0, ended.text
    assert "unicomm 'mpi' (mpi), 2 ranks" in ended.text
    figures = json.loads(result.read_text())
    assert figures["group"] == "UnicommProcessGroup"
    assert figures["identical"]


@pytest.mark.parametrize("name", NAMES)
def test_a_process_without_mpiexec(name):
    """One rank works; several cannot, which is said before anything is looked for."""
    code = """
import os, torch, unicomm
with unicomm.new_comm("mpi", "cpu") as comm:
    x = torch.ones(3)
    comm.all_reduce(x, unicomm.ReduceOp.SUM, False)
    comm.all_gather_single(torch.empty(3), x, False)
os.environ |= {"RANK": "0", "WORLD_SIZE": "2"}
try:
    unicomm.new_comm("mpi", "cpu")
except unicomm.UnsupportedError as error:
    print(error)
"""
    ended = alone(code, library(name).environment)
    assert ended.code == 0, ended.text
    assert "knows this process alone, but there are 2 ranks (by RANK/WORLD_SIZE)" in ended.text
    assert "mpiexec of that library" in ended.text


def test_threads_that_mpi_does_not_allow():
    code = """
import mpi4py
mpi4py.rc.thread_level = "serialized"
from mpi4py import MPI
import unicomm
try:
    unicomm.new_comm("mpi", "cpu")
except unicomm.UnsupportedError as error:
    print(error)
MPI.Finalize()
try:
    unicomm.new_comm("mpi", "cpu")
except unicomm.UnsupportedError as error:
    print(error)
"""
    ended = alone(code, library("MPICH").environment)
    assert ended.code == 0, ended.text
    assert "MPI runs at MPI_THREAD_SERIALIZED" in ended.text
    assert "MPI.Init_thread(MPI.THREAD_MULTIPLE)" in ended.text
    assert "has finalized MPI" in ended.text


def test_what_is_not_installed():
    code = """
import sys, unicomm
def refused():
    try:
        unicomm.new_comm("mpi", "cpu")
    except unicomm.UnsupportedError as error:
        print(error)
refused()
for name in [name for name in sys.modules if name.startswith("mpi4py")]:
    del sys.modules[name]
sys.modules["mpi4py"] = None
refused()
"""
    library("MPICH")
    ended = alone(code, {"MPI4PY_LIBMPI": "/nowhere/libmpi.so.12"})
    assert ended.code == 0, ended.text
    assert "MPI4PY_LIBMPI=/nowhere/libmpi.so.12 names it" in ended.text
    assert "pip install 'unicomm[mpi-mpich]'" in ended.text
