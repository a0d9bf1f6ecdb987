"""Installs the double of rocSHMEM, and of hipcc, and builds unicomm's unit with them as a user does.

`installed(version)` is a folder with `bin/hipcc`, `include` and `lib`; `unit(version)` the shared object that
`unicomm build rocshmem` makes of it. Each once for these sources, for all test processes.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from unicomm.extensions import build_rocshmem as rocshmem_build
from unicomm.launch.cli import app

HERE = Path(__file__).parent
STREAMS = HERE.parent / "nccl_double"  # what a double of a device's runtime has
VERSIONS = {20001: "2.0.1", 30000: "3.0.0", 30300: "3.3.0", 30500: "3.5.0"}

# The options that only AMD's compiler knows are left out, and what it is for is checked.
HIPCC = """#!/bin/sh
test "$1" = --version && echo "HIP version: 6.4, a double" && exit
test "$HIP_PLATFORM" = amd || { echo "without HIP_PLATFORM=amd it would be nvcc" >&2; exit 1; }
case " $* " in *" -fgpu-rdc "*) ;; *) echo "not relocatable" >&2; exit 1;; esac
for word; do
    shift
    case "$word" in
        -fgpu-rdc | --hip-link | --offload-arch=* | -lhsa-runtime64 | -O3) ;;
        *.hip.cpp) set -- "$@" -x c++ "$word" ;;
        *) set -- "$@" "$word" ;;
    esac
done
exec COMPILER -pthread "$@"
"""
MPI = """#pragma once
using MPI_Comm = int;
constexpr MPI_Comm MPI_COMM_WORLD = 0;
"""


def _cache() -> Path:
    compiler = shutil.which("g++")
    if not compiler or not shutil.which("ar"):
        pytest.skip("needs g++ and ar")
    key = hashlib.sha256()
    sources = [*sorted(HERE.rglob("*.?pp")), *sorted(HERE.rglob("*.h")), *sorted(STREAMS.glob("streams.*"))]
    for path in (*sources, Path(__file__), Path(rocshmem_build.__file__)):
        key.update(path.read_bytes())
    key.update(rocshmem_build.unit_path().name.encode())
    folder = Path(tempfile.gettempdir()) / f"unicomm-rocshmem-double-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder / key.hexdigest()[:16]


def write_headers(folder: Path, version: int) -> None:
    """The headers of one version, as they are installed."""
    (folder / "include" / "rocshmem").mkdir(parents=True, exist_ok=True)
    header = (HERE / "rocshmem.hpp").read_text()
    include = "#include <mpi.h>\n"
    if version >= 30100:  # as AMD's says it since then
        header = header.replace(include, f"#if defined(HAVE_EXTERNAL_MPI)\n{include}#endif\n")
    (folder / "include" / "rocshmem" / "rocshmem.hpp").write_text(header)
    text = f"#pragma once\n#define ROCSHMEM_DOUBLE_VERSION {version}\n"
    if version >= 30000:
        text += f'#define ROCSHMEM_VERSION "{VERSIONS[version]}"\n'
    if version >= 30300:
        text += '#define ROCSHMEM_OFFLOAD_TARGETS "gfx90a;gfx942;gfx1030"\n'
    (folder / "include" / "rocshmem" / "rocshmem_config.h").write_text(text)
    (folder / "include" / "mpi.h").write_text(MPI)


def installed(version: int) -> Path:
    folder = _cache() / str(version)
    if folder.exists():
        return folder
    folder.parent.mkdir(exist_ok=True)
    with (folder.parent / f"{version}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            return folder
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        write_headers(part, version)
        shutil.copytree(HERE / "runtime" / "hip", part / "include" / "hip")
        shutil.copy(STREAMS / "streams.hpp", part / "include" / "hip" / "double_streams.hpp")
        (part / "bin").mkdir()
        hipcc = part / "bin" / "hipcc"
        hipcc.write_text(HIPCC.replace("COMPILER", shutil.which("g++") or ""))
        hipcc.chmod(0o755)
        lib = part / "lib"
        lib.mkdir()
        compile_ = ["g++", "-std=c++20", "-O1", "-fPIC", "-Wall", "-Wextra", f"-I{part / 'include'}"]
        runtime = ["-pthread", "-shared", f"-I{STREAMS}", str(STREAMS / "streams.cpp")]
        named = "-Wl,-soname,libamdhip64.so,-z,nodelete,-Bsymbolic"  # beside other doubles with such streams
        made = part / "library.o"
        for command in (
            [*compile_, "-c", str(HERE / "library.cpp"), "-o", str(made)],
            ["ar", "rcs", str(lib / "librocshmem.a"), str(made)],
            [*compile_, *runtime, named, "-o", str(lib / "libamdhip64.so")],
            ["g++", "-shared", "-x", "c++", "/dev/null", "-o", str(lib / "libmpi.so")],
        ):
            subprocess.run(command, check=True, timeout=250)
        part.rename(folder)
    return folder


def unit(version: int) -> Path:
    folder = installed(version)
    cache = folder / "cache"
    with (folder / "unit.lock").open("w") as lock, pytest.MonkeyPatch.context() as patch:
        fcntl.flock(lock, fcntl.LOCK_EX)
        patch.setenv("XDG_CACHE_HOME", str(cache))
        path = rocshmem_build.unit_path()
        if not path.exists():
            patch.setenv("ROCM_PATH", str(folder))
            command = ["build", "rocshmem", "--offload-arch=gfx90a", "--offload-arch=gfx1030"]
            if version < 30100:
                command += ["--mpi", str(folder)]
            done = CliRunner().invoke(app, command)
            assert done.exit_code == 0, done.output
            assert f"rocSHMEM {VERSIONS[version]} in" in done.output
            assert "-fgpu-rdc --hip-link -shared --offload-arch=gfx90a" in done.output
            assert str(path) in done.output.replace("\n", "")
    return path
