"""The native core under the address, undefined-behaviour and thread sanitizers, as `make sanitize`, shortly.

The programs and the extension module are built in build/, where a later run finds them. A fresh build takes
most of the time. Only `make sanitize` checks the kernels of all instruction sets.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.core import sanitized_module

ROOT = Path(__file__).resolve().parents[2]
TOOLS = Path(sysconfig.get_path("scripts"))
# What each program is told to do; `make sanitize` lets them run longer.
PROGRAMS = {
    "stress": "6",
    "ring_stress": "1500",
    "symm_stress": "1",
    "pickle_fuzz": "4000",
    "segment_fuzz": "2",
}


def compiler_has(sanitizers: str, folder: Path) -> bool:
    """Whether there is a compiler with the runtime libraries of these sanitizers."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        return False
    source, program = folder / "empty.cpp", folder / "empty"
    source.write_text("int main() { return 0; }\n")
    command = [compiler, f"-fsanitize={sanitizers}", "-o", str(program), str(source)]
    return all(
        subprocess.run(step, capture_output=True, timeout=60, check=False).returncode == 0
        for step in (command, [str(program)])
    )


def run(command: list[str | Path], within: float) -> None:
    done = subprocess.run(
        command,
        cwd=ROOT,
        timeout=within,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-8000:]}"


def built(sanitizers: str, targets: list[str], folder: Path) -> Path:
    """Builds these targets and returns the build folder; skips the test without a compiler."""
    if not compiler_has(sanitizers, folder):
        pytest.skip(f"no compiler with the libraries of -fsanitize={sanitizers}")
    missing = [tool for tool in ("cmake", "ninja") if not (TOOLS / tool).exists()]
    if missing:
        pytest.skip(f"not installed in {sys.prefix}: {', '.join(missing)}")
    build = ROOT / "build" / f"sanitize-{sanitizers.partition(',')[0]}"
    build.mkdir(parents=True, exist_ok=True)
    tools = [f"-DCMAKE_MAKE_PROGRAM={TOOLS / 'ninja'}", f"-DPython_EXECUTABLE={sys.executable}"]
    with (build / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two tests build in one folder
        run(
            [
                TOOLS / "cmake",
                "-G",
                "Ninja",
                "-S",
                ".",
                "-B",
                build,
                *tools,
                f"-DUNICOMM_SANITIZE={sanitizers}",
            ],
            120,
        )
        run([TOOLS / "cmake", "--build", build, "--target", *targets], 1500)
    return build


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_native_core(sanitizers, tmp_path):
    build = built(sanitizers, list(PROGRAMS), tmp_path)
    for program, amount in PROGRAMS.items():
        run([build / program, amount], 300)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("sanitizers", "defect", "says"),
    [("address,undefined", "overflow", "heap-buffer-overflow"), ("thread", "race", "data race")],
)
def test_extension_module(sanitizers, defect, says, tmp_path):
    kind = sanitizers.partition(",")[0]
    build = built(sanitizers, ["_core"], tmp_path)
    command = sanitized_module.pytest_command(kind, sanitized_module.SHORT)
    code, output, reports = sanitized_module.run(kind, build, command, 600)
    assert (code, reports) == (0, []), output[-8000:]

    command = ["-m", "tests.core.sanitizer_defects", defect]
    _, output, reports = sanitized_module.run(kind, build, command, 120)
    assert reports, output[-8000:]
    assert all(says in report for report in reports)


_RACE = """\
WARNING: ThreadSanitizer: data race (pid=1)
  Write of size 8 at 0x7f99 by thread T3:
    #0 memcpy sanitizer_common_interceptors.inc:827 (libtsan.so.2+0x1)
    #1 unicomm::fold() ../../csrc/reduce/fold.cpp:48 (_core.cpython-311-x86_64-linux-gnu.so+0x2)

  Previous read of size 8 at 0x7f99 by thread T2:
    #0 {other}

  Thread T2 (tid=1, running) created by main thread at:
    #0 pthread_create tsan_interceptors_posix.cpp:1001 (libtsan.so.2+0x5e686)
"""


@pytest.mark.parametrize(
    ("other", "ours"),
    [
        ("unicomm::fold() ../../csrc/reduce/fold.cpp:40 (_core.cpython-311-x86_64-linux-gnu.so+0x3)", True),
        ("at::native::view(at::Tensor const&) <null> (libtorch_cpu.so+0x4)", False),
        ("nb_func_vectorcall nanobind/src/nb_func.cpp:1 (_core.cpython-311-x86_64-linux-gnu.so+0x5)", False),
    ],
)
def test_reports_about_others_are_left_out(other, ours):
    (report,) = sanitized_module.split(f"{'=' * 18}\n{_RACE.format(other=other)}{'=' * 18}\n")
    assert sanitized_module.is_ours(report) is ours
