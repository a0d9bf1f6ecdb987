"""Starts the programs of this folder."""

import os
from pathlib import Path

from tests import commands
from tests.processes import forked_interpreters

PROGRAMS = Path(__file__).parent / "programs"


def torchrun(ranks, program, *arguments, **env):
    """Runs a program on this host by torchrun and returns the finished process.

    A rank that hangs ends with all stacks on stderr.
    """
    return _torchrun(commands.run, ranks, program, *arguments, **env)


def forked_torchrun(ranks, program, *arguments, **env):
    """As `torchrun`, but the ranks' interpreters are forked from a server that has torch."""
    return _torchrun(forked_interpreters.run, ranks, program, *arguments, **env)


def _torchrun(run, ranks, program, *arguments, **env):
    command = [*commands.torchrun(ranks), program, *arguments]
    return run(command, within=220, env=os.environ | {"OMP_NUM_THREADS": "1"} | env)


def forked(programs, ranks, program, *arguments, stock=False, **env):
    """Runs a program by `programs`, the fixture `forked_programs`, and returns what it printed.

    A run with torch's own Gloo alone, `stock`, is repeated if Gloo aborted a rank: a thread of Gloo may still
    release a tensor when Python ends (pytorch/pytorch#190489, #179291).
    """
    for _ in range(6 if stock else 1):
        done = programs.run(ranks, PROGRAMS / program, *arguments, **env)
        if done.returncode == 0 or "terminate called without an active exception" not in done.stderr:
            break
    return done
