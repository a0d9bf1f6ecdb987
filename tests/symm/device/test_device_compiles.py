"""The kernels of symmetric memory are compiled by the compilers of both vendors, where these are.

NVRTC is looked for where the loader and UNICOMM_NVRTC, a path, say; nvcc and hipcc on PATH.
"""

import ctypes
import os
import re
import shutil

import numpy as np
import pytest

from tests.commands import run
from unicomm.comms.memory.device_kernels import FIELDS, FOLDER, KERNELS, OPTIONS, source

SOURCE = FOLDER / "kernels.cu"


def nvrtc():
    given = os.environ.get("UNICOMM_NVRTC")
    for name in [given] if given else ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return pytest.skip("no NVRTC; UNICOMM_NVRTC may say where it is")


def test_what_the_launcher_reads():
    """The fields of the kernels' argument, and the text that run-time compilers get."""
    assert FIELDS[:4] == ("rank", "world", "distances", "control")
    assert len(set(FIELDS)) == len(FIELDS) > 30
    assert '#include "' not in source()
    assert len([name for name in KERNELS if name.startswith("symm_reduce_")]) == 12
    assert len(set(KERNELS)) == len(KERNELS) > 20


@pytest.mark.parametrize("arch", ["sm_75", "sm_90"])
def test_nvrtc(arch):
    library = nvrtc()
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    text = source().encode()
    assert library.nvrtcCreateProgram(ctypes.byref(program), text, b"kernels.cu", 0, None, None) == 0
    options = [*OPTIONS, f"-arch={arch}", "-ftz=true"]  # which cupy adds
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    result = library.nvrtcCompileProgram(program, len(options), given)
    assert library.nvrtcGetProgramLogSize(program, ctypes.byref(size)) == 0
    log = ctypes.create_string_buffer(size.value)
    assert library.nvrtcGetProgramLog(program, log) == 0
    assert result == 0, log.value.decode()
    assert library.nvrtcGetPTXSize(program, ctypes.byref(size)) == 0
    ptx = ctypes.create_string_buffer(size.value)
    assert library.nvrtcGetPTX(program, ptx) == 0
    found = set(re.findall(r"\.entry (symm_\w+)\(", ptx.value.decode()))
    assert found == set(KERNELS)
    # Subnormal numbers are numbers, and no NaN.
    assert set(re.findall(r"\b\S+\.ftz\S*", ptx.value.decode())) <= {"setp.nan.ftz.f32"}
    # One argument by value, of as many bytes as the launcher's array.
    sizes = set(re.findall(r"\.param \.align 8 \.b8 symm_\w+\[(\d+)\]", ptx.value.decode()))
    assert sizes == {str(np.zeros(len(FIELDS), np.int64).nbytes)}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_nvcc(arch, tmp_path):
    compiler = shutil.which("nvcc") or pytest.skip("no nvcc on PATH")
    command = [compiler, *OPTIONS, "-Werror", "all-warnings", "-cubin", f"-arch={arch}"]
    compile_with([*command, "-o", str(tmp_path / "kernels.cubin")])


@pytest.mark.parametrize("arch", ["gfx90a", "gfx1030"])
def test_hipcc(arch, tmp_path):
    """Waves of 64 and of 32."""
    compiler = shutil.which("hipcc") or pytest.skip("no hipcc on PATH")
    command = [compiler, *OPTIONS, "-Wall", "-Werror", "-O3", "--cuda-device-only", "-c", "-x", "hip"]
    compile_with([*command, f"--offload-arch={arch}", "-o", str(tmp_path / "kernels.o")])


def compile_with(command):
    done = run([*command, str(SOURCE)], within=110, env=dict(os.environ) | {"HIP_PLATFORM": "amd"})
    assert done.returncode == 0, done.stderr
