"""Builds the mock of NVSHMEM once for all test processes: `library()` is its path."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import subprocess
import tempfile
from pathlib import Path

from tests.mocks.nccl.build import FLAGS, NoCompiler, compiler

__all__ = ["NoCompiler", "library"]
HERE = Path(__file__).parent
STREAMS = HERE.parent / "nccl"
LATEST = 30800
_NEW = [*FLAGS, "-std=c++17", "-O1", f"-I{HERE}", f"-I{STREAMS}"]


def library(version: int = LATEST) -> Path:
    """The library's path, compiled if this source has not been; `version` as 30405 for 3.4.5.

    Raises `NoCompiler`, or `RuntimeError` with the compiler's output.
    """
    sources = [HERE / "library.cpp", HERE / "world.cpp", STREAMS / "streams.cpp"]
    command = [*compiler(), *_NEW, f"-DMOCK_VERSION={version}"]
    key = hashlib.sha256(" ".join(command).encode())
    for path in [*sources, HERE / "abi.hpp", HERE / "world.hpp", STREAMS / "streams.hpp", Path(__file__)]:
        key.update(path.read_bytes())
    root = Path(tempfile.gettempdir()) / f"unicomm-nvshmem-mock-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    if root.stat().st_uid != os.getuid():
        raise RuntimeError(f"{root} belongs to somebody else; set TMPDIR to a folder of your own")
    folder = root / key.hexdigest()[:20]
    folder.mkdir(exist_ok=True)
    path, part = folder / "libnvshmem_host_mock.so", folder / "part"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one of several test processes compiles
        if not path.exists():
            # With its own name and symbols: the mock of NCCL may be in the same process.
            link = ["-shared", f"-Wl,-soname,{path.name},-z,nodelete,-Bsymbolic", "-o", str(part), "-lrt"]
            done = subprocess.run(
                [*command, *map(str, sources), *link], capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise RuntimeError(f"the mock does not compile:\n{shlex.join(command)}\n{done.stderr}")
            part.rename(path)
    return path


if __name__ == "__main__":
    print(library())
