"""Runs tests on the extension module built with sanitizers, and collects what these report.

`python -m tests.core.sanitized_module address build/sanitize-full-address` runs the tests of `make sanitize`
and prints the reports about our code. CMake's target `_core` with UNICOMM_SANITIZE builds the module.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_HOSTS = ("tests/backends/hosts/test_columns.py", "tests/backends/hosts/test_messages.py")
_MEMORY = ("tests/symm", "tests/comms/memory", "tests/comms/operations/test_native_arrays.py")
# Symmetric memory, windows, transports, hosts, the vendors' tables on mock libraries, the recorder, and all
# kernels.
TESTS = {
    "address": (
        *("tests/core/test_reduce.py", "tests/core/test_wire_formats.py", "tests/core/test_data_checksum.py"),
        *("tests/core/test_reproducible_sums.py", "tests/core/test_tables.py"),
        *("tests/backends/ucx", "tests/backends/tcp", "tests/backends/transport"),
        *("tests/backends/nccl/test_nccl_mock.py", "tests/backends/shmem", "tests/flight_recorder/ring"),
        *("tests/flight_recorder/recording", "tests/comms/execution/test_fast_and_general.py"),
        *(*_HOSTS, *_MEMORY),
    ),
    # Ranks in threads: what starts processes takes minutes under this sanitizer, or hangs after a fork.
    "thread": (
        *("tests/backends/ucx/test_worker.py", "tests/backends/ucx/test_ucx.py"),
        *("tests/backends/tcp", "tests/backends/transport"),
        *("tests/core/test_reduce.py", "tests/core/test_data_checksum.py", *_HOSTS, *_MEMORY),
    ),
}
# What `make test` has time for, with either sanitizer.
SHORT = (
    *("tests/backends/ucx/test_worker.py", "tests/backends/tcp/test_streams.py"),
    *("tests/symm/test_windows.py", "tests/core/test_data_checksum.py"),
    *(
        "tests/backends/hosts/test_columns.py::test_ranks_of_larger_columns_reduce_parts",
        "tests/comms/operations/test_native_arrays.py",
    ),
)
# Left out: nvcc crashes beside the runtimes; for these it is an error to ask for too much memory; that of the
# thread sanitizer installs a signal handler, which a test takes for one of UCX.
_LEFT_OUT = "test_nvcc or test_a_message_for_which_there_is_no_memory"
LEFT_OUT = {"address": _LEFT_OUT, "thread": f"{_LEFT_OUT} or test_opening_installs_no_signal_handlers"}

# Python looks for this module at every start, also of the processes that tests start.
_FINDER = '''"""Gives every Python process the sanitized core for unicomm._core."""

import importlib.util
import sys


class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "unicomm._core":
            return importlib.util.spec_from_file_location(name, {core!r})
        return None


sys.meta_path.insert(0, Finder)
'''
# Leaks are not looked for: CPython and torch keep memory until the end of the process. Fatal signals and
# alternate signal stacks are left to faulthandler: tests crash on purpose, and check how.
_OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:use_sigaltstack=0:handle_segv=0:handle_sigbus=0:handle_sigfpe=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    # A process goes on after a report, because most are about torch and CPython, which are not instrumented.
    "TSAN_OPTIONS": "exitcode=0:history_size=4",
}
# UCX's hooks of mmap run in threads that have left the thread sanitizer, and crash there.
_UCX = {"UCX_MEM_EVENTS": "n", "UCX_MEM_MMAP_HOOK_MODE": "none"}
_FRAME = re.compile(r"^\s+#\d+ (.*)$", re.MULTILINE)


def _runtime(name: str) -> str:
    """The path of a library of the compiler."""
    command = [*shlex.split(os.environ.get("CXX", "c++")), f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def run(kind: str, build: Path, command: list[str], within: float) -> tuple[int, str, list[str]]:
    """Runs Python with the sanitized module; returns its exit code, output, and reports about our code."""
    core = next(iter(sorted(build.glob("_core*.so"))))
    libraries = {"address": ("libasan.so", "libubsan.so"), "thread": ("libtsan.so",)}[kind]
    with tempfile.TemporaryDirectory(prefix="unicomm-sanitized-") as folder:
        Path(folder, "sitecustomize.py").write_text(_FINDER.format(core=str(core.resolve())))
        environment = os.environ | (_UCX if kind == "thread" else {})
        environment |= {name: f"{value}:log_path={folder}/report" for name, value in _OPTIONS.items()}
        # The runtime looks for the functions that throw when it starts.
        environment["LD_PRELOAD"] = ":".join(map(_runtime, (*libraries, "libstdc++.so.6")))
        environment["PYTHONPATH"] = folder
        done = subprocess.run(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment,
            timeout=within,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        texts = [path.read_text(errors="replace") for path in sorted(Path(folder).glob("report*"))]
    reports = [report for text in texts for report in split(text)]
    return done.returncode, done.stdout, [report for report in reports if is_ours(report)]


def split(text: str) -> list[str]:
    """The reports of a log."""
    parts = text.split("==================\n") if "ThreadSanitizer" in text else [text]
    return [part for part in parts if part.strip()]


def is_ours(report: str) -> bool:
    """Whether a report is about our code.

    All reports of the address sanitizer and of undefined behaviour count. The thread sanitizer does not see
    how torch, UCX and glibc order their accesses, so it can be trusted only if both accesses are ours.
    """
    if "ThreadSanitizer" not in report:
        return "ERROR: " in report or "runtime error: " in report  # others are warnings
    # Who did it, and the other access of a data race; where the memory and the threads come from follows.
    stacks = report.split("\n\n")[: 2 if "data race" in report else 1]
    return all(_top_is_ours(stack) for stack in stacks)


def _top_is_ours(stack: str) -> bool:
    frames = [frame for frame in _FRAME.findall(stack) if "libtsan" not in frame]
    return bool(frames) and "_core." in frames[0] and "nanobind" not in frames[0]


def pytest_command(kind: str, tests: tuple[str, ...]) -> list[str]:
    left_out = f"not ({LEFT_OUT[kind]})"
    return ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "timeout=600", "-k", left_out, *tests]


def main(kind: str, build: str) -> int:
    code, output, reports = run(kind, Path(build), pytest_command(kind, TESTS[kind]), 7200)
    print(output, *reports, sep="\n")
    print(f"{len(reports)} reports of the {kind} sanitizer about the extension module")
    return code or bool(reports)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
