"""What a program still has of a freed tensor: it writes nothing into the tensor that is there next."""

from __future__ import annotations

import gc
import tracemalloc
import weakref

import pytest
import torch

from tests.symm.exchanges import shared
from unicomm import InvalidArgumentError, ReduceOp, symm
from unicomm.testing import run_ranks

NEXT = torch.int64


def another(comm, freed):
    """Frees a tensor of 8 elements, and makes another one where it was. Collective."""
    at = freed.data_ptr()
    symm.free(freed, comm)
    made = symm.empty(8, dtype=NEXT, comm=comm)
    assert made.data_ptr() == at
    made.zero_()
    comm.barrier()
    return made


def write_with_numpy(view):
    view.numpy()[:] = 7


WRITES = {
    "fill": lambda view: view.fill_(7),
    "item": lambda view: view.__setitem__(0, 7),
    "copy": lambda view: view.copy_(torch.full_like(view, 7)),
    "view of a view": lambda view: view.view(torch.uint8)[8:16].fill_(7),
    "out": lambda view: torch.add(torch.ones(len(view), dtype=NEXT), 6, out=view),
    "numpy": write_with_numpy,
    "dlpack": lambda view: torch.from_dlpack(view).fill_(7),
}


@pytest.mark.parametrize("whose", ["map_remote_tensor", "get_buffer", "own"])
def test_views_refuse_to_be_written_to(whose):
    def program(comm):
        symm.init(comm)
        peer = (comm.get_rank() + 1) % 2
        tensor = shared(comm, torch.full((8,), comm.get_rank()))
        handle = symm.rendezvous(tensor, comm)
        views = {
            "map_remote_tensor": lambda: handle.window.map_remote_tensor(peer)[2:6],
            "get_buffer": lambda: handle.get_buffer(peer, (4,), NEXT, 2),
            "own": lambda: tensor[2:6],
        }
        view = views[whose]()
        assert view.tolist() == [comm.get_rank() if whose == "own" else peer] * 4
        made = another(comm, tensor)
        for write in WRITES.values():
            with pytest.raises(RuntimeError, match="Cannot access data pointer"):
                write(view)
        comm.barrier()
        assert not made.any()
        made.fill_(1)  # the tensor that has the memory now is as any other
        comm.barrier()

    run_ranks(program, 2)


CALLS = {
    "put": lambda comm, x, pad, peer: symm.put(x, peer, comm),
    "get": lambda comm, x, pad, peer: symm.get(x, peer, comm),
    "put_signal": lambda comm, x, pad, peer: symm.put_signal(x, pad, 1, peer, comm),
    "signal pad": lambda comm, x, pad, peer: symm.put_signal(pad, x[:1], 1, peer, comm),
    "wait_signal": lambda comm, x, pad, peer: symm.wait_signal(x[:1], 0, peer, comm),
    "window": lambda comm, x, pad, peer: comm.new_window(x),
    "rendezvous": lambda comm, x, pad, peer: symm.rendezvous(x, comm),
    "free": lambda comm, x, pad, peer: symm.free(x, comm),
    "broadcast": lambda comm, x, pad, peer: symm.broadcast(x, 0, comm),
    "two_shot": lambda comm, x, pad, peer: symm.two_shot_all_reduce_(x, comm),
    "tile": lambda comm, x, pad, peer: symm.tile_reduce(x.view(2, 4), x.view(2, 4), 0, comm),
    "dispatch": lambda comm, x, pad, peer: symm.all_to_all_vdev(x, x, x[:2], x.view(2, 4), comm),
    "source": lambda comm, x, pad, peer: comm.new_window(pad).put(x[:1], peer, 0),
    "all_reduce": lambda comm, x, pad, peer: comm.all_reduce(x, ReduceOp.SUM, async_op=False),
}


@pytest.mark.parametrize("of", ["tensor", "view", "other rank's"])
def test_operations_refuse_what_was_freed(of):
    """Also after another tensor got the same address. The refusal is local: both ranks go on."""

    def program(comm):
        symm.init(comm)
        peer = (comm.get_rank() + 1) % 2
        tensor, pad = shared(comm, torch.ones(8, dtype=NEXT)), shared(comm, torch.zeros(1, dtype=NEXT))
        x = {
            "tensor": tensor,
            "view": tensor[:],
            "other rank's": comm.new_window(tensor).map_remote_tensor(peer),
        }[of]
        made = another(comm, tensor)
        for call in CALLS.values():
            with pytest.raises(InvalidArgumentError, match="or was freed") as refused:
                call(comm, x, pad, peer)
            assert refused.value.hint
        comm.barrier()
        assert not made.any()
        symm.put(made, peer, comm)
        symm.free(made, comm)

    run_ranks(program, 2)


@pytest.mark.parametrize("call", ["put", "get", "put_signal", "signal pad", "wait_signal"])
def test_a_tensor_that_is_freed_between_the_checks_and_the_operation(call):
    """As another thread may do. Here a hook does, which runs between the two."""

    def program(comm):
        symm.init(comm)
        x, pad = shared(comm, torch.ones(8, dtype=NEXT)), shared(comm, torch.zeros(1, dtype=NEXT))

        def free(*_):
            hook.remove()
            symm.free(x, comm)

        hook = comm.register_pre_hook(free)
        with pytest.raises(InvalidArgumentError, match="freed since the call"):
            CALLS[call](comm, x, pad, 0)
        assert not comm.is_aborted()
        symm.free(pad, comm)

    run_ranks(program, 1)


def test_other_tensors_go_on():
    """Those of other allocations, before and behind the one that is freed, and copies."""

    def program(comm):
        symm.init(comm)
        peer = (comm.get_rank() + 1) % 2
        before, freed, behind = (shared(comm, torch.zeros(8, dtype=NEXT)) for _ in range(3))
        views = [comm.new_window(x).map_remote_tensor(peer) for x in (before, freed, behind)]
        copy = views[1].clone()
        symm.free(freed, comm)
        for x in (views[0], views[2], copy):
            x.fill_(comm.get_rank() + 1)
        comm.barrier()
        assert before.tolist() == behind.tolist() == [peer + 1] * 8
        comm.barrier()
        symm.put(before, peer, comm)

    run_ranks(program, 2)


def test_no_memory_is_kept_for_views_that_are_gone():
    """A view lives as long as the program has it, and nothing grows with the number of views there were."""

    def program(comm):
        symm.init(comm)
        window = comm.new_window(shared(comm, torch.zeros(8, dtype=NEXT)))
        part = window.map_remote_tensor(0)[3:]
        kept = weakref.ref(part.untyped_storage())
        gc.collect()
        assert kept() is not None  # by the view alone
        del part
        assert kept() is None
        tracemalloc.start()
        try:
            for turn in range(2000):
                window.map_remote_tensor(0)
                if turn == 200:
                    first = tracemalloc.get_traced_memory()[0]
            assert tracemalloc.get_traced_memory()[0] - first < 20_000
        finally:
            tracemalloc.stop()

    run_ranks(program, 1)
