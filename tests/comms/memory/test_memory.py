"""Tensors in the backend's own memory: that they are used where they are, and given back."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import textwrap

import pytest
import torch

import unicomm
from tests.commands import torchrun
from tests.comms.calls import COLLECTIVES, call
from tests.processes.forked_interpreters import run
from unicomm import BackendError, CommTimeoutError, InvalidArgumentError, NotReadyError, UnsupportedError
from unicomm.c10d.compat import HashStore
from unicomm.testing import run_ranks

LARGE = 300_000  # elements: more than the messages between two ranks have room for
#: Staged all the same: in-place results lie where others have read (docs/design/direct.md), lists of tensors
#: lie anywhere, and of unequal parts only their owner knows where they are.
STAGED = {"all_reduce", "reduce", "reduce_scatter", "reduce_scatter_v", "scatter", "barrier"}
STAGED |= {"all_to_all", "all_to_all_v_single"}


def direct(comm: unicomm.Communicator) -> int:
    return comm.unsafe_backend._group.direct_operations


@pytest.mark.parametrize("where", ["all", "some", "none"])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_reads_tensors_where_they_are(name, where):
    def program(comm: unicomm.Communicator) -> None:
        def full(shape, value):
            there = where == "all" or (where == "some" and comm.get_rank() == 1)
            return comm.mem_allocator.empty(shape).fill_(value) if there else torch.empty(shape).fill_(value)

        for count in (100, LARGE):
            made = call(comm, name, count, full=full)
            made.issue(False)
            expected = call(comm, name, count)
            expected.issue(False)
            assert all(torch.equal(a, b) for a, b in zip(made.tensors, expected.tensors, strict=True))
        assert direct(comm) == (where == "all" and name not in STAGED)

    run_ranks(program, 3)


def test_scatter_and_reduce_scatter_of_one_block():
    """Their lists are read in place where the parts lie one after the other."""

    def program(comm: unicomm.Communicator) -> None:
        n, me = comm.get_size(), comm.get_rank()
        block = unicomm.empty(n, LARGE, comm=comm)
        block[:] = torch.arange(n)[:, None] + me
        out = torch.empty(LARGE)
        comm.scatter(out, list(block.unbind()) if me == 1 else [], 1, False)
        assert torch.equal(out, torch.full((LARGE,), me + 1.0))
        comm.reduce_scatter(out, list(block.unbind()), unicomm.ReduceOp.SUM, False)
        assert torch.equal(out, torch.full((LARGE,), n * me + sum(range(n)) * 1.0))
        assert direct(comm) == 2

    run_ranks(program, 3)


def test_messages():
    def program(comm: unicomm.Communicator) -> None:
        me = comm.get_rank()
        x = unicomm.empty(LARGE, comm=comm).fill_(me)
        y = torch.empty(LARGE)
        comm.batch_op_create().send(x, 1 - me).recv(y, 1 - me).send(x[:9], 1 - me).issue(False)
        z = torch.empty(9)
        comm.recv(z, 1 - me, False)
        assert torch.equal(y, torch.full((LARGE,), 1.0 - me))
        assert torch.equal(z, y[:9])
        assert direct(comm) == 1

    run_ranks(program, 2)


def test_a_message_whose_sender_gave_up_is_not_read(raised):
    def program(comm: unicomm.Communicator) -> None:
        if comm.get_rank() == 0:
            x = unicomm.empty(LARGE, comm=comm).fill_(1)
            gone = raised(comm.send, x, 1, False, timeout=0.05)
            x.fill_(2)
        else:
            y = torch.zeros(LARGE)
            while not comm.unsafe_backend._group.failed():
                pass
            gone = raised(comm.recv, y, 0, False)
            assert not y.any()
        assert type(gone) is CommTimeoutError

    run_ranks(program, 2)


def test_between_processes(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(
            """
            import torch
            import unicomm
            from unicomm.testing import conformance

            comm = unicomm.new_comm("shm", torch.device("cpu"), name="main")
            for operation in conformance.OPERATIONS:
                conformance.check(comm, operation, lambda case: case.layout in conformance.ALLOCATED)
            count = comm.unsafe_backend._group.direct_operations
            assert count >= 10, count
            # A communicator made later uses the same memory.
            half = comm.split([0, 1] if comm.get_rank() < 2 else [2], "half")
            x = unicomm.empty(100_000, comm=comm).fill_(comm.get_rank())
            half.broadcast(x, 0, False)
            assert x.eq(0 if comm.get_rank() < 2 else 2).all()
            half.finalize()
            comm.finalize()
            assert x.sum() >= 0  # outlives its communicators
            """
        )
    )
    done = run([*torchrun(3), program], env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-4000:]


def test_reduced_parts_of_which_one_is_empty():
    """An empty part has no address in the memory that the others read."""
    sizes = [50_000, 0, 50_000]

    def program(comm):
        x = unicomm.empty(sum(sizes), comm=comm).fill_(comm.get_rank() + 1)
        out = torch.zeros(sizes[comm.get_rank()])
        comm.reduce_scatter_v(out, list(x.split(sizes)), unicomm.ReduceOp.SUM, False)
        assert out.eq(6).all()

    run_ranks(program, 3, timeout=60)


def pages() -> int:
    """Bytes of memory that the process's heap really has."""
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that listed the others
            if "unicomm-tensors" in os.readlink(f"/proc/self/fd/{fd}"):
                return os.stat(int(fd)).st_blocks * 512
    return 0


def alone(program) -> object:
    return run_ranks(program, 1)[0]


def test_memory_is_given_back():
    def program(comm: unicomm.Communicator) -> None:
        gc.collect()
        before, held = comm.mem_allocator.allocated(), pages()
        x = unicomm.empty(1 << 20, dtype=torch.uint8, comm=comm).fill_(1)
        assert x.data_ptr() % 4096 == 0
        assert comm.mem_allocator.holds(x)
        assert not comm.mem_allocator.holds(torch.ones(3))
        assert comm.mem_allocator.allocated() == before + (1 << 20)
        assert pages() >= held + (1 << 20)
        part = x[5:9]
        del x
        assert comm.mem_allocator.allocated() == before + (1 << 20)  # a view holds it
        del part
        assert comm.mem_allocator.allocated() == before
        assert pages() < held + (1 << 20)

    alone(program)


FORKED = """
import os, torch, unicomm

comm = unicomm.new_comm("shm", torch.device("cpu"), name="alone", rank=0, size=1)
x = comm.mem_allocator.empty(5000).fill_(1)
used = comm.mem_allocator.allocated()
child = os.fork()
if child == 0:
    good = False
    try:
        held = comm.mem_allocator.holds(x)
        del x  # not the child's to free
        mine = comm.mem_allocator.empty(5000).fill_(2)
        good = not held and mine.sum() == 10000 and comm.mem_allocator.allocated() < used + 1
    finally:
        os._exit(0 if good else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert comm.mem_allocator.allocated() == used
assert x.sum() == 5000
"""


@pytest.mark.processes
def test_a_forked_child_has_memory_of_its_own():
    done = run([sys.executable, "-c", FORKED])
    assert done.returncode == 0, done.stderr


def test_arguments():
    def program(comm: unicomm.Communicator) -> None:
        assert unicomm.empty(2, 3, dtype=torch.bfloat16, comm=comm).shape == (2, 3)
        assert unicomm.empty((2, 3), comm=comm).dtype == torch.get_default_dtype()
        assert unicomm.empty(comm=comm).shape == ()
        assert unicomm.empty(0, 3, comm=comm).shape == (0, 3)
        with pytest.raises(InvalidArgumentError, match="-1"):
            unicomm.empty(-1, comm=comm)
        with pytest.raises(BackendError, match="no memory for a tensor of"):
            unicomm.empty(1 << 60, comm=comm)

    alone(program)


def test_a_backend_without_memory_of_its_own_says_so():
    def program(comm: unicomm.Communicator) -> None:
        with pytest.raises(UnsupportedError, match="'fake' has no memory of its own"):
            unicomm.empty(3, comm=comm)

    run_ranks(program, 1, backend="fake")


@pytest.mark.parametrize(
    ("backend", "hints"), [("shm", None), ("gloo", None), ("auto", {"hosts": "a"}), ("fake", None)]
)
def test_the_allocator_of_a_finalized_communicator(backend, hints):
    """`NotReadyError` on every backend; an allocator that was made before goes on."""
    comm = unicomm.new_comm(backend, "cpu", name="over", store=HashStore(), rank=0, size=1, hints=hints)
    allocator = comm.mem_allocator if backend == "shm" else None
    comm.finalize()
    with pytest.raises(NotReadyError):
        _ = comm.mem_allocator
    if allocator is not None:
        assert allocator.empty(5).fill_(1).sum() == 5
