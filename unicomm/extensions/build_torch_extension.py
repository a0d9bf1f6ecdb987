"""Compiling the extensions of torch_extensions.py."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import torch

from .build_cache import BuildError, building, install
from .torch_extensions import RECORD_PARAM_COMMS, TorchExtension, extension_path, load_from


def build(extension: TorchExtension = RECORD_PARAM_COMMS) -> Path:
    """Compiles, installs and loads the extension. Returns its file. Raises `BuildError`.

    An existing file for these sources and this torch is kept if it loads.
    """
    target = extension_path(extension)
    with building(target):
        if target.exists():
            try:
                load_from(target, extension)
            except ImportError:
                target.unlink()
            else:
                return target
        _compile(extension, target)
    return target


def _compile(extension: TorchExtension, target: Path) -> None:
    chosen = os.environ.get("CXX")
    compiler = shlex.split(chosen or "") or [shutil.which("g++") or shutil.which("c++") or ""]
    if not shutil.which(compiler[0]):
        raise BuildError("no C++ compiler: install g++, or name one in CXX")
    with tempfile.TemporaryDirectory() as name:
        made = Path(name) / target.name
        done = subprocess.run(
            [*compiler, *_flags(), str(extension.source), "-o", str(made), *_libraries()],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise BuildError(f"{compiler[0]} failed for torch {torch.__version__}:\n{done.stderr[-3000:]}")
        install(made, target)
    try:
        # From its final place: loading registers torch operators, which is possible only once.
        load_from(target, extension)
    except ImportError as error:
        target.unlink(missing_ok=True)
        raise BuildError(f"the built extension does not load: {error}") from None


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
