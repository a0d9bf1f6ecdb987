"""Starting the programs of this folder."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"


def torchrun(ranks, program, *arguments, **env):
    """A finished run on this host; a rank that hangs ends with all stacks on stderr."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.run(
        [*command, program, *arguments],
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | env,
    )
