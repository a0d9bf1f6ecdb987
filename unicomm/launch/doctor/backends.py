"""Checks of each backend on the CPU, and of the backends of other packages.

No check raises: its errors become findings.
"""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import unicomm

from .findings import BROKEN, MISSING, WORKS, BackendReport, Finding, attempt, line_of, version_of
from .gpu_backends import gpu_reports


def backend_reports() -> list[BackendReport]:
    """Checks all backends: those of unicomm, and those of other packages."""
    return [_shm(), _gloo(), _tcp(), _ucx(), _hosts(), _mpi(), _fake(), *gpu_reports(), *_entry_points()]


def _self_test(backend: str, ranks: int = 2, hints: Mapping[str, str] | None = None) -> Finding:
    """Runs an all_reduce on a few ranks, which are threads."""

    def run() -> str:
        import torch

        from unicomm.testing import run_ranks

        def add(comm: unicomm.Communicator) -> bool:
            x = torch.full((1000,), float(comm.get_rank() + 1))
            comm.all_reduce(x, unicomm.ReduceOp.SUM, async_op=False)
            return bool((x == ranks * (ranks + 1) // 2).all())

        if not all(run_ranks(add, ranks, backend=backend, timeout=20, name="doctor", hints=hints)):
            raise ArithmeticError("the sum is wrong")
        return ""

    cure = "report this with the output of `unicomm doctor --json`"
    return attempt(f"self-test: all_reduce on {ranks} ranks", cure, run)


def _judge(name: str, findings: list[Finding]) -> BackendReport:
    return BackendReport(name, BROKEN if any(f.ok is False for f in findings) else WORKS, findings)


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
    """Has another process open a memfd of this one, as ranks open each other's segments."""
    fd = os.memfd_create("unicomm-doctor")
    try:
        path = f"/proc/{os.getpid()}/fd/{fd}"
        command = [sys.executable, "-I", "-S", "-c", f"import os; os.close(os.open({path!r}, os.O_RDWR))"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    finally:
        os.close(fd)
    if done.returncode != 0:
        raise OSError(_last_line(done))
    return ""


def _identity() -> str:
    Path("/proc/sys/kernel/random/boot_id").read_text()
    return os.readlink("/proc/self/ns/pid")


def _shm() -> BackendReport:
    kernel = "use Linux 5.3 or later; in a container, permit this system call (seccomp profile)"
    return _judge(
        "shm",
        [
            attempt("anonymous shared memory (memfd_create)", kernel, _memfd),
            attempt("watching processes (pidfd_open)", kernel, _pidfd),
            attempt("identity of host and process namespace (/proc)", "mount /proc", _identity),
            attempt(
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

    found = attempt("ProcessGroupGloo", "install a torch that is built with USE_GLOO=1", present)
    return _judge("gloo", [found, _self_test("gloo")] if found.ok else [found])


def _tcp() -> BackendReport:
    return _judge("tcp", [_self_test("tcp")])


def _ucx() -> BackendReport:
    """Checks UCX, which is optional: without its library it is not installed, rather than broken."""
    from unicomm.backends.ucx.library import UCX, open_library, version_text

    try:
        library = open_library()
    except unicomm.CommError as error:
        return BackendReport("ucx", MISSING, [Finding("libucp", None, error.message, UCX.cure)])
    found = Finding("libucp", True, f"UCX {version_text(library)}, {library.file}")
    return _judge("ucx", [found, _self_test("ucx")])


def _hosts() -> BackendReport:
    """Checks what `auto` uses on several hosts, with ranks that are told to be on different hosts."""

    def address() -> str:
        from unicomm.backends.bootstrap import addresses

        found = addresses.here(None).address
        if not found:
            raise OSError("no network but loopback")
        return found

    found = attempt("address that other hosts reach", "connect this host to a network", address)
    if not found.ok:  # not a fault on a machine that works alone
        found = Finding(found.what, None, found.detail, found.cure)
    return _judge("hosts", [found, _self_test("auto", 4, {"hosts": "a,a,b,b"})])


def _mpi() -> BackendReport:
    """Checks MPI, which is optional: without mpi4py it is not installed, rather than broken."""
    library = _which_mpi()
    if library.ok is None:
        return BackendReport("mpi", MISSING, [_package("mpi4py"), library])
    findings = [_package("mpi4py"), library]
    if library.ok:
        findings.append(attempt("self-test: all_reduce on 1 rank", _MPI_CURE, _run_mpi))
    return _judge("mpi", findings)


def _run_mpi() -> str:
    code = (
        "import torch, unicomm; c = unicomm.new_comm('mpi', 'cpu', name='doctor', rank=0, size=1); "
        "c.all_reduce(torch.ones(4), unicomm.ReduceOp.SUM, async_op=False); c.finalize()"
    )
    done = _python(code)
    if done.returncode != 0:
        raise RuntimeError(_last_line(done))
    return ""


def _fake() -> BackendReport:
    def run() -> str:
        import torch

        with unicomm.new_comm("fake", "cpu", name="doctor", rank=3, size=8) as comm:
            comm.all_reduce(torch.ones(4), unicomm.ReduceOp.SUM, async_op=False)
        return ""

    return _judge("fake", [attempt("self-test: rank 3 of 8 calls all_reduce", "report this", run)])


def _entry_points() -> list[BackendReport]:
    """Checks whether the backends of other packages can be imported."""
    reports = []
    for entry in sorted(metadata.entry_points(group="unicomm.backends"), key=lambda entry: entry.name):
        package = entry.dist.name if entry.dist else entry.module

        def load(name: str = entry.name) -> str:
            from unicomm.backends.registry import find_backend

            return ", ".join(sorted(find_backend(name).capabilities.device_types))

        cure = f"install what it needs, or uninstall {package}"
        reports.append(_judge(entry.name, [attempt(f"{package} ({entry.value})", cure, load)]))
    return reports


def _package(name: str) -> Finding:
    return Finding(name, None, version_of(name) or "not installed")


_MPI_CURE = (
    "pip install 'unicomm[mpi-mpich]'; for another MPI that is there, name its library in MPI4PY_LIBMPI"
)


def _python(code: str) -> subprocess.CompletedProcess[str]:
    """Runs `code` in another process, because a broken MPI may end the process."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False
    )


def _which_mpi() -> Finding:
    """Finds the MPI library that mpi4py uses."""
    what = "MPI library"
    if version_of("mpi4py") is None:
        launcher = shutil.which("mpiexec") or shutil.which("mpirun")
        text = f"launcher {launcher}" if launcher else "not checked, because mpi4py is missing"
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
    return Finding(what, False, f"mpi4py finds none: {_last_line(done)}", _MPI_CURE)


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
