"""GPU vendors' libraries that open without a GPU: their symbols, sizes and compilers are tested everywhere.

    python -m tools.gpu_libraries               installs NCCL, NVSHMEM, NVRTC, cupy in build/gpu-libraries
    python -m tools.gpu_libraries run COMMAND   runs a command that finds them

`make real-libraries` runs the tests that need nothing else.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tools.wheel_folders import install

HOME = Path("build") / "gpu-libraries"
_PACKAGES = "lib/python*/site-packages"
#: Wheel: its library, below the wheel's folder.
LIBRARIES = {
    "nvidia-nccl-cu12": f"{_PACKAGES}/nvidia/nccl/lib/libnccl.so.2",
    "nvidia-nvshmem-cu12": f"{_PACKAGES}/nvidia/nvshmem/lib/libnvshmem_host.so.3",
    "nvidia-cuda-nvrtc-cu12": f"{_PACKAGES}/nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
}
#: Wheel: what Python imports of it, below the wheel's folder.
PACKAGES = {"cupy-cuda12x": f"{_PACKAGES}/cupy", "cuda-pathfinder": f"{_PACKAGES}/cuda"}
WHEELS = LIBRARIES | PACKAGES


def environment(home: Path = HOME) -> dict[str, str]:
    """Variables by which tests find the libraries. Raises `FileNotFoundError` when one is not installed."""
    found = {wheel: next((home.resolve() / wheel).glob(library), None) for wheel, library in WHEELS.items()}
    missing = [wheel for wheel, path in found.items() if path is None]
    if missing:
        raise FileNotFoundError(f"{', '.join(missing)}: run `python -m tools.gpu_libraries`")
    paths = {wheel: path for wheel, path in found.items() if path is not None}

    def joined(variable: str, wheels: dict[str, str]) -> dict[str, str]:
        given = filter(None, [os.environ.get(variable)])
        return {variable: os.pathsep.join([*(str(paths[wheel].parent) for wheel in wheels), *given])}

    return {
        **joined("LD_LIBRARY_PATH", LIBRARIES),
        **joined("PYTHONPATH", PACKAGES),
        "UNICOMM_NVRTC": str(paths["nvidia-cuda-nvrtc-cu12"]),
        "UNICOMM_TEST_NVSHMEM": str(paths["nvidia-nvshmem-cu12"].parents[1]),
    }


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["run"]:
        return subprocess.run(arguments[1:], env=os.environ | environment(), check=False).returncode
    for wheel, library in WHEELS.items():
        print(f"{wheel}: {install(wheel, HOME, library)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
