"""All that one GPU can show with one rank. What a rank of one does to its tensor is seen by PREMUL_SUM."""

from __future__ import annotations

import pytest
import torch

import unicomm
from tests import recorded
from unicomm import ReduceOp
from unicomm.backends.nccl.library import version_text
from unicomm.comms.errors import (
    AbortedError,
    CommError,
    CommTimeoutError,
    InvalidArgumentError,
    NotReadyError,
    UnsupportedError,
)
from unicomm.comms.work import WorkStatus
from unicomm.testing import conformance, drain

DOUBLE, TRIPLE = ReduceOp.PREMUL_SUM(2.0), ReduceOp.PREMUL_SUM(3.0)


@pytest.mark.parametrize("operation", conformance.OPERATIONS)
def test_operations_and_element_types(kit, comm, operation):
    few = kit.name == "mock"  # tests/backends/nccl has the rest
    assert conformance.check(comm, operation, lambda case: not few or case.count in (0, 17)) > 10


def test_calls_return_before_the_device_has_done_them(kit, comm):
    x = torch.ones(1000, device=kit.device)
    comm.all_reduce(x, DOUBLE, False).wait_blocking()  # whatever is done once
    kit.synchronize()
    kit.occupy(300)
    work = comm.all_reduce(x, DOUBLE, False)
    assert not work.is_completed()
    assert work.status is WorkStatus.INPROGRESS
    work.wait_blocking()
    assert work.status is WorkStatus.COMPLETED
    assert set(x.tolist()) == {4.0}


def test_operations_keep_their_order_over_streams(kit, comm):
    x = torch.ones(1000, device=kit.device)
    kit.synchronize()
    side = kit.new_stream()
    kit.occupy(50)
    comm.all_reduce(x, TRIPLE, False)  # 3, on the current stream, which is busy
    with kit.use(side):
        comm.all_reduce(x, ReduceOp.PREMUL_SUM(0.5), False)
    comm.all_reduce(x, DOUBLE, True)
    with kit.use(side):
        kit.occupy(20)
    last = comm.all_reduce(x, TRIPLE, False)
    last.wait_blocking()
    assert set(x.tolist()) == {9.0}


def test_wait_orders_the_current_stream_and_blocks_nobody(kit, comm):
    x, y = torch.ones(1000, device=kit.device), torch.zeros(1000, device=kit.device)
    kit.synchronize()
    kit.occupy(100)
    work = comm.all_reduce(x, TRIPLE, True)  # on its own stream, after the current one
    work.wait()
    assert not work.is_completed()
    kit.copy(y, x)
    kit.synchronize()
    assert set(y.tolist()) == {3.0}


def test_tensors_of_asynchronous_operations_are_kept(kit, comm):
    kit.occupy(50)
    work = comm.all_reduce(torch.ones(100_000, device=kit.device), TRIPLE, True)
    others = [torch.zeros(100_000, device=kit.device) for _ in range(4)]
    work.wait_blocking()
    kit.synchronize()
    assert all(not other.any() for other in others)


def test_records_have_the_devices_times(kit, fresh_recorder):

    with kit.new() as comm:
        kit.occupy(50)
        comm.all_reduce(torch.ones(4, device=kit.device), DOUBLE, True).wait_blocking()
        drain(comm)
        (record,) = recorded.ring().records
    created, started, completed = (int(record[f"{name}_ns"]) for name in ("created", "started", "completed"))
    assert created < started <= completed


# --- graphs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("async_op", [False, True])
def test_graphs(kit, comm, async_op):
    """What a graph takes down runs when it is replayed, each time."""
    graph = kit.graph()
    x = torch.ones(1000, device=kit.device)
    kit.synchronize()
    with kit.use(kit.new_stream()):  # what the library does once must not be captured
        comm.all_reduce(x, DOUBLE, async_op).wait_blocking()
    kit.synchronize()
    with kit.capture(graph):
        work = comm.all_reduce(x, DOUBLE, async_op)
        work.wait()
        comm.all_reduce(x, TRIPLE, async_op).wait()
    with pytest.raises(NotReadyError):
        work.wait_blocking()
    kit.synchronize()
    assert set(x.tolist()) == {2.0}
    for _ in range(3):
        graph.replay()
    kit.synchronize()
    assert set(x.tolist()) == {2.0 * 6**3}
    comm.all_reduce(x, DOUBLE, False).wait_blocking()
    assert set(x.tolist()) == {4.0 * 6**3}
    del graph


# --- memory ----------------------------------------------------------------------------------------------


def test_memory_of_the_library(kit, comm):
    try:
        memory = comm.mem_allocator
    except UnsupportedError as error:
        pytest.skip(f"{comm.get_backend()} {comm.get_backend_version()} has no memory of its own: {error}")
    x = memory.empty(3, 1000)
    x.fill_(1)
    assert x.device == kit.device
    assert memory.holds(x)
    assert memory.allocated() >= x.nbytes
    assert not memory.holds(torch.ones(3, device=kit.device))
    memory.tensor_register(x)
    comm.all_reduce(x, TRIPLE, False).wait_blocking()
    assert set(x.flatten().tolist()) == {3.0}
    memory.tensor_deregister(x)
    try:
        memory.tensor_register(x, symmetric=True)
    except UnsupportedError as error:
        pytest.skip(str(error))
    comm.all_reduce(x, DOUBLE, True).wait_blocking()
    assert set(x.flatten().tolist()) == {6.0}
    memory.tensor_deregister(x)


def test_torchs_pool(kit, comm):
    if kit.name == "mock":
        pytest.skip("the pool is torch.cuda's")
    memory = comm.mem_allocator
    with torch.cuda.use_mem_pool(memory.pool):
        x = torch.ones(1 << 20, device=kit.device)
    y = torch.ones(1 << 20, device=kit.device)
    assert memory.holds(x)
    assert not memory.holds(y)
    comm.all_reduce(x, TRIPLE, False).wait_blocking()
    assert set(x[:9].tolist()) == {3.0}


def test_windows(kit, comm):
    try:
        comm.unsafe_backend.one_sided()
    except UnsupportedError as error:
        pytest.skip(f"{comm.get_backend()} {comm.get_backend_version()} has no windows: {error}")
    room = comm.mem_allocator.empty(8)
    room.zero_()
    kit.synchronize()
    try:
        window = comm.new_window(room)
        window.put(torch.full((2,), 7.0, device=kit.device), 0, 3, False)  # to itself
        window.signal(0, False)
        window.wait_signal(0, False).wait_blocking()
    except UnsupportedError as error:
        pytest.skip(str(error))
    assert room.tolist() == [0, 0, 0, 7, 7, 0, 0, 0]
    window.put(torch.full((1,), 5.0, device=kit.device), 0, 0, True)
    window.barrier()
    assert room[0].item() == 5
    window.free()


# --- options ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "hints",
    [
        {"max_ctas": "4", "min_ctas": "1"},
        {"cga_cluster_size": "1"},
        {"blocking": "0"},
        {"split_share": "0"},
        {"traffic_class": "0"},
        {"comm_name": "mine"},
        {"nvls_ctas": "2"},
        {"num_rma_ctx": "1"},
        {"num_rma_sig": "2"},
    ],
    ids="+".join,
)
def test_options(kit, hints):
    """Each is taken by the library, or refused as too new for it."""
    made = kit.try_new(hints=hints)
    if isinstance(made, UnsupportedError):
        assert "has no option" in made.message
        pytest.skip(made.message)
    with made as comm:
        x = torch.ones(100, device=kit.device)
        for _ in range(3):
            comm.all_reduce(x, DOUBLE, True)
        comm.barrier(False)
        assert set(x.tolist()) == {8.0}
        part = comm.split([0])
        assert part is not None
        part.all_reduce(x, DOUBLE, False).wait_blocking()
        assert set(x.tolist()) == {16.0}
        part.finalize()


@pytest.mark.parametrize(
    ("hints", "words"),
    [
        ({"max_cta": "4"}, "did you mean"),
        ({"max_ctas": "many"}, "unreadable"),
        ({"large_world": "0"}, "ranks"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_options_that_are_refused(kit, raised, hints, words):
    error = raised(kit.new, hints=hints)
    assert type(error) is InvalidArgumentError
    assert words in str(error)


# --- errors and the end -----------------------------------------------------------------------------------


def test_wrong_arguments_leave_it_usable(kit, comm, raised):
    good = torch.ones(8, device=kit.device)
    for call in (
        lambda: comm.all_reduce(torch.ones(3, device="meta"), DOUBLE, False),
        lambda: comm.all_reduce(good[::2], DOUBLE, False),
        lambda: comm.broadcast(good, 1, False),
        lambda: comm.send(good, 0, False),
        lambda: comm.all_gather_single(torch.ones(9, device=kit.device), good, False),
    ):
        assert type(raised(call)) is InvalidArgumentError
    comm.all_reduce(good, DOUBLE, False).wait_blocking()
    assert set(good.tolist()) == {2.0}


def test_a_device_that_is_not_there(kit, raised):
    if kit.name == "mock":
        pytest.skip("any device would do")
    error = raised(unicomm.new_comm, kit.backend, torch.device("cuda", 99), rank=0, size=1)
    assert isinstance(error, (CommError, RuntimeError))
    assert "99" in str(error) or "ordinal" in str(error)


def test_abort(kit, raised):
    comm = kit.new()
    x = torch.ones(100, device=kit.device)
    comm.all_reduce(x, DOUBLE, False).wait_blocking()
    comm.abort()
    assert comm.is_aborted()
    assert type(raised(comm.all_reduce, x, DOUBLE, False)) is AbortedError
    comm.finalize()
    with kit.new() as again:
        again.all_reduce(x, DOUBLE, False).wait_blocking()
    assert set(x.tolist()) == {4.0}


def test_the_end(kit, raised):
    comm = kit.new()
    x = torch.ones(100, device=kit.device)
    kit.occupy(50)
    work = comm.all_reduce(x, TRIPLE, True)
    comm.finalize()
    assert work.is_completed()
    kit.synchronize()
    assert set(x.tolist()) == {3.0}
    comm.finalize()
    assert type(raised(comm.barrier, False)) is NotReadyError


def test_reconfigure(kit):
    comm = unicomm.new_comm(kit.backend, kit.device, name="alone", enable_reconfigure=True)
    x = torch.ones(10, device=kit.device)
    for uuid in range(3):
        comm.reconfigure(uuid, [comm.get_init_handle()])
        comm.all_reduce(x, DOUBLE, True).wait_blocking()
    assert set(x.tolist()) == {8.0}
    comm.finalize()


def test_a_persistent_all_gather(kit, comm):
    out, x = torch.zeros(64, device=kit.device), torch.arange(64.0, device=kit.device)
    kit.synchronize()
    handle = comm.all_gather_p_init(out)
    for _ in range(3):
        comm.all_gather_p_exec(handle, x, True).wait_blocking()
    assert out.tolist() == list(range(64))
    comm.all_gather_p_free(handle)


def test_the_library_is_the_one_that_it_says(kit, comm):
    library = type(comm.unsafe_backend).library()
    assert comm.get_backend_version() == version_text(library.version)
    for name, since, there in library.native.functions():
        assert there or since > library.version, name


def test_an_operation_that_takes_too_long(kit, raised):
    if kit.name == "mock":
        pytest.skip("tests/backends/nccl has it")
    x = torch.ones(100, device=kit.device)
    comm = kit.new()
    comm.all_reduce(x, DOUBLE, False).wait_blocking()
    kit.occupy(3000)
    work = comm.all_reduce(x, DOUBLE, True, timeout=0.1)
    error = raised(work.wait_blocking)
    assert type(error) is CommTimeoutError
    assert comm.is_aborted()
    kit.synchronize()
    comm.finalize()
    with kit.new() as again:
        y = torch.ones(100, device=kit.device)
        again.all_reduce(y, DOUBLE, False).wait_blocking()
    assert set(y.tolist()) == {2.0}
