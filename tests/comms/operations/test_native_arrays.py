"""Numpy arrays on the fast path of shared memory: what it takes, and that it does what tensors get."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests import recorded
from tests.comms import inside
from unicomm import InvalidArgumentError, ReduceOp, Work, new_comm
from unicomm.comms.operations.table import BY_CODE
from unicomm.testing import run_ranks

TYPES = [
    *("bool", "float16", "float32", "float64", "int8", "int16", "int32", "int64", "longlong"),
    *("uint8", "uint16", "uint32", "uint64"),
]
OTHERS = {
    "complex": np.ones(4, np.complex64),
    "big-endian": np.ones(4, ">f4"),
    "long double": np.ones(4, np.longdouble),
    "structured": np.ones(4, [("a", "f4"), ("b", "i4")]),
    "structured of one field": np.ones(4, [("a", "f4")]),
    "dates": np.zeros(4, "datetime64[s]"),
    "text": np.zeros(4, "U3"),
    "objects": np.zeros(4, object),
    "strided": np.ones(8, np.float32)[::2],
    "backwards": np.ones(4, np.float32)[::-1],
    "columns": np.ones((3, 4), np.float32).T,
    "subclass": np.ones(4, np.float32).view(type("Memory", (np.ndarray,), {})),
}


@pytest.fixture
def comm():
    with new_comm("shm", torch.device("cpu")) as comm:
        yield comm


def all_reduce(comm, array):
    return inside.fast_path(comm).all_reduce(array, ReduceOp.MAX, False, None, None)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3, 1), (3, 0), (2,) * 9])
def test_arrays_of_numbers_are_taken_and_recorded_like_tensors(comm, dtype, shape):
    array = np.ones(shape, dtype)
    assert type(all_reduce(comm, array)) is Work
    assert type(all_reduce(comm, torch.from_numpy(array))) is Work
    assert (array == 1).all()
    fields = ("op", "red", "in_numel", "in_dtype", "in_ndim", "in_dims", "out_numel", "out_dtype", "out_dims")
    of_array, of_tensor = recorded.of(comm)
    for field in fields:
        assert np.array_equal(of_array[field], of_tensor[field]), field


@pytest.mark.parametrize("name", OTHERS)
def test_other_arrays_go_the_general_way(comm, name):
    array = OTHERS[name]
    assert all_reduce(comm, array) is False
    assert recorded.of(comm) == []


def test_what_is_written_to_has_to_be_writable(comm):
    fixed = np.ones(2, np.float32)
    fixed.flags.writeable = False
    free, fast = np.zeros(2, np.float32), inside.fast_path(comm)
    plain = (False, None, None)
    assert all_reduce(comm, fixed) is False
    assert fast.broadcast(fixed, 0, *plain) is False
    assert fast.all_gather_single(fixed, free, *plain) is False
    assert type(fast.all_gather_single(free, fixed, *plain)) is Work
    assert free.tolist() == [1.0, 1.0]
    assert type(fast.all_to_all_single(free, fixed, *plain)) is Work
    assert type(fast.reduce_scatter_single(free, fixed, ReduceOp.SUM, *plain)) is Work
    with pytest.raises(InvalidArgumentError, match="read-only"):
        comm.broadcast(fixed, 0)


def test_arrays_and_tensors_meet_and_keep_their_own_memory():
    def program(comm):
        me, peer = comm.get_rank(), 1 - comm.get_rank()
        fast, plain = inside.fast_path(comm), (False, None, None)
        values = np.full((3, 2), 1.0 + me)
        mine = values if me == 0 else torch.from_numpy(values)
        assert type(fast.all_reduce(mine, ReduceOp.SUM, *plain)) is Work
        assert values.tolist() == [[3.0, 3.0]] * 3
        gathered = np.zeros((2, 3), np.int16)
        comm.all_gather_single(gathered, np.full(3, me, np.int16))
        assert gathered.tolist() == [[0, 0, 0], [1, 1, 1]]
        fixed = np.full(70_000, me + 7, np.int64)
        fixed.flags.writeable = False
        got = np.zeros_like(fixed)
        for turn in (0, 1):
            sends = me == turn
            done = fast.send(fixed, peer, *plain) if sends else fast.recv(got, peer, *plain)
            assert type(done) is Work
        assert got.tolist() == [peer + 7] * 70_000
        kinds = [BY_CODE[int(record["op"])].name for record in recorded.of(comm)]
        assert sorted(kinds) == ["all_gather_single", "all_reduce", "recv", "send"]
        with pytest.raises(InvalidArgumentError, match="share memory"):
            comm.all_gather_single(gathered, gathered[peer])

    run_ranks(program, 2)


def test_arrays_are_free_again(comm):
    """No export of the array's memory is left: it can be resized."""
    array = np.ones(4, np.float32)
    comm.all_reduce(array, ReduceOp.SUM)
    array.resize(9)
    comm.all_reduce(array, ReduceOp.SUM)
    assert [int(record["in_numel"]) for record in recorded.of(comm)] == [4, 9]


def test_records_of_a_long_batch_have_their_own_shapes():
    def program(comm):
        me, batch = comm.get_rank(), comm.batch_op_create()
        arrays = [np.full((k, 2), float(me), np.float32) for k in range(1, 8)]
        for x in arrays:
            (batch.recv if me else batch.send)(x, 1 - me)
        batch.issue(False)
        side = "out" if me else "in"
        dims = [tuple(r[f"{side}_dims"][: r[f"{side}_ndim"]]) for r in recorded.of(comm)]
        assert [d for d in dims if d] == [x.shape for x in arrays]
        assert not any(x.any() for x in arrays)

    run_ranks(program, 2)
