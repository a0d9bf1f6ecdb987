"""Open MPI's OpenSHMEM, where it is installed (Debian: openmpi-bin), has the same results."""

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.commands import run
from tests.symm.exchanges import shared
from unicomm import symm
from unicomm.testing import run_ranks

PROGRAM = Path(__file__).parent / "openshmem_program.py"
COUNT = 5
WITHIN = 90  # seconds: a hang, not a slow machine


def by_openshmem(n, seed):
    """What each PE says, by PE; skips the test when there is no OpenSHMEM that starts."""
    launcher = shutil.which("oshrun")
    if launcher is None:
        pytest.skip("no OpenSHMEM: oshrun is not there; Debian's openmpi-bin has it")
    settings = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_osc": "^rdma",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }
    command = [launcher, "-np", str(n), sys.executable, str(PROGRAM), str(seed), str(COUNT)]
    job = run(command, within=WITHIN, env=os.environ | settings)
    lines = [json.loads(line) for line in job.stdout.splitlines() if line.startswith("{")]
    if "liboshmem.so.40: cannot open" in job.stderr:
        pytest.skip("no OpenSHMEM: this oshrun comes without liboshmem.so.40")
    assert len(lines) == n, job.stdout + job.stderr
    return [line["results"] for line in sorted(lines, key=lambda line: line["pe"])]


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.timeout(180)
def test_the_same_as_openshmem(n):
    seed = 40 + n
    wanted = by_openshmem(n, seed)
    data = np.random.default_rng(seed).integers(-1000, 1000, (n, n * COUNT))
    splits = np.random.default_rng(seed + 1).integers(0, COUNT + 1, (n, n))

    def program(comm):
        symm.init(comm)
        me = comm.get_rank()
        results = {}
        x, out = shared(comm, data[me]), shared(comm, np.full(n * COUNT, -7))
        results["all_to_all"] = symm.all_to_all(x, out, comm).tolist()
        for op in ("sum", "max", "min"):
            results[op] = symm.one_shot_all_reduce(x, comm, op).tolist()
        out.copy_(x)
        results["broadcast"] = symm.broadcast(out, n - 1, comm).tolist()
        out.fill_(-7)
        results["came"] = symm.all_to_all_v(x, out, splits[me].tolist(), comm)
        results["all_to_all_v"] = out.tolist()
        out.fill_(-7)
        window = comm.new_window(out)
        window.put(x[: COUNT - 1], (me + 1) % n, 1, False)
        window.barrier()
        results["put"] = out.tolist()
        words = comm.new_window(shared(comm, torch.zeros(2, dtype=torch.int64)))
        for _ in range(5):
            words.fetch_add(0, 0, me + 1)
        before, again = words.compare_swap(me, 1, 0, 9), words.compare_swap(me, 1, 0, 11)
        words.barrier()
        results["words"] = [*words.get_tensor().tolist(), before, again]
        return results

    for got, results in zip(run_ranks(program, n), wanted, strict=True):
        assert got == results
