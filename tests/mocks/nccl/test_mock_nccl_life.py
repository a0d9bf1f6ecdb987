"""The mock is like NCCL: configs, states, errors, abort, windows, and what becomes of a communicator."""

import ctypes
import json
import os
import signal
import struct
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from tests.mocks.nccl import api, build
from tests.mocks.nccl.api import Config, Failed, in_threads

# The compiler may have to run first, on a busy machine.
pytestmark = pytest.mark.timeout(600)

ONE = np.ones(1)


def segments():
    return {name for name in os.listdir("/dev/shm") if name.startswith(f"nccl-mock-{os.getpid()}-")}


def read(mock, comm, name):
    return mock.lib.mock_last_config(ctypes.c_void_p(comm), name.encode())


def reduce(mock, comm, stream, data=None):
    data = np.ones(4) if data is None else data
    mock.call("ncclAllReduce", data, data, data.size, 8, api.SUM, comm, stream)
    return data


def test_configs_are_read_as_their_version_says(mock, group, monkeypatch):
    names = ("minCTAs", "splitShare", "trafficClass", "nvlsCTAs", "numRmaCtx", "maxP2pPeers", "hostCftMode")
    values = dict(zip(names, range(1, 8), strict=True)) | {"hostCftMode": 3}
    given = Config(**values, netName=b"Socket", commName=b"mine")

    def body(rank, comm, stream):
        texts = [mock.lib.mock_last_config_text(ctypes.c_void_p(comm), t) for t in (b"netName", b"commName")]
        return [read(mock, comm, name) for name in names], texts

    unset = api.UNDEFINED
    with pytest.raises(Failed, match="splitShare cannot be 2"):
        group(1, body, given)
    given.splitShare = 1
    assert group(1, body, given) == [([1, 1, 3, 4, 5, 6, 3], [b"Socket", b"mine"])]
    given.version = 22703  # what is newer than the caller's version is not seen
    assert group(1, body, given) == [([1, 1, 3, 4, unset, unset, unset], [b"Socket", b"mine"])]
    given.version, given.size = 23203, 48  # nor what is behind the caller's structure
    assert group(1, body, given) == [([1, 1, 3, unset, unset, unset, unset], [b"Socket", None])]
    given.size = 120
    monkeypatch.setenv("NCCL_MOCK_VERSION", "22105")  # nor what the library does not know
    assert group(1, body, given) == [([1, 1, unset, unset, unset, unset, unset], [b"Socket", None])]
    assert group(1, body, None) == [([unset] * 7, [None, None])]


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (Config(magic=1), "magic"),
        (Config(size=8), "size of 8"),
        (Config(blocking=2), "blocking cannot be 2"),
        (Config(minCTAs=4, maxCTAs=2), "larger than maxCTAs"),
        (Config(cgaClusterSize=-3), "cgaClusterSize"),
    ],
    ids=lambda c: c if isinstance(c, str) else "",
)
def test_nonsense_in_a_config_is_refused(mock, config, text):
    with pytest.raises(Failed, match=text) as error:
        mock.init(1, mock.unique_id(), 0, config)
    assert error.value.code == api.INVALID_ARGUMENT


def test_a_child_inherits_its_parents_config(mock, group):
    def body(rank, comm, stream):
        children = []
        for config in (None, ctypes.byref(Config(maxCTAs=9))):
            child = ctypes.c_void_p()
            mock.call("ncclCommSplit", comm, 0, 0, ctypes.byref(child), config)
            children.append(read(mock, child.value, "maxCTAs"))
            mock.call("ncclCommDestroy", child.value)
        return children

    assert group(2, body, Config(maxCTAs=5)) == [[5, 9]] * 2


def test_not_blocking(mock, monkeypatch, eventually):
    monkeypatch.setenv("NCCL_MOCK_SLOW_ENQUEUE", "1")
    uid, config = mock.unique_id(), Config(blocking=0)
    comm, child = [ctypes.c_void_p(), ctypes.c_void_p()], [ctypes.c_void_p(), ctypes.c_void_p()]

    def start(name, place, rank, *arguments):
        assert mock.code(name, *arguments, *place, ctypes.byref(config)) == api.IN_PROGRESS

    def ready(*ranks):
        eventually(lambda: all(mock.state(comm[r].value) == api.SUCCESS for r in ranks))

    start("ncclCommInitRankConfig", (), 0, ctypes.byref(comm[0]), 2, uid, 0)
    assert mock.state(comm[0].value) == api.IN_PROGRESS  # the other rank is not there
    data = np.ones(2)
    assert mock.code("ncclAllReduce", data, data, 2, 8, 0, comm[0].value, None) == api.INVALID_ARGUMENT
    start("ncclCommInitRankConfig", (), 1, ctypes.byref(comm[1]), 2, uid, 1)
    ready(0, 1)
    for r in range(2):  # each says "success", although it goes on
        mock.call("ncclCommSplit", comm[r].value, 0, 0, ctypes.byref(child[r]), None)
        assert r or (child[0].value is None and mock.state(comm[0].value) == api.IN_PROGRESS)
    ready(0, 1)  # then the children are there
    streams = [mock.stream(), mock.stream()]
    for r in range(2):
        arguments = (np.ones(2), np.zeros(2), 2, 8, 0, child[r].value, streams[r])
        assert mock.code("ncclAllReduce", *arguments) == api.IN_PROGRESS
        assert mock.code("ncclAllReduce", *arguments) == api.INVALID_ARGUMENT
        assert mock.state(child[r].value) == api.IN_PROGRESS
        assert mock.state(child[r].value) == api.SUCCESS
    for r in range(2):
        mock.synchronize(streams[r])
        assert mock.code("ncclCommFinalize", comm[r].value) == api.IN_PROGRESS
    ready(0, 1)
    for handle in (*comm, *child):
        mock.call("ncclCommDestroy", handle.value)


def test_abort_of_an_initialisation(mock, eventually):
    comm, config = ctypes.c_void_p(), ctypes.byref(Config(blocking=0))
    code = mock.code("ncclCommInitRankConfig", ctypes.byref(comm), 2, mock.unique_id(), 0, config)
    assert code == api.IN_PROGRESS
    eventually(segments)
    mock.call("ncclCommAbort", comm.value)
    eventually(lambda: not segments())


def test_planned_errors_of_initialisation(mock, monkeypatch):
    monkeypatch.setenv("NCCL_MOCK_INIT_ERROR", "2@0")
    comm = ctypes.c_void_p()
    assert mock.code("ncclCommInitRank", ctypes.byref(comm), 1, mock.unique_id(), 0) == api.SYSTEM_ERROR
    assert comm.value is None
    assert "planned" in mock.last_error()
    monkeypatch.setenv("NCCL_MOCK_INIT_ERROR", "2@1")
    mock.call("ncclCommAbort", mock.init(1, mock.unique_id(), 0))


def test_ranks_must_agree(mock, eventually):
    uid, first = mock.unique_id(), ctypes.c_void_p()
    config = ctypes.byref(Config(blocking=0))
    mock.code("ncclCommInitRankConfig", ctypes.byref(first), 2, uid, 0, config)
    name = bytes(uid)[len(b"NCCL mock") + 1 :].split(b"\0")[0].decode()
    segment = Path(f"/dev/shm/nccl-mock-{name}")

    def beginning():  # the number of ranks, and how many of them are there
        with segment.open("rb") as file:
            return struct.unpack("ii", file.read(8))

    eventually(lambda: segment.exists() and segment.stat().st_size and beginning() == (2, 1))
    for n, rank, text in ((3, 1, "another rank says 2"), (2, 0, "joined this unique id already")):
        with pytest.raises(Failed, match=text) as error:
            mock.init(n, uid, rank)
        assert error.value.code == api.INVALID_USAGE
    mock.call("ncclCommAbort", first.value)


def test_abort_ends_what_hangs_and_leaves_nothing(mock, group, eventually):
    def threads():  # and descriptors
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    def mapped():  # what tests of other ranks that died or hung left in this process is not of this one
        maps = Path("/proc/self/maps").read_text().splitlines()
        return {line.split()[5] for line in maps if "/dev/shm/nccl-mock-" in line}

    before, mapped_before = threads(), mapped()

    def body(rank, comm, stream):
        if rank == 1:
            return comm
        reduce(mock, comm, stream)
        reduce(mock, comm, stream)  # behind it
        waiting = threading.Thread(target=mock.synchronize, args=(stream,), daemon=True)
        waiting.start()
        assert mock.code("mock_stream_query", stream) == api.NOT_READY
        mock.call("ncclCommAbort", comm)
        waiting.join(60)
        assert not waiting.is_alive()
        assert mock.code("ncclCommCount", comm, ctypes.byref(ctypes.c_int())) == api.INVALID_ARGUMENT
        return None

    left = group(2, body, destroy=False)[1]
    mock.call("ncclCommAbort", left)
    eventually(lambda: all(now <= then for now, then in zip(threads(), before, strict=True)))
    assert not segments()
    eventually(lambda: mapped() <= mapped_before)


def test_abort_of_one_communicator_leaves_the_others_of_its_group(mock, group):
    def body(rank, comm, stream):
        child = ctypes.c_void_p()
        mock.call("ncclCommSplit", comm, 0, 0, ctypes.byref(child), None)
        data = [np.ones(3), np.ones(3)]
        mock.call("ncclGroupStart")
        if rank == 0:
            reduce(mock, child.value, stream, data[0])
        reduce(mock, comm, stream, data[1])
        mock.call("ncclGroupEnd")
        mock.call("ncclCommAbort", child.value)
        mock.synchronize(stream)
        return data[1].tolist()

    assert group(2, body) == [[2.0] * 3] * 2


def test_injected_and_remote_errors(mock, group, eventually, monkeypatch):
    def body(rank, comm, stream):
        if rank == 1:
            mock.call("mock_inject_error", comm, api.SYSTEM_ERROR)
            assert mock.state(comm) == api.SYSTEM_ERROR
            assert mock.code("ncclAllReduce", ONE, ONE, 1, 8, 0, comm, stream) == api.SYSTEM_ERROR
            assert mock.last_error(comm) == "the communicator has an asynchronous error (NCCL mock)"
            mock.call("ncclCommAbort", comm)
            return
        eventually(lambda: mock.state(comm) == api.REMOTE_ERROR)
        assert "rank 1 has aborted" in mock.last_error(comm)
        mock.call("ncclCommAbort", comm)
        return

    monkeypatch.setenv("NCCL_MOCK_PEER_ERRORS", "1")
    group(2, body, destroy=False)


def test_finalized(mock, group):
    def body(rank, comm, stream):
        data = reduce(mock, comm, stream)
        mock.call("ncclCommFinalize", comm)  # what was issued is done
        assert data.tolist() == [2.0] * 4
        assert mock.code("ncclAllReduce", ONE, ONE, 1, 8, 0, comm, stream) == api.INVALID_USAGE
        assert mock.code("ncclCommFinalize", comm) == api.INVALID_ARGUMENT

    group(2, body)


def test_revoke_then_split(mock, group):
    def body(rank, comm, stream):
        if rank == 0:
            reduce(mock, comm, stream)  # hangs
        assert mock.code("ncclCommRevoke", comm, 1) == api.INVALID_ARGUMENT
        mock.call("ncclCommRevoke", comm, 0)
        mock.synchronize(stream)
        assert mock.code("ncclAllReduce", ONE, ONE, 1, 8, 0, comm, stream) == api.INVALID_USAGE
        assert mock.code("ncclCommFinalize", comm) == api.INVALID_USAGE
        child = ctypes.c_void_p()
        mock.call("ncclCommSplit", comm, 0, 0, ctypes.byref(child), None)
        data = reduce(mock, child.value, stream)
        mock.synchronize(stream)
        mock.call("ncclCommDestroy", child.value)
        return data.tolist()

    assert group(2, body) == [[2.0] * 4] * 2


def test_shrink_and_grow(mock):
    uid, grown = mock.unique_id(), api.UniqueId()
    have_id = threading.Event()

    def body(rank):
        stream, small, large = mock.stream(), ctypes.c_void_p(), ctypes.c_void_p()
        if rank == 3:  # comes in later
            assert have_id.wait(60)
            mock.call("ncclCommGrow", None, 3, ctypes.byref(grown), 2, ctypes.byref(large), None)
        else:
            comm = mock.init(3, uid, rank)
            if rank == 1:
                mock.call("ncclCommAbort", comm)
                return None
            reduce(mock, comm, stream)  # hangs
            excluded = (ctypes.c_int * 1)(1)
            mock.call("ncclCommShrink", comm, excluded, 1, ctypes.byref(small), None, 1)
            mock.call("ncclCommDestroy", comm)
            given = None
            if rank == 0:
                ask = ("ncclCommGetUniqueId", small.value, ctypes.byref(grown))
                mock.call(*ask)
                assert mock.code(*ask) == api.INVALID_USAGE
                have_id.set()
                given = ctypes.byref(grown)
            mock.call("ncclCommGrow", small.value, 3, given, -1, ctypes.byref(large), None)
            mock.call("ncclCommDestroy", small.value)
        mine, data = np.array([rank]), np.zeros(3, np.int64)
        mock.call("ncclAllGather", mine, data, 1, 4, large.value, stream)
        mock.synchronize(stream)
        mock.call("ncclCommDestroy", large.value)
        return data.tolist()

    assert in_threads(4, body) == [[0, 2, 3], None, [0, 2, 3], [0, 2, 3]]


def test_scalable_initialisation(mock):
    ids = (api.UniqueId * 2)(mock.unique_id(), mock.unique_id())

    def body(rank):
        comm = mock.out("ncclCommInitRankScalable", 3, rank, 2, ids, None, first=True)
        data = reduce(mock, comm, None)
        mock.synchronize()
        mock.call("ncclCommDestroy", comm)
        return data.tolist()

    assert in_threads(3, body) == [[3.0] * 4] * 3
    assert mock.code("ncclCommInitRankScalable", None, 1, 0, 2, ids, None) == api.INVALID_ARGUMENT


def test_suspend_and_statistics(mock, group):
    def body(rank, comm, stream):
        def statistic(which):
            return mock.out("ncclCommMemStats", comm, which, kind=ctypes.c_uint64)

        mock.call("ncclCommSuspend", comm, 1)
        assert statistic(1) == 1
        assert mock.code("ncclAllReduce", ONE, ONE, 1, 8, 0, comm, stream) == api.INVALID_USAGE
        mock.call("ncclCommResume", comm)
        assert mock.code("ncclCommResume", comm) == api.INVALID_USAGE
        assert statistic(0) + statistic(2) == statistic(3) > 0
        mock.call("mock_set_device", 3)
        for function in ("Finalize", "Destroy", "Abort"):  # these would make a context there
            assert mock.code(f"ncclComm{function}", comm) == api.INVALID_USAGE
        assert mock.code("ncclCommRevoke", comm, 0) == api.INVALID_USAGE
        result = reduce(mock, comm, stream).size, mock.out("ncclCommCuDevice", comm, kind=ctypes.c_int)
        mock.call("mock_set_device", 0)
        return result

    assert group(1, body) == [(4, 0)]


def test_registration_and_windows(mock, group):
    def body(rank, comm, stream):
        memory = mock.out("ncclMemAlloc", 8192, first=True)
        handle = mock.out("ncclCommRegister", comm, memory, 8192)
        mock.call("ncclCommDeregister", comm, handle)
        assert mock.code("ncclCommDeregister", comm, handle) == api.INVALID_ARGUMENT
        window = ctypes.c_void_p()
        wrong = mock.code("ncclCommWindowRegister", comm, memory + 8, 64, ctypes.byref(window), 0)
        assert wrong == api.INVALID_ARGUMENT
        mock.call("ncclCommWindowRegister", comm, memory, 8192, ctypes.byref(window), 0)
        assert mock.out("ncclWinGetUserPtr", comm, window.value) == memory
        peer = 1 - rank
        (ctypes.c_int64 * 4).from_address(memory)[:] = [rank + 1] * 4
        put = ("ncclPutSignal", memory, 4, 4, peer, window.value)
        outside = ("ncclPutSignal", np.zeros(4, np.int64), 4, 4, peer, window.value)
        assert mock.code(*outside, 0, 0, 0, 0, comm, stream) == api.INVALID_ARGUMENT
        assert "not in a valid symmetric window" in mock.last_error()
        assert mock.code(*put, 8192 - 31, 0, 0, 0, comm, stream) == api.INVALID_ARGUMENT
        assert mock.code(*put, 0, 1, 0, 0, comm, stream) == api.INVALID_ARGUMENT
        mock.call(*put, 8192 - 32, 0, 0, 0, comm, stream)
        mock.call("ncclSignal", peer, 0, 0, 0, comm, stream)
        wait = api.WaitSignalDesc(2, peer, 0, 0)
        mock.call("ncclWaitSignal", 1, ctypes.byref(wait), comm, stream)
        mock.synchronize(stream)
        got = list((ctypes.c_int64 * 4).from_address(memory + 8192 - 32))
        mock.call("ncclCommWindowDeregister", comm, window.value)
        assert mock.code(*put, 0, 0, 0, 0, comm, stream) == api.INVALID_ARGUMENT
        reduce(mock, comm, stream)
        mock.synchronize(stream)  # both are done with the memory
        mock.call("ncclMemFree", memory)
        assert mock.code("ncclMemFree", memory) == api.INVALID_USAGE
        return got

    assert group(2, body) == [[2] * 4, [1] * 4]


def test_collectives_take_a_config(mock, group):
    calls = {  # what is between the count with its type and the communicator
        "AllReduce": [api.SUM],
        "Reduce": [api.SUM, 0],
        "Broadcast": [0],
        "ReduceScatter": [api.SUM],
        "Gather": [0],
        "Scatter": [0],
        "AllGather": [],
        "AlltoAll": [],
    }

    def body(rank, comm, stream):
        results = []
        for name, rest in calls.items():
            data, out, config = np.arange(4.0) + rank, np.zeros(4), api.CollConfig(96, 0xCAFEBEEF, 23203)
            call = (f"nccl{name}Config", data, out, 2, 8, *rest, comm, stream, ctypes.byref(config))
            mock.call(*call)
            mock.synchronize(stream)
            results.append(out.tolist())
            config.magic = 0
            assert mock.code(*call) == api.INVALID_ARGUMENT
        return results

    total, zero, root = [1.0, 3.0, 0.0, 0.0], [0.0] * 4, [0.0, 1.0, 0.0, 0.0]
    both, behind = [0.0, 1.0, 1.0, 2.0], [2.0, 3.0, 3.0, 4.0]
    first_rank = [total, total, root, total, both, root, both, both]
    second_rank = [total, zero, root, [5.0, 7.0, 0.0, 0.0], zero, [2.0, 3.0, 0.0, 0.0], both, behind]
    assert group(2, body) == [first_rank, second_rank]


def test_abort_of_the_parent_ends_a_split(mock, group):
    begun = threading.Event()

    def body(rank, comm, stream):
        if rank == 1:
            assert begun.wait(60)
            return comm
        child = ctypes.c_void_p()

        def split():
            return mock.code("ncclCommSplit", comm, 0, 0, ctypes.byref(child), None)

        codes = []
        thread = threading.Thread(target=lambda: codes.append(split()), daemon=True)
        thread.start()
        begun.set()
        mock.call("ncclCommAbort", comm)
        thread.join(60)
        # The split was ended, or came after the abort.
        assert codes[0] in (api.INTERNAL_ERROR, api.INVALID_ARGUMENT)
        assert child.value is None
        return None

    mock.call("ncclCommAbort", group(2, body, destroy=False)[1])


def test_the_log_has_arguments_and_mismatches(mock, group, monkeypatch, tmp_path):
    log = tmp_path / "log"
    monkeypatch.setenv("NCCL_MOCK_LOG", str(log))
    done = threading.Barrier(2)

    def body(rank, comm, stream):
        data = np.zeros(8, np.float32)
        mock.call("ncclGroupStart")
        mock.call("ncclReduce", data, data, 5, 7, api.MAX, 1, comm, stream)
        mock.call("ncclGroupEnd")
        # Counts that differ: no error, and nothing outside of the receiver's four.
        mock.call("ncclBroadcast", data + 1, data, 4 if rank else 8, 7, 0, comm, stream)
        done.wait(60)
        mock.synchronize(stream)
        return stream, data.tolist()

    results = group(2, body)
    assert results[1][1] == [1.0] * 4 + [0.0] * 4
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    reduced = sorted((x for x in lines if x.get("function") == "ncclReduce"), key=lambda x: x["rank"])
    for rank, line in enumerate(reduced):
        expected = {
            "rank": rank,
            "nranks": 2,
            "count": 5,
            "dtype": 7,
            "op": 2,
            "root": 1,
            "depth": 1,
            "result": 0,
        }
        assert {name: line[name] for name in expected} == expected
        assert line["stream"] == results[rank][0]
        assert line["comm"] == lines[-1]["comm"]
    (mismatch,) = [x for x in lines if x.get("event") == "mismatch"]
    assert (mismatch["rank"], mismatch["peer"]) == (1, 0)
    assert (mismatch["mine"]["count"], mismatch["theirs"]["count"]) == (4, 8)
    assert {"ncclGetUniqueId", "ncclCommInitRankConfig", "ncclCommDestroy"} <= {
        x.get("function") for x in lines
    }


def start_processes(what, n, uid, environment=None):
    program = [sys.executable, str(Path(__file__).with_name("process_rank.py"))]
    library = str(build.library())
    processes = []
    for rank in range(n):
        p = subprocess.Popen(
            [*program, library, what, str(rank), str(n)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | (environment or {}),
        )
        p.stdin.write(bytes(uid).hex() + "\n")
        p.stdin.flush()
        processes.append(p)
    return processes


def test_processes(mock):
    processes = start_processes("data", 3, mock.unique_id())
    for rank, p in enumerate(processes):
        out, _ = p.communicate(timeout=300)
        assert json.loads(out.splitlines()[-1]) == [True, (rank - 1) % 3 + 1, (rank - 1) % 3 + 100]
    assert not segments()


@pytest.mark.parametrize("how", ["killed, to be waited for", "killed"])
def test_a_dead_process_is_a_remote_error(mock, how):
    processes = start_processes("lonely", 2, mock.unique_id(), {"NCCL_MOCK_PEER_ERRORS": "1"})
    assert [p.stdout.readline() for p in processes] == ["ready\n"] * 2
    processes[1].send_signal(signal.SIGKILL)
    if how == "killed":  # else it stays a zombie meanwhile
        processes[1].wait()
    out, _ = processes[0].communicate(timeout=300)
    assert json.loads(out) == [api.REMOTE_ERROR, "rank 1's process has ended (NCCL mock)"]
    processes[1].communicate()
