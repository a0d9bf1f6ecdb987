"""What an installed wheel does, in two minutes: `python -m tools.wheels --try`. Nothing of the source tree is
imported, so the tests run wherever unicomm, torch and pytest are installed.
"""

import json
import os
import re
import subprocess
import sys

import pytest
import torch

import unicomm
from unicomm.testing import run_ranks

pytestmark = pytest.mark.timeout(120)

TRAIN = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
for step in range(3):
    model(torch.full((4, 8), float(rank + 1))).sum().backward()
if "fail" in sys.argv and rank == 1:
    raise RuntimeError("out of data")
total = torch.ones(1)
dist.all_reduce(total)
behind = type(dist.distributed_c10d._get_default_group()).__module__
os.write(1, f"total {total.item()} {behind}\\n".encode())  # at once: lines of two ranks must not mix
dist.destroy_process_group()
"""


def started(*command, within=100, **environment):
    """A command of the installed package, with its output."""
    return subprocess.run(
        [sys.executable, "-m", "unicomm", *command],
        capture_output=True,
        text=True,
        timeout=within,
        env={**os.environ, **environment},
        check=False,
    )


@pytest.fixture
def train(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


def test_it_is_the_installed_package():
    assert "site-packages" in unicomm.__file__
    assert unicomm.__version__


@pytest.mark.parametrize("backend", ["shm", "gloo", "auto"])
def test_collectives_of_ranks_that_are_threads(backend):
    def program(comm):
        x = torch.arange(5.0) + comm.get_rank()
        comm.all_reduce(x, unicomm.ReduceOp.SUM, async_op=False)
        mine = torch.full((3,), float(comm.get_rank()), dtype=torch.bfloat16)
        parts = torch.empty(3 * comm.get_size(), dtype=torch.bfloat16)
        comm.all_gather_single(parts, mine, async_op=False)
        return x.tolist(), parts.tolist()

    for x, parts in run_ranks(program, 3, backend=backend):
        assert x == [3.0 + 3 * i for i in range(5)]
        assert parts == [0.0] * 3 + [1.0] * 3 + [2.0] * 3


def test_a_record_says_where_its_operation_was_called(tmp_path):
    """The interpreter's frames are read by their layout, which differs between versions of Python."""
    program = tmp_path / "program.py"
    lines = [
        "import torch, unicomm",
        "comm = unicomm.new_comm('shm', 'cpu', name='one')",
        "def inner():",
        "    comm.all_reduce(torch.ones(2), unicomm.ReduceOp.SUM, async_op=False)",
        "def outer():",
        "    inner()",
        "outer()",
    ]
    program.write_text("\n".join(lines))
    environment = {"UNICOMM_TRACE_DIR": str(tmp_path), "UNICOMM_TRACE_KEEP": "always"}
    os.chmod(tmp_path, 0o700)
    subprocess.run([sys.executable, program], check=True, timeout=100, env={**os.environ, **environment})
    shown = started("trace", "show", "--paths", str(tmp_path))
    assert re.search(r"program\.py:4.*inner", shown.stdout), shown.stdout + shown.stderr
    assert re.search(r"program\.py:6.*outer", shown.stdout), shown.stdout


def test_an_unchanged_program(train):
    ended = started("run", "--nproc-per-node", "2", str(train))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("total 2.0 unicomm") == 2, ended.stdout


def test_a_failed_rank_is_named(train):
    ended = started("run", "--nproc-per-node", "2", str(train), "fail")
    text = ended.stdout + ended.stderr
    assert ended.returncode != 0
    assert re.search(r"[Rr]ank 1 .*RuntimeError", text, re.DOTALL), text
    assert "train.py:9" in text, text


def test_the_commands(tmp_path):
    doctor = started("doctor", "--json")
    said = json.loads(doctor.stdout)
    assert said
    assert started("--help").returncode == 0
    assert started("trace", "analyze", str(tmp_path)).returncode == 2  # nothing is there to read
