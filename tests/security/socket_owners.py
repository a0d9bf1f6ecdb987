"""Which library of a process made a socket: noted by a library that the processes of a job preload."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.mocks.nccl.build import compiler

_SOURCE = Path(__file__).with_name("socket_tracer.cpp")
TRACE = "SOCKET_TRACE"  # the environment variable that names the file of the notes


def environment(folder: Path) -> dict[str, str]:
    """What a job's processes need for their sockets to be noted in `folder`. Raises `NoCompiler`."""
    library = folder / "socket_tracer.so"
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-o", str(library), str(_SOURCE), "-ldl"]
    subprocess.run([*compiler(), *flags], check=True, timeout=60)
    return {"LD_PRELOAD": str(library), TRACE: str(folder / "sockets")}


def owners() -> dict[tuple[str, int], str]:
    """The file names of the libraries that made this network namespace's sockets, by address and port."""
    here = os.readlink("/proc/self/ns/net")
    found = {}
    for line in Path(os.environ[TRACE]).read_text().splitlines():
        network, address, port, library = line.split("\t")
        if network == here:
            found[address, int(port)] = Path(library).name
    return found
