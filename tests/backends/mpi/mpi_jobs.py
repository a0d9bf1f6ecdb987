"""Ranks that a real mpiexec starts, with each of the MPI wheels that are installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tests.commands import clean_environment, run
from tools.mpi_libraries import Library, find

PROGRAMS = Path(__file__).parent / "programs"
WITHIN = 900  # seconds that a job may take: a hang, not a slow machine
NAMES = ("MPICH", "Open MPI")


def library(name: str) -> Library:
    """The one of that name; skips the test when it is not installed."""
    found, missing = find(ROOT / "build" / "mpi")
    for one in found:
        if one.name == name:
            return one
    pytest.skip(next((line for line in missing if line.startswith(name)), missing[-1]))


def _environment() -> dict[str, str]:
    return clean_environment() | {"UNICOMM_TRACE_DIR": os.environ["UNICOMM_TRACE_DIR"]}


@dataclass
class Ended:
    """What a job left: its exit code, the lines of JSON that its ranks printed, and all other text."""

    code: int
    said: list[dict[str, Any]]
    text: str

    def by_rank(self, event: str) -> list[dict[str, Any]]:
        """What the ranks said under that name, in their order."""
        return sorted((line for line in self.said if line["event"] == event), key=lambda line: line["rank"])


def mpiexec(
    name: str,
    ranks: int,
    script: Path | str,
    *arguments: str,
    options: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    within: Sequence[str] = (),
) -> Ended:
    """Runs a Python script under the mpiexec of that library, and waits for its end.

    `within`: a command that gets the script's as its arguments.
    """
    chosen = library(name)
    command = [
        *chosen.command,
        *options,
        "-n",
        str(ranks),
        *within,
        sys.executable,
        str(PROGRAMS / script),
        *arguments,
    ]
    done = run(command, within=WITHIN, env=_environment() | chosen.environment | dict(env or {}))
    return _read(done)


def alone(code: str, env: Mapping[str, str]) -> Ended:
    """Runs a piece of Python in one process that no mpiexec started."""
    done = run([sys.executable, "-c", code], within=WITHIN, env=_environment() | dict(env))
    return _read(done)


def _read(done: subprocess.CompletedProcess[str]) -> Ended:
    said, text = [], ""
    for line in done.stdout.splitlines():
        try:
            said.append(json.loads(line))
        except ValueError:
            text += line + "\n"
    return Ended(done.returncode, said, text + done.stderr)
