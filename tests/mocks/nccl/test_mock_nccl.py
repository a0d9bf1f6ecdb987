"""The mock is like NCCL: data, groups, streams, life cycles. (Its ranks are threads here.)"""

import ctypes
import threading

import numpy as np
import pytest
import torch

from tests.mocks.nccl import api, build
from tests.mocks.nccl.api import Failed, in_threads

TYPES = {
    torch.int8: 0, torch.uint8: 1, torch.int32: 2, torch.uint32: 3, torch.int64: 4, torch.uint64: 5,
    torch.float16: 6, torch.float32: 7, torch.float64: 8, torch.bfloat16: 9,
    torch.float8_e4m3fn: 10, torch.float8_e5m2: 11,
}  # fmt: skip

# The compiler may have to run first, on a busy machine.
pytestmark = pytest.mark.timeout(600)


def gate(mock, stream):
    """Stops a stream until the returned event is set."""
    opened = threading.Event()
    wait = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: opened.wait(60) and None)
    opened.function = wait  # lives as long as the stream needs it
    function = mock.lib.mock_stream_host_function
    assert function(ctypes.c_void_p(stream), wait, None) == 0
    return opened


def test_it_says_what_it_is(mock):
    assert mock.lib.mock_nccl_is_a_mock() == 1
    assert b"test mock of NCCL" in mock.lib.mock_description()
    assert all(b"NCCL mock" in mock.lib.ncclGetErrorString(code) for code in (*range(9), -1, 77))
    assert mock.out("ncclGetVersion", kind=ctypes.c_int) == build.LATEST


@pytest.mark.parametrize(
    ("version", "rccl"), [(22105, False), (22703, False), (22907, False), (22105, True), (22800, True)]
)
def test_newer_functions_are_absent(played, version, rccl):
    library = played(version, rccl)
    assert library.out("ncclGetVersion", kind=ctypes.c_int) == version
    assert hasattr(library.lib, "ncclCommSplit")
    for name in build.absent(version, rccl):
        assert not hasattr(library.lib, name), name
    newer = {"ncclCommShrink": 22700, "ncclAlltoAll": 22800, "ncclPutSignal": 22902, "ncclCommSuspend": 22907}
    assert {n: hasattr(library.lib, n) for n in newer} == {n: version >= since for n, since in newer.items()}
    assert hasattr(library.lib, "ncclAllToAllv") == rccl
    assert hasattr(library.lib, "ncclGather") == (rccl or version >= 22800)


def test_the_version_can_be_said(mock, monkeypatch):
    monkeypatch.setenv("NCCL_MOCK_VERSION", "22809")
    assert mock.out("ncclGetVersion", kind=ctypes.c_int) == 22809


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_reductions(mock, group, dtype):
    def body(rank, comm, stream):
        source = torch.tensor([1, 2, 3, 2, 1, 0, 4]).add(rank).to(dtype)
        results = []
        for op in (api.SUM, api.PROD, api.MAX, api.MIN, api.AVG):
            out = torch.zeros(7, dtype=torch.uint8).repeat(source.element_size()).view(dtype)
            mock.call("ncclAllReduce", source.data_ptr(), out.data_ptr(), 7, TYPES[dtype], op, comm, stream)
            mock.synchronize(stream)
            results.append(out.double().tolist())
        return results

    ranks = torch.tensor([1.0, 2, 3, 2, 1, 0, 4]) + torch.arange(3)[:, None]
    average = ranks.mean(0) if dtype.is_floating_point else ranks.mean(0).trunc()
    expected = [ranks.sum(0), ranks.prod(0).to(dtype), ranks.amax(0), ranks.amin(0), average.to(dtype)]
    expected = [e.to(dtype).double().tolist() for e in expected]
    for results in group(3, body):
        assert results == expected


def test_small_floats_are_rounded_as_torch_rounds(mock, group):
    """Through fp32 and back: each 8-bit and 16-bit value that is a number, in the sum of two neighbours."""

    def body(rank, comm, stream):
        different = []
        for dtype, bits in [
            (torch.float16, 16),
            (torch.bfloat16, 16),
            (torch.float8_e4m3fn, 8),
            (torch.float8_e5m2, 8),
        ]:
            whole = (
                torch.arange(2**bits, dtype=torch.int32)
                .to(torch.int16 if bits == 16 else torch.int8)
                .view(dtype)
            )
            mine, other = whole.roll(rank), whole.roll(1 - rank)
            expected = (mine.float() + other.float()).to(dtype)
            out = torch.empty_like(mine)
            args = (mine.data_ptr(), out.data_ptr(), mine.numel(), TYPES[dtype], api.SUM, comm, stream)
            mock.call("ncclAllReduce", *args)
            mock.synchronize(stream)
            # Where a sum is no finite number of this type, CUDA saturates 8-bit floats and torch does not.
            plain = expected.float().isfinite() & (mine.float() + other.float()).isfinite()
            different += mine.float()[plain & (out.float() != expected.float())].tolist()
        return different

    assert group(2, body) == [[], []]


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("count", [1, 1000, 70001])
def test_collectives(mock, group, n, count):
    def values(rank):  # n blocks, all different
        return (np.arange(n * count, dtype=np.int32) * 7 + 1000003 * rank).astype(np.int32)

    def body(rank, comm, stream):
        whole, mine = values(rank), values(rank)[:count]
        last = n - 1

        def run(name, send, out, *rest):
            buffers = [b for b in (send, out) if b is not None]
            mock.call(name, *buffers, count, 2, *rest, comm, stream)
            mock.synchronize(stream)
            return out

        empty, large = np.zeros(count, np.int32), np.zeros(n * count, np.int32)
        total = sum(values(r) for r in range(n)).astype(np.int32)
        blocks = np.concatenate([values(r)[:count] for r in range(n)])
        block = slice(rank * count, (rank + 1) * count)
        assert (run("ncclAllReduce", mine, empty, api.SUM) == total[:count]).all()
        assert (run("ncclAllGather", mine, large) == blocks).all()
        assert (run("ncclReduceScatter", whole, empty, api.SUM) == total[block]).all()
        swapped = np.concatenate([values(r)[block] for r in range(n)])
        assert (run("ncclAlltoAll", whole, large) == swapped).all()
        assert (run("ncclBroadcast", mine, empty, last) == values(last)[:count]).all()
        assert (run("ncclBcast", None, mine.copy(), last) == values(last)[:count]).all()
        assert (run("ncclScatter", whole, empty, last) == values(last)[block]).all()
        reduced, gathered = (
            run("ncclReduce", mine, empty * 0, api.SUM, last),
            run("ncclGather", mine, large * 0, last),
        )
        if rank == last:
            assert (reduced == total[:count]).all()
            assert (gathered == blocks).all()
        else:
            assert not reduced.any()
            assert not gathered.any()
        # In place, where NCCL allows it.
        buffer = whole.copy()
        own = np.concatenate([values(r)[r * count : (r + 1) * count] for r in range(n)])
        assert (run("ncclAllGather", buffer[block], buffer) == own).all()
        buffer = whole.copy()
        assert (run("ncclReduceScatter", buffer, buffer[block], api.SUM) == total[block]).all()
        assert (run("ncclAllReduce", mine, mine, api.SUM) == total[:count]).all()

    group(n, body)


def test_groups_let_sends_and_receives_go_on_together(mock, group):
    size = 100_000  # more than a pipe holds

    def body(rank, comm, stream):
        sent = [np.full(size, 10 * rank + to, np.int64) for to in range(4)]
        got = [np.zeros(size, np.int64) for _ in range(4)]
        mock.call("ncclGroupStart")
        mock.call("ncclGroupStart")
        for peer in range(4):  # itself as well
            mock.call("ncclSend", sent[peer], size, 4, peer, comm, stream)
            mock.call("ncclRecv", got[peer], size, 4, peer, comm, stream)
        mock.call("ncclGroupEnd")
        assert mock.code("mock_stream_query", stream) == 0, "started before the outermost end"
        mock.call("ncclGroupEnd")
        mock.synchronize(stream)
        return [int(g.min()) for g in got] + [int(g.max()) for g in got]

    assert group(4, body) == [[10 * peer + rank for peer in range(4)] * 2 for rank in range(4)]


def test_a_group_holds_several_communicators_of_one_thread(mock):
    """Both ranks in one thread, one stream: initialisation, split and operations are only done together."""
    uid, n = mock.unique_id(), 2
    comms, children = [ctypes.c_void_p() for _ in range(n)], [ctypes.c_void_p() for _ in range(n)]
    mock.call("ncclGroupStart")
    for rank in range(n):
        mock.call("ncclCommInitRank", ctypes.byref(comms[rank]), n, uid, rank)
    mock.call("ncclGroupEnd")
    mock.call("ncclGroupStart")
    for rank in range(n):
        mock.call("ncclCommSplit", comms[rank].value, 0, 0, ctypes.byref(children[rank]), None)
    mock.call("ncclGroupEnd")
    data = [np.full(5, rank + 1, np.float32) for rank in range(n)]
    mock.call("ncclGroupStart")
    for kind in (comms, children):
        for rank in range(n):
            mock.call("ncclAllReduce", data[rank], data[rank], 5, 7, api.SUM, kind[rank].value, None)
    mock.call("ncclGroupEnd")
    mock.synchronize()
    for rank in range(n):
        assert data[rank].tolist() in ([6.0] * 5, [4.0] * 5, [5.0] * 5)
        mock.call("ncclCommDestroy", children[rank].value)
        mock.call("ncclCommDestroy", comms[rank].value)


def test_an_error_in_a_group_starts_nothing(mock, group):
    def body(rank, comm, stream):
        data = np.ones(3, np.float32)
        mock.call("ncclGroupStart")
        mock.call("ncclSend", data, 3, 7, 1 - rank, comm, stream)
        assert mock.code("ncclRecv", data, 3, 7, 5, comm, stream) == api.INVALID_ARGUMENT
        assert mock.code("ncclGroupEnd") == api.INVALID_ARGUMENT
        assert mock.code("mock_stream_query", stream) == 0

    group(2, body)
    assert mock.code("ncclGroupEnd") == api.INVALID_USAGE
    mock.call("ncclGroupStart")
    mock.call("ncclGroupSimulateEnd", None)


def test_a_send_waits_for_its_receive(mock, group):
    sent, looked = threading.Event(), threading.Event()

    def body(rank, comm, stream):
        data = np.full(3, rank, np.uint8)
        if rank == 0:
            mock.call("ncclSend", data, 3, 1, 1, comm, stream)
            sent.set()
            assert mock.code("mock_stream_query", stream) == api.NOT_READY
            looked.set()
        else:
            assert sent.wait(60)
            assert looked.wait(60)
            mock.call("ncclRecv", data, 3, 1, 0, comm, stream)
        mock.synchronize(stream)
        return data.tolist()

    assert group(2, body) == [[0] * 3, [0] * 3]


def test_operations_of_a_communicator_keep_their_order_over_streams(mock, group):
    def body(rank, comm, stream):
        other, data = mock.stream(), np.full(4, float(rank))
        opened = gate(mock, stream)
        mock.call("ncclAllReduce", data, data, 4, 8, api.SUM, comm, stream)
        mock.call("ncclAllReduce", data, data, 4, 8, api.SUM, comm, other)
        assert mock.code("mock_stream_query", other) == api.NOT_READY
        opened.set()
        mock.synchronize(other)
        mock.call("mock_stream_destroy", other)
        return data.tolist()

    assert group(2, body) == [[2.0] * 4] * 2


def test_streams_and_events(mock):
    a, b = mock.stream(), mock.stream()
    start, end, plain = mock.event(True), mock.event(True), mock.event()
    data, copy = np.zeros(8, np.uint8), np.zeros(8, np.uint8)
    mock.call("mock_event_synchronize", plain)  # never recorded: complete
    opened = gate(mock, a)
    mock.call("mock_event_record", start, a)
    mock.call("mock_stream_memset", a, data, 7, 8)
    mock.call("mock_stream_sleep", a, 2.0)
    mock.call("mock_event_record", end, a)
    mock.call("mock_stream_wait_event", b, end)
    mock.call("mock_stream_memcpy", b, copy, data, 8)
    assert mock.code("mock_event_query", end) == api.NOT_READY
    assert mock.code("mock_stream_query", b) == api.NOT_READY
    opened.set()
    mock.synchronize(b)
    assert copy.tolist() == [7] * 8
    mock.call("mock_event_query", end)
    elapsed = ctypes.c_float()
    mock.call("mock_event_elapsed_ms", ctypes.byref(elapsed), start, end)
    assert elapsed.value >= 2.0
    mock.call("mock_event_record", plain, a)
    assert mock.code("mock_event_elapsed_ms", ctypes.byref(elapsed), start, plain) == api.INVALID_HANDLE
    mock.call("mock_stream_destroy", a)
    assert mock.code("mock_stream_synchronize", a) == api.INVALID_HANDLE
    for event in (start, end, plain):
        mock.call("mock_event_destroy", event)
    assert mock.code("mock_event_query", end) == api.INVALID_HANDLE
    mock.call("mock_stream_destroy", b)


def test_split(mock, group):
    def body(rank, comm, stream):
        children = []
        for color in (rank % 2, -1 if rank == 3 else 0):
            child = ctypes.c_void_p(1)
            mock.call("ncclCommSplit", comm, color, -rank, ctypes.byref(child), None)
            children.append(child.value)
        seen = []
        for child in filter(None, children):
            data = np.array([rank], np.int32)
            mock.call("ncclBroadcast", data, data, 1, 2, 0, child, stream)
            mock.synchronize(stream)
            seen.append((mock.out("ncclCommCount", child, kind=ctypes.c_int), int(data[0])))
            mock.call("ncclCommFinalize", child)
            mock.call("ncclCommDestroy", child)
        return seen

    # Of each color the largest rank is the first, because of its key.
    assert group(4, body) == [[(2, 2), (3, 2)], [(2, 3), (3, 2)], [(2, 2), (3, 2)], [(2, 3)]]


def test_own_reductions(mock, group):
    def body(rank, comm, stream):
        scalar, data, out = (
            np.array([0.5], np.float32),
            np.full(3, rank + 1, np.float32),
            np.zeros(3, np.float32),
        )
        results = []
        for residence in (1, 0):
            op = mock.out(
                "ncclRedOpCreatePreMulSum", scalar, 7, residence, comm, kind=ctypes.c_int, first=True
            )
            scalar[0] = 2.0  # read at creation from the host, at the operation from the device
            mock.call("ncclAllReduce", data, out, 3, 7, op, comm, stream)
            mock.synchronize(stream)
            results.append(out.tolist())
            assert mock.code("ncclAllReduce", data, out, 3, 8, op, comm, stream) == api.INVALID_ARGUMENT
            mock.call("ncclRedOpDestroy", op, comm)
            assert mock.code("ncclAllReduce", data, out, 3, 7, op, comm, stream) == api.INVALID_ARGUMENT
            scalar[0] = 4.0 if residence else 0.5
        return results

    assert group(2, body) == [[[1.5] * 3, [6.0] * 3]] * 2


@pytest.mark.parametrize(("version", "name"), [(22105, "ncclAllToAllv"), (22800, "ncclAlltoAllv")])
def test_all_to_all_of_rccl(played, version, name):
    mock = played(version, rccl=True)
    uid = mock.unique_id()

    def body(rank):
        comm, out = mock.init(2, uid, rank), np.zeros(4, np.int32)
        data = np.arange(4, dtype=np.int32) + 10 * rank
        mock.call("ncclAllToAll", data, out, 2, 2, comm, None)
        mock.synchronize()
        plain = out.tolist()
        counts = np.array([[1, 2], [2, 1]], np.uintp)  # [from][to]
        sends, receives = counts[rank], counts[:, rank].copy()
        send_starts, receive_starts = (np.cumsum(c) - c for c in (sends, receives))
        on = (2, comm, None)
        mock.call(name, data, sends, send_starts, out, receives, receive_starts, *on)
        mock.synchronize()
        mock.call("ncclCommDestroy", comm)
        return plain, out[:3].tolist()

    assert in_threads(2, body) == [([0, 1, 10, 11], [0, 10, 11]), ([2, 3, 12, 13], [1, 2, 12])]


def test_nonsense_is_refused(mock, group):
    uid = mock.unique_id()
    for n, rank in ((0, 0), (2, 2), (2, -1), (99, 0)):
        with pytest.raises(Failed) as error:
            mock.init(n, uid, rank)
        assert error.value.code in (api.INVALID_ARGUMENT, api.INVALID_USAGE)
    with pytest.raises(Failed, match="ncclGetUniqueId"):
        mock.init(1, api.UniqueId(), 0)

    def body(rank, comm, stream):
        a, none = np.zeros(8, np.float32), None
        on = (comm, stream)
        wrong = [
            ("ncclAllReduce", none, a, 8, 7, 0, *on), ("ncclAllReduce", a, none, 8, 7, 0, *on),
            ("ncclAllReduce", a, a, 8, 12, 0, *on), ("ncclAllReduce", a, a, 8, -1, 0, *on),
            ("ncclAllReduce", a, a, 8, 7, 12345, *on), ("ncclAllReduce", a, a, 8, 7, -1, *on),
            ("ncclBroadcast", a, a, 8, 7, 2, *on), ("ncclReduce", a, a, 8, 7, 0, -1, *on),
            ("ncclSend", a, 8, 7, 2, *on), ("ncclRecv", a, 8, 7, -1, *on), ("ncclRecv", none, 8, 7, 0, *on),
            ("ncclAllReduce", a, a, 8, 7, 0, none, stream),
        ]  # fmt: skip
        for name, *arguments in wrong:
            assert mock.code(name, *arguments) == api.INVALID_ARGUMENT, (name, arguments)
        assert "communicator is NULL" in mock.last_error()
        assert mock.code("ncclAllReduce", a, a, 8, 7, 0, comm, 12345) == api.CUDA_ERROR
        assert mock.code("ncclAlltoAll", a, a, 4, 7, *on) == api.INVALID_USAGE
        mock.call("ncclAllReduce", none, none, 0, 7, 0, *on)
        if rank == 1:  # only the root has a result
            mock.call("ncclReduce", a, none, 8, 7, 0, 0, *on)
        else:
            mock.call("ncclReduce", a, a, 8, 7, 0, 0, *on)
        mock.synchronize(stream)
        return comm

    for comm in group(2, body):
        data = np.zeros(1, np.float32)
        assert mock.code("ncclAllReduce", data, data, 1, 7, 0, comm, None) == api.INVALID_ARGUMENT
        assert "destroyed" in mock.last_error()


def test_fp8_is_newer_than_2_23(mock, group, monkeypatch):
    def body(rank, comm, stream):
        data = np.zeros(1, np.uint8)
        return mock.code("ncclAllReduce", data, data, 1, api.FLOAT8_E4M3, 0, comm, stream)

    assert group(1, body) == [api.SUCCESS]
    monkeypatch.setenv("NCCL_MOCK_VERSION", "22304")
    assert group(1, body) == [api.INVALID_ARGUMENT]
