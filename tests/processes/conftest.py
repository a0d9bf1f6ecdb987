"""Fixtures of the process tests."""

import contextlib

import pytest

from tests.commands import clean_environment
from tests.processes.rank_processes import ForkServer, Job, agent_environments, new_store


@pytest.fixture(scope="session")
def fork_server():
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture
def rings(tmp_path):
    """The folder where a job's ranks keep their rings."""
    folder = tmp_path / "rings"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def start(fork_server, rings):
    """`start(script, n, *arguments, settings=None, environments=None, store=True)` starts a `Job`.

    Ranks find each other as under torchrun, unless `environments` brings what another launcher would give.
    At the end of the test all that is left of its jobs is killed.
    """
    with contextlib.ExitStack() as jobs:

        def start_job(script, n=None, *arguments, settings=None, environments=None):
            base = clean_environment() | {"UNICOMM_TRACE_DIR": str(rings)} | (settings or {})
            store = None
            if environments is None:
                store = new_store()
                environments = agent_environments(n, store, base)
            else:
                environments = [base | env for env in environments]
            return jobs.enter_context(
                Job(fork_server, script, [str(a) for a in arguments], environments, store)
            )

        yield start_job
