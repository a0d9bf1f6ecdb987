"""torch.distributed._symmetric_memory and torch.ops.symm_mem on CPU tensors, between processes."""

import shutil
import signal

import pytest
import torch

from tests.processes import operators_page
from unicomm import NotReadyError, symm
from unicomm.extensions.build_torch_extension import build
from unicomm.extensions.torch_extensions import SYMMETRIC_MEMORY, extension_path

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def built():
    """The extension, compiled once for these sources and this torch: some 20 s of one core."""
    if not shutil.which("g++"):
        pytest.skip("needs g++")
    return build(SYMMETRIC_MEMORY)


@pytest.mark.parametrize(("backend", "ranks"), [("gloo", 4), ("unicomm", 3)])
def test_a_program_for_gpus(built, start, backend, ranks):
    job = start("torch_symmetric.py", ranks, "all", backend)
    job.next("over", 90)
    # Handles and tensors that are gone leave nothing mapped.
    assert [said["mappings"] for said in job.next("left")] == [0] * ranks
    assert job.end() == [0] * ranks


@pytest.mark.parametrize("what", ["rows", "dtypes", "tiles", "pads", "outs", "again"])
def test_ranks_that_differ(built, start, what):
    """No rows on one rank, an error on one rank, other groups: see the program's check of that name."""
    job = start("torch_symmetric.py", 3, what, "gloo")
    job.next("over", 60)
    assert job.end() == [0] * 3


def test_a_rank_that_is_late_and_then_dies(built, start):
    job = start("torch_symmetric.py", 2, "wait", "gloo")
    assert "rank 1 did not signal within 100 ms" in job[0].next("late")["text"]
    job[1].next("late")
    job.next("ready")
    job[1].signal(signal.SIGKILL)
    assert "rank 1 to signal, but its process has ended" in job[0].next("lost")["text"]
    assert "rank 1 to signal, but its process has ended" in job[0].next("left alone")["text"]
    for _ in ("a value", "chunks of a matrix"):  # who sets them is not said
        assert "the processes of all 1 other ranks have ended" in job[0].next("left alone")["text"]


def test_a_rank_that_meets_nobody(built, start):
    job = start("torch_symmetric.py", 2, "alone", "gloo")
    error = job[0].next("error")
    assert (error["type"], error["culprits"]) == ("CommTimeoutError", [1])
    job[1].tell()


def test_without_a_build_it_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not extension_path(SYMMETRIC_MEMORY).exists()
    with pytest.raises(NotReadyError, match=f"not built for torch {torch.__version__}".replace("+", r"\+")):
        symm.use_in_torch()


def test_each_operation_is_served_or_says_why_not(built, start):
    job = start("torch_operators.py", 1, "list", "gloo")
    said = job[0].next("listed", 90)
    assert said["left"] == {}
    assert said["otherwise"] or torch.__version__ >= "2.14"
    assert job.end() == [0]


@pytest.mark.parametrize(("backend", "ranks"), [("gloo", 4), ("unicomm", 2)])
def test_products_with_a_gather_or_a_scatter(built, start, backend, ranks):
    job = start("torch_operators.py", ranks, "products", backend)
    job.next("over", 90)
    assert job.end() == [0] * ranks


def test_the_page_lists_them(built):
    page = operators_page.PAGE.read_text()
    assert operators_page.renewed(page) == page, "run `make docs`"
