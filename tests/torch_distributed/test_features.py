"""torch.distributed, feature by feature, on unicomm by the switch alone."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "features.py"


def run(ranks, **env):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        PROGRAM,
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | env,
    )
    found = re.findall(r'\{"group": .*?\}\}', done.stdout)
    assert len(found) == ranks, done.stdout[-3000:] + done.stderr[-6000:]
    return [json.loads(text) for text in found], done.stderr


@pytest.mark.processes
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("backend", "ranks"), [("shm", 2), ("gloo", 2), ("auto", 4)])
def test_switched(backend, ranks):
    said, errors = run(ranks, TORCH_DISTRIBUTED_USE_TORCHCOMMS="1", UNICOMM_BACKEND=backend)
    for rank in said:
        assert rank["group"] == "UnicommProcessGroup"
        bad = {name: what for name, what in rank["results"].items() if what != "ok"}
        assert bad == {}
        assert len(rank["results"]) == 36
    assert f"now is unicomm '{backend}'" in errors
