"""Commands that tests run as other processes, bounded in time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

# Variables by which a launcher, or the user, tells a process about a job.
_JOB_PREFIXES = (
    *(
        "UNICOMM_",
        "TORCH_",
        "TORCHCOMM",
        "TORCHELASTIC_",
        "GLOO_",
        "OMPI_",
        "OPAL_",
        "PMI",
        "PALS_",
        "SLURM_",
    ),
    *("MPI", "MASTER_", "LOCAL_"),
)
_JOB_NAMES = ("RANK", "WORLD_SIZE", "GROUP_RANK", "ROLE_RANK")


def run(
    command: Sequence[object],
    within: float = 250.0,
    env: Mapping[str, str] | None = None,
    check: bool = False,
    popen: type[subprocess.Popen[Any]] = subprocess.Popen,
    **more: Any,
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end and returns what it printed; kills it after `within` seconds.

    `popen`: what starts it, with the arguments `more`.
    """
    words = [str(word) for word in command]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with popen(words, env=env, text=True, **pipes, **more) as process:
        try:
            out, complaints = process.communicate(timeout=within)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(words, process.returncode, out, complaints)
    if check:
        done.check_returncode()
    return done


def torchrun(ranks: int) -> list[str]:
    """The beginning of a command that starts `ranks` processes of a program on this host."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]


def clean_environment() -> dict[str, str]:
    """This process's environment without anything about jobs, and with one thread a rank.

    Without `CI` as well: where it is set, torch's test runner writes XML by a library that is not here.
    """
    dropped = (*_JOB_NAMES, "CI")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_JOB_PREFIXES) and k not in dropped}
    return kept | {"OMP_NUM_THREADS": "1"}
