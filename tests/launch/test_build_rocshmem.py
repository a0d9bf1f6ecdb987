"""`unicomm build rocshmem`: the tools it finds, its errors, and the unit as the real hipcc compiles it."""

import os
import re
import shutil
import subprocess

import pytest
from typer.testing import CliRunner

from tests import ROOT
from tests.commands import run
from tests.mocks.rocshmem.install import unit, write_headers
from unicomm.backends.vendor import shmem_libraries as vendors
from unicomm.extensions import build_rocshmem as rocshmem_build
from unicomm.launch.cli import app
from unicomm.launch.doctor import gpu_backends as gpu_checks

CSRC = ROOT / "csrc"
COMMAND = ["build", "rocshmem"]


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """A machine without ROCm; `bare(name, text)` adds a program."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("HIPCC", "ROCM_PATH", "ROCSHMEM_HOME", "LDFLAGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(rocshmem_build, "_SYSTEM", tmp_path / "opt-rocm")

    def add(name, text="exit 0"):
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)

    return add


@pytest.fixture
def prefix(tmp_path):
    """The headers of rocSHMEM 3.5.0, and a file in place of its library."""
    folder = tmp_path / "rocshmem"
    write_headers(folder, 30500)
    (folder / "lib").mkdir()
    (folder / "lib" / "librocshmem.a").touch()
    return folder


def said(*arguments):
    done = CliRunner().invoke(app, [*COMMAND, *map(str, arguments)])
    assert done.exit_code == 1, done.output
    return " ".join(done.output.split())


def test_what_is_missing_and_the_cure(bare, prefix, monkeypatch, tmp_path):
    assert "no hipcc: install ROCm's HIP compiler, or name it in HIPCC" in said()
    monkeypatch.setenv("HIPCC", "/nowhere/hipcc")
    assert "HIPCC names /nowhere/hipcc, which does not exist" in said()
    monkeypatch.delenv("HIPCC")
    bare("hipcc")
    text = said()
    assert "no rocSHMEM in" in text
    assert "ROCSHMEM_HOME" in text
    assert "no rocSHMEM in /elsewhere" in said("--rocshmem", "/elsewhere")
    assert "name the target, such as --offload-arch gfx1030" in said("--rocshmem", prefix)
    assert "'h100' is not a GPU target" in said("--rocshmem", prefix, "--offload-arch", "h100")
    text = said("--rocshmem", prefix, "--offload-arch", "gfx1100")
    assert "has no code for gfx1100, only for gfx90a, gfx942, gfx1030" in text
    (prefix / "lib" / "librocshmem.a").unlink()
    assert "but no lib/librocshmem.a" in said("--rocshmem", prefix, "--offload-arch", "gfx942")
    (prefix / "lib" / "librocshmem.a").touch()
    write_headers(prefix, 20001)
    text = said("--rocshmem", prefix, "--offload-arch", "gfx942")
    assert "rocSHMEM 2.0.1 was built with MPI, and there is no mpicc" in text
    assert "include/mpi.h is missing" in said(
        "--rocshmem", prefix, "--offload-arch", "gfx942", "--mpi", tmp_path
    )
    assert not rocshmem_build.unit_path().exists()
    assert rocshmem_build.built_unit() is None


def test_a_dry_run_prints_the_commands(bare, prefix, monkeypatch):
    bare("hipcc")
    bare("rocminfo", "echo '  Name: gfx942'; echo '  Name: gfx942'; echo '  Name: amdgcn-amd-amdhsa--gfx942'")
    monkeypatch.setenv("ROCSHMEM_HOME", str(prefix))
    done = CliRunner().invoke(app, [*COMMAND, "--dry-run"])
    assert done.exit_code == 0, done.output
    compile_, link = done.output.splitlines()
    assert compile_.startswith("HIP_PLATFORM=amd ")
    for words in ("-fgpu-rdc", "-c", f"-I{prefix / 'include'}"):
        assert words in compile_.split()
    assert compile_.split().count("--offload-arch=gfx942") == 1
    assert "--hip-link" in link
    assert str(prefix / "lib" / "librocshmem.a") in link
    assert "mpi" not in link
    assert not rocshmem_build.unit_path().exists()


def test_mpi_as_its_compiler_says_it(bare, prefix, monkeypatch):
    write_headers(prefix, 30000)
    bare("hipcc")
    # MPICH's answers; it does not know Open MPI's question.
    bare(
        "mpicc",
        'case "$1" in -compile_info) echo gcc -O2 -I/mpi/include;; -link_info) echo gcc -L/mpi/lib -lmpi;; '
        "*) exit 1;; esac",
    )
    tools = rocshmem_build.find_tools(prefix, ["gfx90a", "gfx942:xnack-"])
    assert (tools.mpi_compile, tools.mpi_link) == (["-I/mpi/include"], ["-L/mpi/lib", "-lmpi"])
    assert tools.version == "3.0.0"
    assert tools.targets == ["gfx90a", "gfx942:xnack-"]


def test_a_compiler_that_fails_and_one_that_makes_nonsense(bare, prefix):
    bare("hipcc", "echo 'unit.hip.cpp: error: it does not like that' >&2; exit 1")
    text = said("--rocshmem", prefix, "--offload-arch", "gfx942")
    assert "hipcc failed with 1 for rocSHMEM 3.5.0" in text
    assert "it does not like that" in text
    bare("hipcc", 'for word; do last=$word; done; echo nonsense > "$last"')
    assert "the built unit does not load" in said("--rocshmem", prefix, "--offload-arch", "gfx942")
    assert not rocshmem_build.unit_path().exists()


@pytest.mark.timeout(300)
def test_doctor_says_what_is_built(bare, monkeypatch, tmp_path):
    found = gpu_checks.rocshmem_unit()
    assert (found.ok, found.detail) == (None, "not built")
    assert "unicomm build rocshmem" in found.cure
    monkeypatch.undo()
    shutil.copytree(unit(30500).parents[2], tmp_path / "copy")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "copy"))
    assert rocshmem_build.built_unit().targets == ["gfx90a", "gfx1030"]
    found = gpu_checks.rocshmem_unit()
    assert found.detail.startswith("rocSHMEM 3.5.0, HIP version: 6.4, a mock, for gfx90a, gfx1030: ")
    assert found.ok
    # The backend looks there, and opens it.
    monkeypatch.setattr(vendors, "_opened", {})
    assert vendors.open_table(vendors.ROCSHMEM).name == "rocSHMEM"
    assert vendors.ROCSHMEM.version() == "3.5.0"
    rocshmem_build.unit_path().with_suffix(".json").write_text("not ours")
    assert gpu_checks.rocshmem_unit().detail == "not built"


def real_hipcc():
    hipcc = os.environ.get("HIPCC") or shutil.which("hipcc")
    if not hipcc:
        pytest.skip("needs hipcc")
    done = subprocess.run(
        [hipcc, "--version"],
        capture_output=True,
        text=True,
        env=os.environ | {"HIP_PLATFORM": "amd"},
        check=False,
    )
    if done.returncode != 0 or "clang" not in done.stdout:
        pytest.skip("hipcc has no clang here")
    return hipcc


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("version", "target"), [(20001, "gfx90a"), (30500, "gfx1030")])
def test_the_real_hipcc_compiles_the_unit(version, target, tmp_path):
    """For waves of 64 (gfx90a) and of 32 (gfx1030), against the headers of the mock library.

    Unlike the mock's compiler it tells the host's functions from the device's. What the object lacks says
    which of the library's functions were found.
    """
    hipcc = real_hipcc()
    write_headers(tmp_path, version)
    made = tmp_path / "unit.o"
    flags = ["-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-fgpu-rdc", "-Wall", "-Werror"]
    folders = [f"-I{CSRC}", f"-I{tmp_path / 'include'}"]
    source = str(CSRC / "rocshmem" / "unit.hip.cpp")
    command = [
        hipcc,
        *flags,
        "-Wno-unused-const-variable",
        f"--offload-arch={target}",
        *folders,
        "-c",
        source,
    ]
    environment = os.environ | {"HIP_PLATFORM": "amd"}
    try:  # 4 seconds of a core
        done = run([*command, "-o", str(made)], within=250, env=environment)
    except subprocess.TimeoutExpired:
        pytest.skip("hipcc took more than 250 s on this machine")
    assert done.returncode == 0, done.stderr
    listed = subprocess.run(["nm", "-uC", str(made)], capture_output=True, text=True, check=True).stdout
    calls = set(re.findall(r" rocshmem::rocshmem_(\w+)\(", listed))
    always = {"malloc", "free", "my_pe", "n_pes", "barrier_all", "team_split_strided"}
    by_id = {"get_uniqueid", "set_attr_uniqueid_args", "init_attr", "ptr", "align"}
    streams = {"putmem", "getmem", "putmem_signal", "signal_wait_until", "quiet", "barrier_all", "barrier"}
    assert (
        calls
        == {
            20001: always | {"init", "finalize"},  # all else by kernels
            30500: always | by_id | {f"{name}_on_stream" for name in streams},
        }[version]
    )
    assert "decoys" not in listed
