"""Arrays of other libraries where tensors are asked for: numpy's, and, in place of cupy's, a mock that has
nothing but DLPack, on the CPU."""

import gc
import threading
import warnings
import weakref

import numpy as np
import pytest
import torch

from tests.comms.calls import COLLECTIVES, call
from unicomm import InvalidArgumentError, ReduceOp, symm
from unicomm.testing import run_ranks

SUM = ReduceOp.SUM


class MockDLPack:
    """An array as another library would have it: its memory comes out by DLPack only."""

    def __init__(self, memory):
        self.memory = memory

    def __dlpack_device__(self):
        return self.memory.__dlpack_device__()

    def __dlpack__(self, **kwargs):
        return self.memory.__dlpack__(**kwargs)


class OldMock(MockDLPack):
    """The protocol before DLPack 1.0: no version, no flags."""

    def __dlpack__(self, stream=None):
        return self.memory.__dlpack__()


class MockJax(OldMock):
    """JAX's arrays: immutable, which they do not say."""


MockJax.__module__ = "jaxlib._jax"


class MockCopying(MockDLPack):
    """One that exports a copy, and says so."""

    def __dlpack__(self, **kwargs):
        return self.memory.__dlpack__(**{**kwargs, "copy": True})


class MockRefusing(MockDLPack):
    def __dlpack__(self, **kwargs):
        raise BufferError("needs its gradient")


KINDS = {"numpy": lambda memory: memory, "dlpack": MockDLPack, "old dlpack": OldMock}


def maker(kind, made):
    """`torch.full` for calls.call, that makes arrays; `made` gets (array, its memory)."""

    class Filled:
        def __init__(self, shape, value):
            self.shape, self.value = shape, value

        def to(self, dtype):
            memory = torch.full(self.shape, float(self.value)).to(dtype).numpy().copy()
            made.append(memory)
            return KINDS[kind](memory)

    return Filled


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["shm", "gloo", "tcp"])
def test_every_collective_takes_arrays_and_fills_them(backend, kind):
    def program(comm):
        for name in COLLECTIVES:
            for dtype in (torch.float32, torch.int64):
                for async_op in (False, True):
                    arrays = []
                    wanted = call(comm, name, dtype=dtype)
                    wanted.issue(False)
                    got = call(comm, name, dtype=dtype, full=maker(kind, arrays))
                    work = got.issue(async_op)
                    if async_op:
                        work.wait()
                    assert len(arrays) == len(wanted.tensors)
                    for memory, tensor in zip(arrays, wanted.tensors, strict=True):
                        assert np.array_equal(memory, tensor.numpy()), name

    run_ranks(program, 3, backend=backend)


def test_messages_batches_and_persistent_gathers():
    def program(comm):
        me, other = comm.get_rank(), 1 - comm.get_rank()
        mine, came = np.full(3, me + 1.0), np.zeros(3)
        if me == 0:
            comm.send(mine, other, False)
            comm.recv(MockDLPack(came), other, False)
        else:
            comm.recv(came, other, False)
            comm.send(OldMock(mine), other, False)
        assert came.tolist() == [other + 1.0] * 3
        again = np.zeros(3)
        batch = comm.batch_op_create()
        batch.send(MockDLPack(mine), other).recv(again, other)
        batch.issue(False)
        assert again.tolist() == came.tolist()
        whole = np.zeros(6)
        handle = comm.all_gather_p_init(whole)
        comm.all_gather_p_exec(handle, mine, False)
        comm.all_gather_p_free(handle)
        assert whole.tolist() == [1.0] * 3 + [2.0] * 3

    run_ranks(program, 2)


@pytest.mark.filterwarnings("error")
def test_what_is_read_only_is_read_and_not_written(raised):
    def frozen(n=2):
        array = np.arange(float(n))
        array.flags.writeable = False
        return array

    def program(comm):
        out = np.zeros(4)
        comm.all_gather_single(out, frozen(), False)
        assert out.tolist() == [0, 1, 0, 1]
        out[:] = 0
        comm.all_gather_single(out, MockDLPack(frozen()), False)
        assert out.tolist() == [0, 1, 0, 1]
        kept = frozen(), frozen(), np.arange(2.0)
        errors = [
            raised(comm.all_reduce, kept[0], SUM, False),
            raised(comm.all_reduce, MockDLPack(kept[1]), SUM, True),
            raised(comm.broadcast, MockCopying(kept[2]), 0, False),
            raised(comm.recv, frozen(), 1 - comm.get_rank(), False),
            raised(comm.all_reduce, MockRefusing(kept[2]), SUM, False),
            raised(comm.all_reduce, MockJax(kept[2]), SUM, False),
        ]
        comm.all_gather_single(out, MockJax(kept[2]), False)
        comm.barrier(False)
        assert [k.tolist() for k in kept] == [[0, 1]] * 3
        return errors

    texts = [
        "is read-only",
        "is read-only",
        "gives a copy",
        "is read-only",
        "BufferError: needs its gradient",
        "is immutable",
    ]
    for errors in run_ranks(program, 2):
        for error, text in zip(errors, texts, strict=True):
            assert isinstance(error, InvalidArgumentError)
            assert text in error.message
            assert error.hint.startswith(("pass a ", "receive into a tensor"))


def test_an_array_lives_as_long_as_its_operation():
    class Memory(np.ndarray):
        pass

    checked = threading.Event()

    def program(comm):
        array = np.ones(8).view(Memory)
        if comm.get_rank():  # the other's operation cannot end before this
            assert checked.wait(30)
            comm.all_reduce(array, SUM, False)
            return True
        gone = weakref.ref(array)
        work = comm.all_reduce(array, SUM, True)
        del array
        gc.collect()
        alive = gone() is not None
        checked.set()
        work.wait()
        return alive

    assert all(run_ranks(program, 2))


def test_windows_and_symmetric_memory():
    def program(comm):
        me, other = comm.get_rank(), 1 - comm.get_rank()
        symm.init(comm)
        tensor = symm.empty(6, dtype=torch.float64, comm=comm)
        array = tensor.numpy()
        array[:] = me
        window = comm.new_window(array)
        window.put(np.full(2, 5.0 + me), other, 1, False)
        window.put(MockDLPack(np.full(1, 9.0)), other, 5, False)
        window.barrier()
        assert array.tolist() == [me, 5 + other, 5 + other, me, me, 9]
        mine = np.zeros(6)
        window.get(mine, other, 0, False)
        assert mine.tolist() == [other, 5 + me, 5 + me, other, other, 9]
        window.free()
        handle = symm.rendezvous(array, comm)
        assert handle.buffer_size == 48
        handle.free()
        pad = symm.empty(1, dtype=torch.int64, comm=comm).zero_()
        comm.barrier(False)
        if me == 0:
            symm.put_signal(MockDLPack(array), pad.numpy(), 3, 1, comm)
        else:
            symm.wait_signal(pad.numpy(), 3, 0, comm)
            assert array[0] == 0
        symm.free(array, comm)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_ranks(program, 2)


@pytest.mark.parametrize("kind", ["numpy", "dlpack"])
def test_composites_take_arrays_in_symmetric_memory(kind):
    def program(comm):
        me = comm.get_rank()
        symm.init(comm)

        def made(*shape, dtype=torch.float32):
            memory = symm.empty(*shape, dtype=dtype, comm=comm).numpy()
            memory[...] = 0
            return memory, KINDS[kind](memory)

        (x, a), (y, b), (part, c) = made(4, 2), made(4, 2), made(2, 2)
        x[:] = np.arange(8.0).reshape(4, 2) + 10 * me
        comm.barrier(False)
        symm.all_to_all(a, b, comm)
        assert y[:, 0].tolist() == [4 * me, 4 * me + 2, 4 * me + 10, 4 * me + 12]
        assert symm.all_to_all_v(a, b, [1, 2], comm) == [[1, 1], [2, 2]][me]
        total = np.zeros((4, 2), np.float32)
        symm.one_shot_all_reduce(a, comm, out=total)
        assert total[0].tolist() == [10, 12]
        symm.reduce_scatter(a, c, comm)
        assert part.tolist() == total[2 * me : 2 * me + 2].tolist()
        symm.two_shot_all_reduce_(a, comm)
        assert x.tolist() == total.tolist()
        symm.broadcast(a, 1, comm)
        (splits, s), (there, t), (again, u) = (made(*n, dtype=torch.int64) for n in ((2,), (2, 2), (2, 2)))
        splits[:] = [1, 2]
        y[:] = 0
        symm.all_to_all_vdev_2d(a, b, s, t, comm)
        assert there[0].tolist() == [1 + me] * 2
        symm.all_to_all_vdev_2d_offset(b, a, t, u, comm)
        assert again.tolist() == [[1, 2], [0, 1]]
        symm.all_to_all_vdev(a, b, s, t, comm)

    run_ranks(program, 2)
