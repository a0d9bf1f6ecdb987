"""What communicators cost: time, memory, descriptors, threads."""

import time

import pytest
import torch

from tests.ucx_here import needs_ucx
from unicomm import ReduceOp
from unicomm.testing import run_ranks

pytestmark = pytest.mark.processes


def test_64_ranks():
    began = time.monotonic()

    def rank_main(comm):
        created = time.monotonic()
        x = torch.full((100,), 1.0)
        comm.all_reduce(x, ReduceOp.SUM, False)
        return created, float(x[0]), sum(comm.memory().values())

    results = run_ranks(rank_main, 64, timeout=60)
    assert max(created for created, _, _ in results) - began < 10
    assert {value for _, value, _ in results} == {64.0}
    assert max(bytes_ for _, _, bytes_ in results) <= 64 * (2 << 20)  # one segment for all of them


@pytest.mark.parametrize("backend", ["shm", "gloo", "tcp", "ucx"])
def test_nothing_piles_up(start, backend):
    job = start("cycles.py", 2, backend, 30)
    for said in job.next("usage"):
        # The first ones may open what the process keeps, such as the recorder's ring.
        assert max(said["descriptors"][2:]) <= said["descriptors"][1], said
        assert max(said["threads"][2:]) <= said["threads"][1], said
    assert job.end() == [0, 0]


def test_memory_does_not_grow_with_communicators(start):
    """Of each of Gloo's groups torch keeps some hundred bytes. Ours adds nothing, nor does shm keep any.

    torch's own record of the last 2000 operations is off: it has call stacks, and ours are longer.
    """
    jobs = {
        backend: start("growth.py", 1, backend, times, settings={"TORCH_FR_BUFFER_SIZE": "0"})
        for backend, times in (("bare", 400), ("gloo", 400), ("shm", 1500))
    }
    grown = {backend: job[0].next("grown", within=250) for backend, job in jobs.items()}
    assert grown["gloo"]["bytes"] < grown["bare"]["bytes"] + 32, grown
    assert grown["shm"]["bytes"] < 24, grown
    assert max(of["blocks"] for of in grown.values()) < 1.5, grown


@needs_ucx
@pytest.mark.parametrize("way", ["alone", "hosts"])
def test_ucx_without_memory_for_what_arrives(start, way):
    """UCX says so only in its log. Without the error both ranks would get a timeout, or a DeadlockError."""
    job = start("without_memory.py", 2, way)
    job[0].next("sent")
    job[1].tell()
    for said in job.next("error"):
        assert (said["type"], said["culprits"]) == ("BackendError", [1]), said
        assert "UCX has no memory for what arrives" in said["text"]
    assert "on rank 1" in job[0].events[-1]["text"]
    assert job.end() == [0, 0]


def test_a_rank_without_room_for_the_tensor_of_another_is_to_blame_itself(start):
    job = start("without_room.py", 2)
    for said in job.next("error"):
        assert (said["type"], said["culprits"]) == ("BackendError", [1]), said
    assert "cannot map the tensors of process" in job[1].events[-1]["text"]
    assert "see that rank's own error" in job[0].events[-1]["text"]
    assert job.end() == [0, 0]
