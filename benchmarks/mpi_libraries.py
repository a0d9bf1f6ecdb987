"""The MPI libraries that are compared with: wheels, each in a virtual environment of its own, since they
overwrite each other's files. `python benchmarks/mpi_libraries.py` installs them under build/mpi (430 MB)."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

HOME = Path(__file__).parent.parent / "build" / "mpi"
# Name: (wheel, library, arguments of mpiexec, environment)
_KNOWN: dict[str, tuple[str, str, list[str], dict[str, str]]] = {
    "Open MPI": (
        "openmpi",
        "libmpi.so.40",
        ["--allow-run-as-root", "--oversubscribe"],
        {"OPAL_PREFIX": "{home}"},
    ),
    "MPICH": ("mpich", "libmpi.so.12", [], {}),
    "Intel MPI": (
        "impi-rt",
        "libmpi.so.12",
        [],
        {"I_MPI_ROOT": "{home}", "LD_LIBRARY_PATH": "{home}/lib", "FI_PROVIDER": "tcp"},
    ),
}


@dataclass(frozen=True)
class Library:
    name: str
    command: list[str]  # mpiexec with what it needs here
    environment: dict[str, str]  # for mpiexec and the ranks; mpi4py loads the library that it names


def find() -> tuple[list[Library], list[str]]:
    """The libraries that are installed and which mpi4py can load, and a line for each that is missing."""
    found, missing = [], []
    for name, (wheel, library, arguments, environment) in _KNOWN.items():
        home = HOME / wheel
        path = home / "lib" / library
        if not path.exists():
            missing.append(f"{name}: not installed; run `{Path(sys.executable).name} {__file__}`")
            continue
        variables = {key: value.format(home=home) for key, value in environment.items()}
        command = [str(home / "bin" / "mpiexec"), *arguments]
        found.append(Library(name, command, {**variables, "MPI4PY_LIBMPI": str(path)}))
    if found:
        try:
            import mpi4py  # noqa: F401
        except ImportError:
            return [], [*missing, "mpi4py is not installed: pip install 'unicomm[mpi]'"]
    return found, missing


def install() -> None:
    for wheel, *_ in _KNOWN.values():
        home = HOME / wheel
        if not (home / "lib").exists() or not list(home.glob("lib/libmpi.so*")):
            venv.create(home, with_pip=True)
            subprocess.run([home / "bin" / "pip", "install", "-q", wheel], check=True)
        print(f"{wheel}: {home}")
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "mpi4py>=4.1"], check=True, env=os.environ)


if __name__ == "__main__":
    install()
