"""The native core under the address, undefined-behaviour and thread sanitizers, as `make sanitize`, shortly.

The programs are built in build/, where a later run finds them. A fresh build takes most of the time.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

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


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_native_core(sanitizers, tmp_path):
    if not compiler_has(sanitizers, tmp_path):
        pytest.skip(f"no compiler with the libraries of -fsanitize={sanitizers}")
    missing = [tool for tool in ("cmake", "ninja") if not (TOOLS / tool).exists()]
    if missing:
        pytest.skip(f"not installed in {sys.prefix}: {', '.join(missing)}")
    build = ROOT / "build" / f"sanitize-{sanitizers.split(',')[0]}"
    ninja = f"-DCMAKE_MAKE_PROGRAM={TOOLS / 'ninja'}"
    run(
        [TOOLS / "cmake", "-G", "Ninja", "-S", ".", "-B", build, ninja, f"-DUNICOMM_SANITIZE={sanitizers}"],
        120,
    )
    run([TOOLS / "cmake", "--build", build], 1500)
    for program, amount in PROGRAMS.items():
        run([build / program, amount], 300)
