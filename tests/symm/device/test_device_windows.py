"""Symmetric memory of devices on windows of NCCL's, over the mocks: ranks as threads."""

import pytest

from tests.mocks.device import backend as device_mock
from tests.symm.device import device_bodies
from unicomm.backends.nccl.window_table import WindowTable
from unicomm.testing import run_ranks

WINDOWS = {"symmetric": "windows"}


@pytest.fixture(scope="session")
def backend():
    try:
        return device_mock.make("symm-windows").name
    except device_mock.NoCompiler as error:
        pytest.skip(str(error))


def test_everything(backend):
    def program(comm):
        backend = comm.unsafe_backend
        tables = []

        def noted(*given):
            tables.append(type(backend).symmetric_table(backend, *given))
            return tables[-1]

        backend.symmetric_table = noted
        device_bodies.all_of_it(comm)
        return [table.name for table in tables]

    assert run_ranks(program, 2, backend=backend, hints=WINDOWS) == [["NCCL windows"]] * 2


def test_teams(backend):
    assert run_ranks(device_bodies.teams, 4, backend=backend, hints=WINDOWS) == [2, 4, 2, 4]


def test_ranks_of_several_hosts_have_them_by_themselves(backend):
    def program(comm):
        return type(comm.unsafe_backend.symmetric_table(one_host=False))

    assert run_ranks(program, 1, backend=backend) == [WindowTable]
