"""Building the extensions of extensions/torch_bridge.py."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import torch

from .builds import BuildError, building, install
from .torch_bridge import RECORD, Unit, bridge_path, load_from


def build(unit: Unit = RECORD) -> Path:
    """Compiles, installs and tries the extension; where it is. Raises `BuildError`.

    One that was built from these sources for this torch stays, if it loads.
    """
    target = bridge_path(unit)
    with building(target):
        if target.exists():
            try:
                load_from(target, unit)
            except ImportError:
                target.unlink()
            else:
                return target
        _compile(unit, target)
    return target


def _compile(unit: Unit, target: Path) -> None:
    chosen = os.environ.get("CXX")
    compiler = shlex.split(chosen or "") or [shutil.which("g++") or shutil.which("c++") or ""]
    if not shutil.which(compiler[0]):
        raise BuildError("no C++ compiler: install g++, or name one in CXX")
    with tempfile.TemporaryDirectory() as name:
        made = Path(name) / target.name
        done = subprocess.run(
            [*compiler, *_flags(), str(unit.source), "-o", str(made), *_libraries()],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise BuildError(f"{compiler[0]} failed for torch {torch.__version__}:\n{done.stderr[-3000:]}")
        install(made, target)
    try:
        load_from(target, unit)  # from there, for torch's operations are registered by loading, once
    except ImportError as error:
        target.unlink(missing_ok=True)
        raise BuildError(f"what was built does not load: {error}") from None


def _root() -> Path:
    return Path(torch.__file__).parent


def _flags() -> list[str]:
    include = _root() / "include"
    folders = (
        include,
        include / "torch" / "csrc" / "api" / "include",
        Path(sysconfig.get_paths()["include"]),
    )
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    flags = [
        "-O1",
        "-std=c++20",
        "-shared",
        "-fPIC",
        "-fvisibility=hidden",
        f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
    ]
    return [*flags, *(f"-I{folder}" for folder in folders)]


def _libraries() -> list[str]:
    folder = _root() / "lib"
    return [f"-L{folder}", f"-Wl,-rpath,{folder}", "-ltorch_python", "-ltorch_cpu", "-lc10"]
