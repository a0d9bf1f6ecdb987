"""The fixture `rehearse`, in a project of its own."""

import sys

import pytest

from tests.commands import run

pytestmark = pytest.mark.processes
PROJECT = """
import torch
import torch.distributed as dist


def good():
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(2))


def faulty():
    dist.init_process_group("gloo")
    if dist.get_rank() == 5:
        return
    dist.all_reduce(torch.ones(2))


def test_good(rehearse):
    assert len(rehearse(good, ranks=8).ranks) == 8


def test_faulty(rehearse):
    rehearse(faulty, ranks=8)
"""


def test_the_fixture(tmp_path):
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["unicomm.testing.pytest_plugin"]\n')
    (tmp_path / "test_project.py").write_text(PROJECT)
    done = run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tmp_path])
    assert done.returncode == 1
    assert "1 failed, 1 passed" in done.stdout
    assert "Rank 5 never joined all_reduce #1" in done.stdout
