"""A device mesh from communicators."""

import json
import re

import pytest
import torch
import torch.distributed as dist

from tests.c10d.launch import forked
from unicomm import InvalidArgumentError, NotReadyError, new_comm
from unicomm.c10d.device_mesh import init_device_mesh, listed_group

CPU = torch.device("cpu")


@pytest.mark.processes
@pytest.mark.timeout(240)
def test_two_dimensions_of_parallelism(forked_programs):
    done = forked(forked_programs, 4, "mesh.py")
    said = [json.loads(text) for text in re.findall(r'\{"operations": .*?\}', done.stdout)]
    assert len(said) == 4, done.stdout[-3000:] + done.stderr[-6000:]
    assert all(dp > 0 and tp > 0 for dp, tp in (rank["operations"] for rank in said))


def one_of(ranks, rank, name="line"):
    """A communicator of those global ranks, on one of them, with nobody else there."""
    world = new_comm("fake", CPU, rank=rank, size=16, name="world")
    comm = world.split(ranks, name)
    world.finalize()
    return comm


def test_one_dimension_needs_no_more():
    comm = new_comm("shm", CPU, name="all")
    try:
        mesh = init_device_mesh((comm,), ("dp",))
        assert mesh.mesh.tolist() == [0]
        x = torch.ones(2)
        dist.all_reduce(x, group=mesh.get_group("dp"))
        dist.all_reduce(x)
        assert comm.barrier(False).seq == 3
    finally:
        dist.destroy_process_group()


def test_even_spacing_gives_the_mesh():
    lines = [[1, 5, 9, 13], [4, 5, 6, 7]]
    comms = [one_of(line, 5, f"line{i}") for i, line in enumerate(lines)]
    world = new_comm("fake", CPU, rank=5, size=16, name="all")
    try:
        mesh = init_device_mesh(comms, ("a", "b"), global_comm=world)
        assert mesh.mesh.tolist() == torch.arange(16).reshape(4, 4).tolist()
    finally:
        dist.destroy_process_group()


def test_numbers_in_the_job_that_are_no_ranks(raised):
    """After `reconfigure` the communicator of all ranks may have the numbers 0, 2, 3 and 5."""
    world = one_of([0, 2, 3, 5], 3, "world")
    lines = [world.split([0, 2], "a"), world.split([2, 3], "b")]
    try:
        stranger = one_of([1, 3], 3, "stranger")
        error = raised(init_device_mesh, [stranger], ("s",), global_comm=world)
        assert "ranks [1] of communicator 'stranger' are not in the default group" in str(error)
        mesh = init_device_mesh(lines, ("a", "b"), global_comm=world)
        assert dist.get_rank() == 2
        assert mesh.mesh.tolist() == [[0, 1], [2, 3]]
        assert list(mesh.get_coordinate()) == [1, 0]
        assert [dist.get_process_group_ranks(mesh.get_group(d)) for d in "ab"] == [[0, 2], [2, 3]]
        assert listed_group(one_of([0, 3], 3, "later")).rank() == 1
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("lines", "rank", "more", "message"),
    [
        ([[0, 1]], 0, {"names": ("a", "b")}, "1 communicators for 2 dimensions"),
        ([[0, 2, 3], [0, 1]], 0, {}, "not evenly spaced"),
        ([[0, 1], [0, 2]], 0, {"mesh": torch.tensor([[0, 1], [2, 3]])}, "dimension 0 of the mesh holds"),
        ([[0, 1], [0, 2]], 0, {"mesh": torch.tensor([0, 1])}, "no mesh of 2 dimensions"),
        ([[0, 1], [0, 2]], 0, {"mesh": torch.tensor([[0, 2], [2, 3]])}, "no mesh of 2 dimensions"),
        ([[0, 1], [0, 1]], 0, {}, "no mesh of 2 dimensions"),
    ],
)
def test_what_is_no_mesh(lines, rank, more, message, raised):
    comms = [one_of(line, rank, f"line{i}") for i, line in enumerate(lines)]
    names = more.pop("names", tuple("ab"[: len(comms)]))
    error = raised(init_device_mesh, comms, names, **more)
    assert type(error) is InvalidArgumentError
    assert message in str(error)
    assert not dist.is_initialized()


def test_without_a_default_group(raised):
    comms = [one_of([0, 2], 0, "a"), one_of([0, 1], 0, "b")]
    assert type(raised(init_device_mesh, comms, ("a", "b"))) is NotReadyError
