"""The offsets by which the recorder reads the interpreter's frames, beside the headers of Python."""

import re
import shutil
from pathlib import Path

import pytest

from tests import ROOT
from tests.commands import run
from tools.wheels import interpreters

SOURCE = (ROOT / "csrc" / "recorder" / "call_stack.cpp").read_text()
ROW = re.compile(r"\{0x03([0-9A-F]{2}), (\d+), (true|false), (\d+)\}")
ROWS = {
    f"3.{int(minor, 16)}": (int(current), by == "true", int(code))
    for minor, current, by, code in ROW.findall(SOURCE)
}
PROGRAM = """
#include <Python.h>
#include <frameobject.h>
#define Py_BUILD_CORE 1
#include <internal/pycore_frame.h>
#undef Py_BUILD_CORE
#include <cstddef>
#include <cstdio>
#if PY_VERSION_HEX >= 0x030D0000
#define CURRENT offsetof(PyThreadState, current_frame)
#define CODE f_executable
#define AT instr_ptr
#else
static_assert(offsetof(_PyCFrame, current_frame) == 0);
#define CURRENT offsetof(PyThreadState, cframe)
#define CODE f_code
#define AT prev_instr
#endif
int main() {
    using Frame = _PyInterpreterFrame;
    std::printf("%zu %zu %zu ", CURRENT, offsetof(PyCodeObject, co_code_adaptive), offsetof(Frame, CODE));
    std::printf("%zu %zu %zu ", offsetof(Frame, previous), offsetof(Frame, AT), offsetof(Frame, owner));
    std::printf("%d", FRAME_OWNED_BY_CSTACK);
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("version", sorted(ROWS))
def test_offsets_are_those_of_the_headers(version, tmp_path):
    found = next(interpreters([version]), None)
    if found is None:
        pytest.skip(f"no Python {version} is installed")
    asked = run([found, "-c", "import sysconfig; print(sysconfig.get_path('include'))"])
    if not Path(asked.stdout.strip(), "Python.h").exists():
        pytest.skip(f"Python {version} is installed without its headers")
    (tmp_path / "offsets.cpp").write_text(PROGRAM)
    program = tmp_path / "offsets"
    source = program.with_suffix(".cpp")
    command = ["g++", "-w", "-fpermissive", "-I", asked.stdout.strip(), source, "-o", program]
    built = run(command)
    assert built.returncode == 0, built.stderr
    current, _, instructions = ROWS[version]
    fields = re.search(r"code = (\d+), previous = (\d+), at = (\d+), owner = (\d+)", SOURCE).groups()
    owned = re.search(r"owned_by_c = (\d+)", SOURCE)[1]
    expected = [current, instructions, *map(int, fields), int(owned)]
    assert run([program]).stdout == " ".join(map(str, expected))
