"""Wheels of libraries, each in a folder of its own: some have files of one name, and Python sees none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_PIP = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]


def install(wheel: str, home: Path, library: str) -> Path:
    """Installs a wheel below `home` unless its folder has a file that matches `library`, a pattern.

    Returns the wheel's folder. Raises `CalledProcessError` when pip fails.
    """
    folder = home.resolve() / wheel
    if next(folder.glob(library), None) is None:
        subprocess.run([*_PIP, "--ignore-installed", "--no-deps", "--prefix", str(folder), wheel], check=True)
    return folder
