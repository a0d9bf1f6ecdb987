"""Symmetric memory of devices on windows of NCCL's, over the doubles: ranks as threads."""

import sys
from pathlib import Path

import pytest

from unicomm.backends.nccl.window_table import WindowTable
from unicomm.testing import run_ranks

sys.path.insert(0, str(Path(__file__).parent))
import device_bodies
import device_double

WINDOWS = {"symmetric": "windows"}


@pytest.fixture(scope="session")
def backend():
    try:
        return device_double.make("symm-windows").name
    except device_double.NoCompiler as error:
        pytest.skip(str(error))


def test_everything(backend):
    def program(comm):
        device_bodies.all_of_it(comm)
        return comm._engine.symmetric.library

    assert run_ranks(program, 2, backend=backend, hints=WINDOWS) == ["NCCL windows"] * 2


def test_teams(backend):
    assert run_ranks(device_bodies.teams, 4, backend=backend, hints=WINDOWS) == [2, 4, 2, 4]


def test_ranks_of_several_hosts_have_them_by_themselves(backend):
    def program(comm):
        return type(comm._engine.backend.symmetric_table(one_host=False))

    assert run_ranks(program, 1, backend=backend) == [WindowTable]
