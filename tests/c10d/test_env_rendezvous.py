"""env:// with the switch, under launchers other than torchrun. tests/backends/mpi runs it under mpiexec."""

from __future__ import annotations

import json
import os
import sys

import pytest

from tests import ROOT
from tests.commands import clean_environment
from tests.ports import free_port
from tests.processes.forked_interpreters import run
from unicomm.c10d.env_rendezvous import FILLED, fill_in

pytestmark = pytest.mark.timeout(120)

RECORDED = ROOT / "tests/comms/membership/environments"
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@pytest.mark.parametrize("name", ["mpich-hydra", "openmpi-5", "srun-none", "srun-pmi2", "srun-pmix", "pals"])
def test_the_launcher_s_numbers_are_filled_in(name):
    for rank in json.loads((RECORDED / f"{name}.json").read_text())["ranks"]:
        environ = dict(rank["environment"])
        fill_in(environ)
        assert [int(environ[n]) for n in NAMES] == rank["expected"][:4]
        again = dict(environ)
        fill_in(again)  # a process that this one starts
        assert again == environ


@pytest.mark.parametrize("name", ["torchrun", "torchrun-in-srun", "pytorchjob", "sbatch-script"])
def test_where_there_is_nothing_to_fill_in(name):
    for rank in json.loads((RECORDED / f"{name}.json").read_text())["ranks"]:
        environ = dict(rank["environment"])
        fill_in(environ)
        assert environ == rank["environment"]


def test_what_is_set_stays():
    environ = {"PMI_RANK": "1", "PMI_SIZE": "2", "LOCAL_RANK": "7"}
    fill_in(environ)
    assert (environ["RANK"], environ["WORLD_SIZE"], environ["LOCAL_RANK"]) == ("1", "2", "7")
    for own in ({"RANK": "0"}, {"WORLD_SIZE": "16"}, {"RANK": "3", "WORLD_SIZE": "16"}):
        environ = {"PMI_RANK": "1", "PMI_SIZE": "2", **own}
        fill_in(environ)
        assert environ == {"PMI_RANK": "1", "PMI_SIZE": "2", **own}
    broken = {"PMI_RANK": "9", "PMI_SIZE": "2"}
    fill_in(broken)
    assert broken == {"PMI_RANK": "9", "PMI_SIZE": "2"}


def test_a_launcher_below_a_rank():
    """Variables that a process of the outer launcher filled in do not count under the inner launcher."""
    environ = {"PMI_RANK": "0", "PMI_SIZE": "1"}
    fill_in(environ)
    assert (environ["RANK"], environ["WORLD_SIZE"]) == ("0", "1")
    inner = environ | {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}
    fill_in(inner)
    assert (inner["RANK"], inner["WORLD_SIZE"]) == ("2", "4")
    chosen = environ | {"RANK": "5", "WORLD_SIZE": "8"}
    fill_in(chosen)
    assert (chosen["RANK"], chosen["WORLD_SIZE"]) == ("5", "8")
    assert FILLED not in chosen


PROGRAM = """
import os, torch, torch.distributed as dist
assert (os.environ.get("RANK"), os.environ.get("WORLD_SIZE")) == ("0", "1")
for _ in range(2):
    dist.init_process_group("gloo")
    x = torch.ones(3)
    dist.all_reduce(x)
    print(type(dist.group.WORLD).__name__, dist.get_world_size(), x.tolist())
    dist.destroy_process_group()
"""


@pytest.mark.processes
def test_one_process_below_a_launcher():
    drop = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC", "OMPI_", "PMI", "SLURM_", "UNICOMM_B")
    environ = {k: v for k, v in os.environ.items() if not k.startswith(drop)}
    environ |= {"TORCH_DISTRIBUTED_USE_TORCHCOMMS": "1", "PMI_RANK": "0", "PMI_SIZE": "1"}
    done = run([sys.executable, "-c", PROGRAM], env=environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["UnicommProcessGroup 1 [1.0, 1.0, 1.0]"] * 2


LISTENS = """
import psutil, torch, torch.distributed as dist
for _ in range(2):
    dist.init_process_group("gloo")
    listening = [c for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    print([c.laddr.ip for c in listening if c.laddr.port == PORT])
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("more", "at"),
    [({}, "127.0.0.1"), ({"UNICOMM_STORE_LISTEN": "all"}, "::"), ({"USE_LIBUV": "0"}, "::")],
    ids=["address", "all", "no libuv"],
)
def test_the_store_of_rank_0_listens_at_its_address(more, at):
    port = free_port("0.0.0.0")
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    switch = {"TORCH_DISTRIBUTED_USE_TORCHCOMMS": "1"}
    code = LISTENS.replace("PORT", str(port))
    done = run([sys.executable, "-c", code], env=clean_environment() | place | switch | more)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert set(lines) == {f"['{at}']"}
