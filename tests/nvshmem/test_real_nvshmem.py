"""The real NVSHMEM, where it is: in the Python package nvidia.nvshmem (`pip install nvidia-nvshmem-cu13`), or
in the folder that UNICOMM_TEST_NVSHMEM names, which has lib/ and include/. It needs no GPU to be opened.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from unicomm.comms.operations.symmetric_table import Capability

HERE = Path(__file__).parent
CSRC = HERE.parent.parent / "csrc"


@pytest.fixture(scope="module")
def nvshmem() -> Path:
    if named := os.environ.get("UNICOMM_TEST_NVSHMEM"):
        return Path(named)
    try:
        spec = importlib.util.find_spec("nvidia.nvshmem")
    except ImportError:
        spec = None
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("no package nvidia.nvshmem, and UNICOMM_TEST_NVSHMEM names no folder")
    return Path(next(iter(spec.submodule_search_locations)))


def told(nvshmem: Path, code: str) -> list[object]:
    """What a process of its own says that has opened the library."""
    path = nvshmem / "lib" / "libnvshmem_host.so.3"
    text = f"import json\nfrom unicomm import _core\ntable = _core.symm_nvshmem({str(path)!r})\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(said, list)
    return said


def test_it_opens_and_makes_ids(nvshmem: Path) -> None:
    name, capabilities, (version, file, status), fault, again, lengths, same = told(
        nvshmem,
        "(fault, one), (again, two) = table.unique_id(2, 3 << 20), table.unique_id(2, 0)\n"
        "info, sizes = _core.symm_nvshmem_info(), [one[:4].hex(), two[:4].hex(), len(one), len(two)]\n"
        "print(json.dumps([table.name, table.capabilities, info, fault, again, sizes, one == two]))",
    )
    assert name == "NVSHMEM"
    assert Capability(capabilities) == ~Capability.ATOMICS
    assert 30400 <= version < 40000
    assert Path(str(file)).resolve() == (nvshmem / "lib" / "libnvshmem_host.so.3").resolve()
    assert status in (0, 1)  # not initialised
    assert (fault, again, same) == (None, None, False)
    assert lengths == ["03000000", "00000000", 128, 128]


def test_without_a_gpu_init_is_refused_and_the_process_goes_on(nvshmem: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    fault, nothing = told(
        nvshmem,
        "_, uid = table.unique_id(1, 1 << 20)\n"
        "fault, domain = table.init(uid, 0, 1, 'main', 60.0)\n"
        "print(json.dumps([fault, domain is None]))",
    )
    assert nothing
    assert "hostlib_init_attr failed with" in fault[3] or "found no GPU" in fault[3]


def test_its_headers_say_what_is_declared_here(nvshmem: Path) -> None:
    include = nvshmem / "include"
    compiler = shutil.which("g++") or shutil.which("clang++")
    if not (include / "device_host" / "nvshmem_types.h").exists() or compiler is None:
        pytest.skip("no headers, or no C++ compiler")
    command = [compiler, "-std=c++20", "-fsyntax-only", "-w", f"-I{include}", f"-I{CSRC}"]
    if nvcc := shutil.which("nvcc"):  # with CUDA's headers, the functions' types too
        plan = subprocess.run(
            [nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True, check=True
        )
        command += ["-DWITH_CUDA", *re.findall(r'INCLUDES="(-I[^"]+)"', plan.stderr)]
    done = subprocess.run(
        [*command, str(HERE / "headers.cpp")], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
