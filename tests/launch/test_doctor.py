"""`unicomm doctor`: its report is true, and no check raises when something is broken."""

import dataclasses
import json
import os
import sys
import tempfile
from datetime import date
from importlib import metadata

import pytest

from unicomm import symm
from unicomm.launch.doctor import backends as backend_checks
from unicomm.launch.doctor import report as doctor
from unicomm.launch.doctor import verified


@pytest.fixture(autouse=True)
def clean_machine(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith(doctor._PREFIXES) or name in doctor._NAMES.split():
            monkeypatch.delenv(name)
    monkeypatch.setenv("UNICOMM_TRACE_DIR", str(tmp_path))


def fail(*_, **__):
    raise OSError("Operation not permitted")


def backend(report, name):
    return next(found for found in report["backends"] if found["name"] == name)


def finding(findings, what):
    return next(found for found in findings if found["what"].startswith(what))


def test_json_says_what_works(capsys):
    assert doctor.run(True) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"]
    assert report["versions"]["torch"] == metadata.version("torch")
    assert finding(report["core"], "native core")["detail"].startswith("reductions use ")
    for name in ("shm", "gloo", "fake"):
        found = backend(report, name)
        assert found["status"] == "works"
        assert found["verified"]
        assert finding(found["findings"], "self-test")["ok"]
    assert [found["detail"] for found in report["environment"]][:2] == ["single process", "rank 0 of 1"]


def test_it_counts_the_operations_of_torch_that_run(monkeypatch, tmp_path):
    operators = [
        symm.TorchOperator("one", True, "in shared memory"),
        symm.TorchOperator("two", False, "this torch declares it otherwise"),
    ]
    with monkeypatch.context() as patch:
        patch.setattr(symm, "torch_operators", lambda: operators)
        said = finding(doctor.collect()["core"], "torch.ops.symm_mem")
    assert said["detail"] == (
        "1 of 2 run on CPU tensors after symm.use_in_torch(); not two: this torch declares it otherwise"
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # where nothing is built
    said = finding(doctor.collect()["core"], "torch.ops.symm_mem")
    assert said["ok"] is None
    assert "unicomm build torch-bridge" in said["detail"]


def test_the_tables_say_the_same(capsys):
    assert doctor.run(False, verbose=True) == 0
    out = capsys.readouterr().out
    for words in (
        "shm",
        "gloo",
        "works",
        "nccl",
        "nvshmem",
        "single process",
        "UNICOMM_TRACE_DIR",
    ):
        assert words in out


def one_screen(capsys, monkeypatch, code=0):
    """Runs `unicomm doctor` on a terminal of 80 columns; returns its lines."""
    monkeypatch.setenv("COLUMNS", "80")
    with tempfile.TemporaryDirectory() as folder:  # whose name is as long as that of a user's folder
        monkeypatch.setenv("UNICOMM_TRACE_DIR", folder)
        assert doctor.run(False) == code
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 24
    return [line.rstrip() for line in lines]


def line_with(lines, name):
    (found,) = [i for i, line in enumerate(lines) if line[4:].startswith(f"{name} ")]
    ends = [i for i in range(found + 1, len(lines)) if not lines[i].startswith(" ")]
    return " ".join(line.strip() for line in lines[found : ends[0]])


def test_one_screen_says_what_works(capsys, monkeypatch):
    lines = one_screen(capsys, monkeypatch)
    assert lines[0].startswith("unicomm ")
    for name in ("shm", "gloo", "fake", "native core", "torch", "torch.distributed", "launcher", "recorder"):
        assert line_with(lines, name).startswith("ok  "), lines
    for name in ("nccl", "rccl", "nvshmem", "rocshmem"):
        assert name in line_with(lines, "GPUs")
    assert "doctor --verbose" in lines[-1]


def test_one_screen_names_the_cure(capsys, monkeypatch):
    """What is broken, a missing extra and a launcher's missing store have one cure each."""
    monkeypatch.setattr(os, "memfd_create", fail)
    monkeypatch.setattr(backend_checks, "version_of", {}.get)
    for name in ("zmq", "msgspec", "perfetto", "cloudpickle", "prometheus_client", "opentelemetry"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    lines = one_screen(capsys, monkeypatch, code=1)
    assert line_with(lines, "shm").startswith("no  ")
    assert "Operation not permitted -> " in line_with(lines, "shm")
    assert "-> set MASTER_ADDR" in line_with(lines, "store")
    assert line_with(lines, "mpi").endswith("not installed -> pip install 'unicomm[mpi-mpich]'")
    for extra in ("hub", "profile", "trace", "metrics", "notebook"):
        assert line_with(lines, f"unicomm[{extra}]").endswith(f"-> pip install 'unicomm[{extra}]'")
    assert all(line.count("->") <= 1 for line in lines)


def test_extras_that_are_missing_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "zmq", None)
    found = finding(doctor.collect()["extras"], "hub")
    assert found["ok"] is None
    assert found["detail"].endswith("without pyzmq")
    assert found["cure"] == "pip install 'unicomm[hub]'"


def test_backends_that_ran_on_mock_libraries_never_pass_as_supported():
    report = doctor.collect()
    for name in ("nccl", "rccl", "nvshmem", "rocshmem"):
        found = backend(report, name)
        assert found["status"] == "not on this machine"
        assert found["verified"] == []
        assert found["findings"]
        assert name in report["never_verified"]


def test_what_is_verified_ships_with_the_package_and_names_backends_that_exist():
    ran = verified.load()
    names = {row.backend for row in ran.on_hardware}
    assert names == {"shm", "gloo", "tcp", "ucx", "hosts", "mpi", "fake"}
    assert not names & set(ran.never)
    assert {row.backend for row in ran.on_mocks} <= set(ran.never)
    for row in ran.on_hardware + ran.on_mocks:
        assert row.what
        assert date.fromisoformat(row.when) <= date.today()


def test_nccl_is_said_to_have_run_on_a_mock_library_only(monkeypatch, tmp_path):
    from unicomm.backends.nccl import library

    monkeypatch.setattr(library, "_opened", {})
    missing = dataclasses.replace(library.NCCL, sonames=("libno-such-nccl.so.2",), packages=())
    monkeypatch.setattr(library, "NCCL", missing)
    found = backend(doctor.collect(), "nccl")
    assert found["status"] == "not on this machine"
    assert "mock library" in finding(found["findings"], "tested without a GPU")["detail"]
    assert "libno-such-nccl" in finding(found["findings"], "NCCL")["detail"]


def test_no_shared_memory_leaves_gloo(monkeypatch):
    monkeypatch.setattr(os, "memfd_create", fail)
    report = doctor.collect()
    assert backend(report, "shm")["status"] == "broken"
    found = finding(backend(report, "shm")["findings"], "anonymous shared memory")
    assert not found["ok"]
    assert found["detail"] == "Operation not permitted"
    assert "container" in found["cure"]
    assert backend(report, "gloo")["status"] == "works"
    assert report["ok"]


def test_a_wrong_sum_is_no_success(monkeypatch):
    from unicomm.backends.shm import ShmBackend

    monkeypatch.setattr(ShmBackend, "fast_path", lambda *_: None)
    monkeypatch.setattr(ShmBackend, "run", lambda *_: None)
    found = finding([vars(f) for f in backend_checks._shm().findings], "self-test")
    assert found["ok"] is False
    assert found["detail"] == "the sum is wrong"


def test_without_shm_tcp_and_gloo_it_fails_and_says_so(monkeypatch, capsys):
    monkeypatch.setattr(os, "pidfd_open", fail)
    monkeypatch.setattr("unicomm._core.TcpStreams", fail)
    monkeypatch.setattr("torch.distributed.is_gloo_available", lambda: False)
    assert doctor.run(False) == 1
    out = capsys.readouterr().out
    assert "cannot be used here yet" in out
    assert "USE_GLOO=1" in out


def test_without_the_native_core_it_still_reports(monkeypatch, capsys):
    monkeypatch.setattr("unicomm._core.fold_isa", fail)
    assert doctor.run(True) == 1
    found = finding(json.loads(capsys.readouterr().out)["core"], "native core")
    assert not found["ok"]
    assert "pip install" in found["cure"]


def test_a_launcher_that_contradicts_itself(monkeypatch):
    monkeypatch.setenv("TORCHCOMM_RANK", "5")
    found = finding(doctor.collect()["environment"], "launcher")
    assert not found["ok"]
    assert "TORCHCOMM_SIZE" in found["detail"]
    assert found["cure"]


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"RANK": "1", "WORLD_SIZE": "4"}, "the ranks cannot meet."),
        ({"TORCHCOMM_RANK": "5"}, "TORCHCOMM_RANK is set, but TORCHCOMM_SIZE is not."),
    ],
)
def test_a_job_that_cannot_run_is_told_and_fails(monkeypatch, capsys, variables, reason):
    monkeypatch.setenv("COLUMNS", "200")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for verbose in (False, True):
        assert doctor.run(False, verbose) == 1
        said = capsys.readouterr().out
        assert f"This job cannot run: {reason}" in said
    assert doctor.run(True) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["ok"]
    assert backend(report, "shm")["status"] == "works"
    assert report["verdict"].endswith(reason)


def test_a_recorder_without_a_folder_is_told_and_fails_nothing(monkeypatch, capsys, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("UNICOMM_TRACE_DIR", str(tmp_path / "file"))
    assert doctor.run(False) == 0
    assert "unicomm works here, but not its recorder." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("variables", "store"),
    [
        ({}, "file"),
        ({"MASTER_ADDR": "node7", "MASTER_PORT": "29500"}, "node7:29500, hosted by rank 0"),
        (
            {"MASTER_ADDR": "node7", "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True"},
            "hosted by the launcher",
        ),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "none: the ranks cannot meet"),
        ({"MASTER_ADDR": "node7"}, "none: the ranks cannot meet"),
    ],
)
def test_launcher_and_store(monkeypatch, variables, store):
    place = {"RANK": "1", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "4"}
    for name, value in place.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    launcher, where, found = doctor._environment()
    assert launcher.detail == "Open MPI"
    assert where.detail.startswith("rank 1 of 4")
    assert store in found.detail
    assert found.ok is (False if store.startswith("none") else None)


def test_ranks_without_a_launcher_have_no_file_as_store(monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert finding([vars(one) for one in doctor._environment()], "store")["ok"] is False


def test_variables_are_shown_but_not_secrets(monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("UNICOMM_HUB_TOKEN", "abc")
    monkeypatch.setenv("OTHER", "x")
    shown = doctor._variables()
    assert shown["NCCL_DEBUG"] == "INFO"
    assert "abc" not in shown["UNICOMM_HUB_TOKEN"]
    assert "OTHER" not in shown


def test_backends_of_other_packages(monkeypatch):
    entries = [
        metadata.EntryPoint("broken", "no_such_module:Backend", "unicomm.backends"),
        metadata.EntryPoint("fine", "unicomm.backends.fake:FakeBackend", "unicomm.backends"),
    ]
    monkeypatch.setattr(metadata, "entry_points", lambda group: entries)
    monkeypatch.setattr("unicomm.backends.registry.entry_points", lambda group: entries)
    monkeypatch.setattr("unicomm.backends.registry._registered", {})
    broken, fine = backend_checks._entry_points()
    assert broken.status == "broken"
    assert "no_such_module" in broken.findings[0].detail
    assert fine.status == "works"
    assert "cpu" in fine.findings[0].detail


def test_the_rings_folder(monkeypatch, tmp_path):
    (tmp_path / "host-rank00000-1-00000000.ucring").write_bytes(bytes(3 << 20))
    found = doctor._recorder()
    assert found.ok
    assert f"{tmp_path}: 1 rings (0 of running processes), 3.0 MiB" in found.detail
    monkeypatch.setenv("UNICOMM_TRACE_DIR", str(tmp_path / "host-rank00000-1-00000000.ucring"))
    found = doctor._recorder()
    assert found.ok is False
    assert "UNICOMM_TRACE_DIR" in found.cure


def test_mpi_is_asked_for_in_another_process(monkeypatch):
    monkeypatch.setattr(backend_checks, "version_of", {"mpi4py": "4.1"}.get)
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    found = backend_checks._mpi()
    assert found.status == "broken"
    assert "does not answer" in found.findings[1].detail
    assert "unicomm[mpi-mpich]" in found.findings[1].cure


def test_mpi_is_optional(monkeypatch):
    monkeypatch.setattr(backend_checks, "version_of", {}.get)
    found = backend_checks._mpi()
    assert found.status == "not installed"
    assert "unicomm[mpi-mpich]" in found.findings[1].cure


@pytest.mark.parametrize(
    ("available", "version", "words"),
    [
        (False, None, "runs torch.distributed on unicomm; now off"),
        (True, None, "the official torchcomms is installed and is used"),
        (False, "2.99.0", "is not known to this unicomm"),
    ],
)
def test_what_the_switch_would_do(available, version, words, monkeypatch):
    import torch
    import torch.distributed.distributed_c10d as c10d

    monkeypatch.setattr(c10d, "_TORCHCOMM_AVAILABLE", available)
    if version:
        monkeypatch.setattr(torch, "__version__", version)
    assert words in finding(doctor.collect()["core"], "switch")["detail"]
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    assert (
        "no effect: TORCH_DEVICE_BACKEND_AUTOLOAD=0" in finding(doctor.collect()["core"], "switch")["detail"]
    )
