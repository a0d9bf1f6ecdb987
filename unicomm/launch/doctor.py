"""`unicomm doctor`: what this installation can do on this machine, what is missing, and the cure.

Nothing in here raises: whatever a check runs into becomes a finding of the report, because the doctor is
for installations where something is broken.
"""

from __future__ import annotations

import ctypes.util
import json
import os
import platform
import select
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from importlib import metadata, resources
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import unicomm

WORKS, BROKEN, ABSENT = "works", "broken", "not in this version"

# Instruction sets that the core's reductions are built for, or that tell machines apart.
_FEATURES = (
    "sse4_2 avx avx2 f16c fma avx512f avx512bw avx512dq avx512vl avx512_bf16 avx512_fp16 amx_bf16 "
    "asimd asimdhp sve sve2 bf16"
).split()

_PREFIXES = (
    "UNICOMM_",
    "TORCHCOMM_",
    "TORCHCOMMS_",
    "TORCH_DISTRIBUTED_",
    "TORCH_NCCL_",
    "NCCL_",
    "RCCL_",
    "GLOO_",
    "NVSHMEM_",
    "ROCSHMEM_",
    "OMPI_COMM_WORLD_",
    "PALS_",
)
_NAMES = frozenset(
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID "
    "TORCHELASTIC_RESTART_COUNT TORCHELASTIC_USE_AGENT_STORE PMI_RANK PMI_SIZE PMI_LOCAL_RANK PMIX_RANK "
    "PMIX_NAMESPACE MPI_LOCALRANKID SLURM_JOB_ID SLURM_STEP_ID SLURM_PROCID SLURM_LOCALID SLURM_NTASKS "
    "SLURM_STEP_NUM_TASKS SLURM_STEP_NODELIST CUDA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES "
    "OMP_NUM_THREADS LD_LIBRARY_PATH XDG_RUNTIME_DIR TMPDIR".split()
)
_SECRET = ("TOKEN", "SECRET", "PASSWORD", "KEY", "CREDENTIAL")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: how it is (`ok` is None where that says nothing about success)."""

    what: str
    ok: bool | None
    detail: str = ""
    cure: str = ""


@dataclass
class BackendReport:
    """What one backend finds on this machine; `verified` is where it ever ran."""

    name: str
    status: str
    findings: list[Finding] = field(default_factory=list)
    verified: list[str] = field(default_factory=list)


def run(as_json: bool) -> int:
    """Prints the report, as tables or as JSON. Returns 0 when the core and shm or gloo work, else 1."""
    report = collect()
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _show(report, Console())
    return 0 if report["ok"] else 1


def collect() -> dict[str, Any]:
    """The report as plain data. `ok` says whether the core and at least shm or gloo work."""
    core = _core()
    verified, never = _verified()
    # Before the self-tests, which have this process write a ring of its own.
    recorder = _recorder()
    backends = [_shm(), _gloo(), _fake(), *_entry_points(), *_planned()]
    for backend in backends:
        backend.verified = [
            f"{row['platform']}, {row['hardware']}, torch {row['torch']}: {row['what']}"
            for row in verified
            if row["backend"] == backend.name
        ]
    works = {backend.name for backend in backends if backend.status == WORKS}
    return {
        "ok": all(finding.ok is not False for finding in core) and bool(works & {"shm", "gloo"}),
        "versions": _versions(),
        "core": [asdict(finding) for finding in core],
        "recorder": asdict(recorder),
        "environment": [asdict(finding) for finding in _environment()],
        "variables": _variables(),
        "backends": [asdict(backend) for backend in backends],
        "never_verified": never,
    }


# --- the machine and the installation -----------------------------------------------------------------


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _versions() -> dict[str, str | None]:
    return {
        "unicomm": unicomm.__version__,
        "python": platform.python_version(),
        "torch": _version("torch"),
        "numpy": _version("numpy"),
        "torchcomms": _version("torchcomms"),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def _cpu_info(*names: str) -> str:
    """The first of these fields of /proc/cpuinfo that is there."""
    for name in names:
        for line in _read("/proc/cpuinfo").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    return ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _core() -> list[Finding]:
    present = set(_cpu_info("flags", "Features").split())
    findings = [
        Finding("processor", None, _cpu_info("model name") or platform.machine()),
        Finding("instruction sets", None, " ".join(f for f in _FEATURES if f in present)),
    ]
    try:
        from unicomm import _core as core

        findings.append(Finding("native core", True, f"reductions use {core.fold_isa()}"))
        findings.append(Finding("usable cores", None, f"{core.usable_cores()} of {os.cpu_count()}"))
    except Exception as error:
        findings.append(
            Finding(
                "native core",
                False,
                _line(error),
                "reinstall unicomm for this Python and machine: pip install --force-reinstall unicomm",
            )
        )
    try:
        import torch.distributed

        good = torch.distributed.is_available()
        detail = "with torch.distributed" if good else "without torch.distributed"
        cure = "" if good else "install a torch that is built with USE_DISTRIBUTED=1"
        findings.append(Finding("torch", good, f"{torch.__version__}, {detail}", cure))
    except Exception as error:
        findings.append(Finding("torch", False, _line(error), "reinstall torch: https://pytorch.org"))
    return findings


def _environment() -> list[Finding]:
    try:
        from unicomm.comms.environment import detect_environment

        found = detect_environment()
    except Exception as error:
        return [Finding("launcher", False, _line(error), getattr(error, "hint", ""))]
    return [
        Finding("launcher", True, found.source),
        Finding("rank", None, f"{found.rank} of {found.size}"),
    ]


def _variables() -> dict[str, str]:
    """The variables that launchers, backends and unicomm read; secrets are not shown."""
    return {
        name: "(set, not shown)" if any(word in name for word in _SECRET) else value
        for name, value in sorted(os.environ.items())
        if name in _NAMES or name.startswith(_PREFIXES)
    }


def _verified() -> tuple[list[dict[str, str]], list[str]]:
    data = json.loads(resources.files("unicomm.launch").joinpath("verified.json").read_text())
    return data["verified"], data["never"]


def _line(error: BaseException) -> str:
    """What an error says, in one line."""
    text = getattr(error, "message", "") or str(error) or type(error).__name__
    return str(text).strip().splitlines()[0]


# --- backends -----------------------------------------------------------------------------------------


def _self_test(backend: str) -> Finding:
    """Two ranks, as threads, add up a tensor."""
    what, cure = "self-test: all_reduce on 2 ranks", "report this with the output of `unicomm doctor --json`"
    try:
        import torch

        from unicomm.testing import run_ranks

        def add(comm: unicomm.Communicator) -> bool:
            x = torch.full((1000,), float(comm.get_rank() + 1))
            comm.all_reduce(x, unicomm.ReduceOp.SUM, False)
            return bool((x == 3).all())

        right = all(run_ranks(add, 2, backend=backend, timeout=20, name="doctor"))
    except Exception as error:
        return Finding(what, False, _line(error), getattr(error, "hint", "") or cure)
    return Finding(what, True) if right else Finding(what, False, "the sum is wrong", cure)


def _judge(name: str, findings: Iterable[Finding]) -> BackendReport:
    listed = list(findings)
    return BackendReport(name, BROKEN if any(f.ok is False for f in listed) else WORKS, listed)


def _attempt(what: str, cure: str, action: Callable[[], str]) -> Finding:
    try:
        return Finding(what, True, action())
    except Exception as error:
        return Finding(what, False, _line(error), cure)


def _memfd() -> str:
    os.close(os.memfd_create("unicomm-doctor"))
    return ""


def _pidfd() -> str:
    fd = os.pidfd_open(os.getpid())
    try:
        return "" if not select.select([fd], [], [], 0)[0] else "reports this process as ended"
    finally:
        os.close(fd)


def _open_elsewhere() -> str:
    """Has another process open a memfd of this one, as ranks do with each other's."""
    fd = os.memfd_create("unicomm-doctor")
    try:
        path = f"/proc/{os.getpid()}/fd/{fd}"
        command = [sys.executable, "-I", "-S", "-c", f"import os; os.close(os.open({path!r}, os.O_RDWR))"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    finally:
        os.close(fd)
    if done.returncode != 0:
        raise OSError((done.stderr.strip().splitlines() or ["no output"])[-1])
    return ""


def _identity() -> str:
    Path("/proc/sys/kernel/random/boot_id").read_text()
    return os.readlink("/proc/self/ns/pid")


def _shm() -> BackendReport:
    kernel = "Linux 5.3 or later is needed; in a container permit this system call (seccomp profile)"
    return _judge(
        "shm",
        [
            _attempt("anonymous shared memory (memfd_create)", kernel, _memfd),
            _attempt("watching processes (pidfd_open)", kernel, _pidfd),
            _attempt("/proc tells hosts and process numbers apart", "mount /proc", _identity),
            _attempt(
                "other processes may open a rank's segment",
                "run all ranks as one user, and mount /proc without hidepid",
                _open_elsewhere,
            ),
            _self_test("shm"),
        ],
    )


def _gloo() -> BackendReport:
    def present() -> str:
        import torch.distributed

        if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
            raise RuntimeError("this torch has no ProcessGroupGloo")
        return f"torch {torch.__version__}"

    found = _attempt("ProcessGroupGloo", "install a torch that is built with USE_GLOO=1", present)
    return _judge("gloo", [found, _self_test("gloo")] if found.ok else [found])


def _fake() -> BackendReport:
    def play() -> str:
        import torch

        with unicomm.new_comm("fake", "cpu", name="doctor", rank=3, size=8) as comm:
            comm.all_reduce(torch.ones(4), unicomm.ReduceOp.SUM, False)
        return ""

    return _judge("fake", [_attempt("self-test: rank 3 of 8 calls all_reduce", "report this", play)])


def _entry_points() -> list[BackendReport]:
    """Backends of other packages: whether they can be imported."""
    reports = []
    for entry in sorted(metadata.entry_points(group="unicomm.backends"), key=lambda entry: entry.name):
        package = entry.dist.name if entry.dist else entry.module

        def load(name: str = entry.name) -> str:
            from unicomm.backends.registry import find_backend

            return ", ".join(sorted(find_backend(name).capabilities.device_types))

        cure = f"install what it needs, or uninstall {package}"
        reports.append(_judge(entry.name, [_attempt(f"{package} ({entry.value})", cure, load)]))
    return reports


# --- planned backends: what of their libraries is here ------------------------------------------------


def _library(name: str, *wheels: str) -> Finding:
    """Whether the dynamic linker or one of some wheels has lib`name`."""
    found = [f"{wheel} {version}" for wheel in wheels if (version := _version(wheel))]
    if system := ctypes.util.find_library(name):
        found.insert(0, f"{system} of the system")
    return Finding(f"lib{name}", None, "; ".join(found) or "not found")


def _package(name: str) -> Finding:
    return Finding(name, None, _version(name) or "not installed")


def _which_mpi() -> Finding:
    """Which MPI mpi4py would use; asked in another process, because a broken MPI may end it."""
    what = "MPI library"
    if _version("mpi4py") is None:
        launcher = shutil.which("mpiexec") or shutil.which("mpirun")
        return Finding(what, None, f"launcher {launcher}" if launcher else "not looked for without mpi4py")
    code = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(what, None, f"mpi4py does not answer: {_line(error)}")
    if done.returncode == 0 and done.stdout.strip():
        return Finding(what, None, done.stdout.strip().splitlines()[0])
    said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return Finding(what, None, f"mpi4py finds none: {said[-1]}")


def _planned() -> list[BackendReport]:
    """Backends of the design that this version does not have: honest about that, and about what is here."""
    found = {
        "mpi": [_package("mpi4py"), _which_mpi()],
        "nccl": [_library("nccl", "nvidia-nccl-cu13", "nvidia-nccl-cu12")],
        "rccl": [_library("rccl")],
        "nvshmem": [
            _library("nvshmem_host", "nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12"),
            _package("nvshmem4py"),
        ],
        "rocshmem": [_library("rocshmem"), _package("rocshmem4py")],
    }
    return [BackendReport(name, ABSENT, findings) for name, findings in found.items()]


# --- the recorder ---------------------------------------------------------------------------------------


def _recorder() -> Finding:
    raise NotImplementedError


# --- for people -----------------------------------------------------------------------------------------


def _mark(ok: bool | None) -> str:
    return {True: "[green]ok[/]", False: "[red]MISSING[/]", None: ""}[ok]
