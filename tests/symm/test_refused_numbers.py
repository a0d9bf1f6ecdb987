"""What is refused on symmetric memory before anything happens: numbers that cannot be, and what was freed."""

from __future__ import annotations

import pytest
import torch

import unicomm
from tests.symm.exchanges import shared
from unicomm import InvalidArgumentError, NotReadyError, symm
from unicomm.testing import run_ranks

NO_NUMBERS = (True, "5", 1.5, None)
HUGE = (1 << 62, 1 << 64, 1 << 100)


def goes_on(comm):
    """The communicator and its symmetric memory still do what they do."""
    assert not comm.is_aborted()
    x = torch.ones(3)
    comm.all_reduce(x, unicomm.ReduceOp.SUM, async_op=False)
    assert bool((x == comm.get_size()).all())
    symm.free(symm.empty(5, comm=comm), comm)


def refused(call, match=None):
    with pytest.raises(InvalidArgumentError, match=match) as caught:
        call()
    assert len(str(caught.value)) < 400


LONG = pytest.param(1 << 20000, id="2^20000")  # Python prints no number of that length


@pytest.mark.parametrize("number", [*NO_NUMBERS, -1, *HUGE, 1 << 60, 1 << 47, LONG])
def test_heap_bytes(number):
    def program(comm):
        if comm.get_rank() == 0:
            refused(lambda: symm.init(comm, heap_bytes=number), "heap_bytes")
        symm.init(comm)
        goes_on(comm)

    run_ranks(program, 2)


def test_sizes():
    def program(comm):
        symm.init(comm)
        if comm.get_rank() == 0:  # no other rank takes part in what is refused
            for n in (*NO_NUMBERS, -1, *HUGE):
                for size in ((n,), (2, n), ([2, n],)):
                    refused(lambda size=size: symm.empty(*size, comm=comm))
            refused(lambda: symm.empty(0, comm=comm), "at least one element")
            refused(lambda: symm.empty(1 << 40, 1 << 40, comm=comm), "can address")
            refused(lambda: symm.empty(3, dtype="float32", comm=comm), "no dtype")
            for n in (*NO_NUMBERS, -1, *HUGE[1:]):
                refused(lambda n=n: comm.mem_allocator.empty(n))
            for n in (*NO_NUMBERS, -1, *HUGE):
                for name in ("experts", "rows", "width", "capacity", "major_align"):
                    given = {"experts": 1, "rows": 4, "width": 2, name: n}
                    if name != "capacity" or n is not None:
                        refused(lambda given=given: symm.ExpertExchange(comm, **given))
        comm.barrier()
        assert tuple(symm.empty(torch.Size([2, 3]), comm=comm).shape) == (2, 3)
        assert tuple(comm.mem_allocator.empty((2, 0)).shape) == (2, 0)
        goes_on(comm)

    run_ranks(program, 2)


def test_words_offsets_and_ranks():
    def program(comm):
        symm.init(comm)
        room = shared(comm, torch.zeros(4, dtype=torch.int64))
        pad = shared(comm, torch.zeros(1, dtype=torch.int64))
        window = comm.new_window(room)
        handle = symm.rendezvous(room, comm)
        if comm.get_rank() == 0:
            one = torch.ones(1, dtype=torch.int64)
            for n in (*NO_NUMBERS, *HUGE[1:], -(1 << 63) - 1):
                refused(lambda n=n: window.fetch_add(1, 0, n), "value")
                refused(lambda n=n: window.compare_swap(1, 0, n, 1), "expected")
                refused(lambda n=n: window.compare_swap(1, 0, 1, n), "value")
                refused(lambda n=n: symm.put_signal(room, pad, n, 1, comm), "signal")
                refused(lambda n=n: symm.wait_signal(pad, n, 1, comm), "signal")
            for n in (*NO_NUMBERS, *HUGE, -1):
                refused(lambda n=n: window.put(one, 1, n), "offset|elements")
                refused(lambda n=n: window.put(one, n, 0), "dst_rank")
                refused(lambda n=n: window.signal(n), "peer_rank")
                refused(lambda n=n: window.fetch_add(n, 0, 1), "rank")
                refused(lambda n=n: window.fetch_add(1, n, 1), "offset|element")
                refused(lambda n=n: symm.put(room, n, comm), "peer")
                refused(lambda n=n: handle.get_buffer(n, (1,), torch.int64), "rank")
                refused(lambda n=n: handle.get_buffer(1, (n,), torch.int64))
                refused(lambda n=n: handle.get_buffer(1, (2, n), torch.int64))
                refused(lambda n=n: handle.get_buffer(1, (1,), torch.int64, n))
            refused(lambda: handle.get_buffer(1, (-1, -1), torch.int64))
            refused(lambda: handle.get_buffer(1, (5,), torch.int64), "bytes 0 to 40 of a buffer of 32")
        comm.barrier()
        assert not room.any()
        window.barrier()
        assert window.fetch_add(0, comm.get_rank(), -(1 << 63)) == 0
        assert window.fetch_add(0, comm.get_rank(), (1 << 64) - 1) == -(1 << 63)
        window.barrier()
        goes_on(comm)

    run_ranks(program, 2)


def test_an_exchange_that_finds_no_room_keeps_nothing():
    """The third of its tensors does not fit: the other two are given back, on all ranks."""

    def program(comm):
        symm.init(comm, heap_bytes=1 << 20)
        for _ in range(3):
            with pytest.raises(InvalidArgumentError, match="no room"):
                symm.ExpertExchange(comm, 1, 1000, 64, capacity=1600)
        whole = symm.empty((1 << 20) - (1 << 16), dtype=torch.uint8, comm=comm)  # nothing was kept
        symm.free(whole, comm)
        symm.ExpertExchange(comm, 1, 1000, 64, capacity=1000).free()
        goes_on(comm)

    run_ranks(program, 2)


@pytest.mark.parametrize("how", ["window", "handle", "view", "dropped"])
def test_a_window_on_what_was_freed_writes_nothing(how):
    """The memory belongs to another tensor, which stays as it is."""

    def program(comm):
        symm.init(comm)
        tensor = symm.empty(8, dtype=torch.int64, comm=comm)
        if how == "handle":
            handle = symm.rendezvous(tensor, comm)
            window = handle.window
        else:
            window = comm.new_window(tensor[2:6] if how == "view" else tensor)
        if how == "dropped":
            del window
        at = tensor.data_ptr()
        symm.free(tensor, comm)
        other = symm.empty(8, dtype=torch.int64, comm=comm)
        assert other.data_ptr() == at
        other.zero_()
        comm.barrier()
        if how != "dropped":
            peer, one = (comm.get_rank() + 1) % 2, torch.ones(1, dtype=torch.int64)
            calls = [
                lambda: window.put(one, peer, 0),
                lambda: window.put(one, peer, 0, async_op=True),
                lambda: window.put(one, peer, 0, timeout=5),
                lambda: window.get(one, peer, 0),
                lambda: window.fetch_add(peer, 0, 1),
                lambda: window.compare_swap(peer, 0, 0, 1),
                lambda: window.map_remote_tensor(peer),
            ]
            if how == "handle":
                calls.append(lambda: handle.get_buffer(peer, (1,), torch.int64))
            for call in calls:
                with pytest.raises(NotReadyError, match="was freed"):
                    call()
            assert window.get_tensor() is None
            window.signal(peer)  # needs no tensor
            window.wait_signal(peer)
            assert not other.any()
            window.tensor_register(other)
            window.put(one, peer, 3)
            window.barrier()
            assert other.tolist() == [0, 0, 0, 1, 0, 0, 0, 0]
            window.free()
        goes_on(comm)

    run_ranks(program, 2)
