"""Starting the programs of this folder."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"


def torchrun(ranks, program, *arguments, stock=False, **env):
    """A finished run on this host; a rank that hangs ends with all stacks on stderr.

    A run that uses torch's own Gloo alone, `stock`, is repeated where that ended a rank: on a busy machine
    its threads may outlive Python (pytorch/pytorch#190489, #179291).
    """
    done = _torchrun(ranks, program, *arguments, **env)
    if stock and done.returncode and "terminate called without an active exception" in done.stderr:
        return _torchrun(ranks, program, *arguments, **env)
    return done


def _torchrun(ranks, program, *arguments, **env):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.run(
        [*command, program, *arguments],
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | env,
    )
