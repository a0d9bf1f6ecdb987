"""Who is to blame, and what the library has said: errors of operations on streams, over the mock."""

from __future__ import annotations

import ctypes
import os
import threading
from functools import partial

import pytest
import torch

import unicomm
from tests import recorded
from tests.mocks.nccl.backend import MockBackend, make
from tests.mocks.nccl.kinds import streams_of
from unicomm import Communicator
from unicomm.backends.nccl import known_causes as causes
from unicomm.backends.nccl import library_log
from unicomm.c10d.process_group import UnicommProcessGroup
from unicomm.comms.errors import AbortedError, BackendError, CommTimeoutError, NotReadyError, PeerLostError
from unicomm.comms.failures.first_cause import FirstCause
from unicomm.flight_recorder.recording import writer
from unicomm.testing import run_ranks

SUM = unicomm.ReduceOp.SUM
_made: list[type[MockBackend]] = []


@pytest.fixture(autouse=True)
def rings(fresh_recorder):
    return fresh_recorder


@pytest.fixture
def mock_nccl() -> str:
    if not _made:
        # A version of its own, whose log nobody else in this process has opened.
        _made.append(make("nccl-failing", 23002))
    return "nccl-failing"


def c_of(comm: Communicator) -> ctypes.CDLL:
    return streams_of(comm)._c


def handle(comm: Communicator) -> ctypes.c_void_p:
    return ctypes.c_void_p(comm.unsafe_backend._handle.comm)


def pair(mock_nccl, waits, absent, raised, timeout=60.0, **options):
    """`waits(comm)` on rank 0, whose error is returned; rank 1 calls `absent` and waits for that error.

    `absent` gets an event, too, which that error sets. `options` are those of the communicator.
    """
    over = threading.Event()
    errors = []

    def program(comm: Communicator) -> None:
        comm.barrier(False)
        if comm.get_rank() == 1:
            absent(comm, over)
            assert over.wait(60)
            return
        try:
            errors.append(raised(lambda: waits(comm)))
        finally:
            over.set()

    run_ranks(program, 2, backend=mock_nccl, timeout=timeout, **options)
    return errors[0]


def late_reduce(comm: Communicator) -> None:
    comm.all_reduce(torch.ones(4), SUM, True, timeout=1).wait_blocking()


def test_a_rank_that_does_not_come_is_named_with_its_place(mock_nccl, raised):
    error = pair(mock_nccl, late_reduce, lambda comm, over: None, raised)
    assert type(error) is CommTimeoutError
    assert (error.culprits, error.absent, error.seq) == ((1,), (1,), 2)
    first, *rest = error.message.splitlines()
    assert "timed out after 1 s: rank 1 had not arrived; rank 1 was last in barrier #1 (" in first
    assert __file__ in first
    assert any(line.startswith("  verdict (ranks of the whole job): ") for line in rest)


HOST_WAITS = {
    "collective": lambda comm, x, limit: comm.broadcast(x, 0, True, timeout=limit),
    "message": lambda comm, x, limit: comm.send(x, 1, True, timeout=limit),
    "group": lambda comm, x, limit: comm.all_to_all_v_single(
        x, torch.ones(4), [2, 2], [2, 2], True, timeout=limit
    ),
}


@pytest.mark.parametrize("blocking", ["1", "0"])
@pytest.mark.parametrize("call", HOST_WAITS)
def test_a_call_that_waits_on_the_host_is_ended(mock_nccl, raised, monkeypatch, call, blocking):
    """As the library's do that connect to a peer: the caller gets no Work that could tell of the deadline."""
    monkeypatch.setenv("NCCL_MOCK_LAZY_CONNECT", "1")

    def waits(comm: Communicator) -> None:
        HOST_WAITS[call](comm, torch.ones(4), 1)

    error = pair(mock_nccl, waits, lambda comm, over: None, raised, hints={"blocking": blocking})
    assert (type(error), error.culprits) == (CommTimeoutError, (1,))
    assert "timed out after 1 s: rank 1 had not arrived" in error.message


def test_a_call_that_waits_on_the_host_hears_of_an_abort(mock_nccl, raised, monkeypatch):
    monkeypatch.setenv("NCCL_MOCK_LAZY_CONNECT", "1")

    def waits(comm: Communicator) -> None:
        HOST_WAITS["collective"](comm, torch.ones(4), 8)

    error = pair(mock_nccl, waits, lambda comm, over: comm.abort(), raised)
    assert (type(error), error.culprits) == (AbortedError, (1,))


def test_an_abort_ends_a_call_that_waits_on_the_host(mock_nccl, raised, monkeypatch, eventually):
    monkeypatch.setenv("NCCL_MOCK_LAZY_CONNECT", "1")

    def waits(comm: Communicator) -> None:
        def end() -> None:
            eventually(lambda: len(recorded.of(comm)) == 2)  # the barrier, and the call
            comm.abort()

        other = threading.Thread(target=end)
        other.start()
        try:
            HOST_WAITS["collective"](comm, torch.ones(4), 60)
        finally:
            other.join(60)

    error = pair(mock_nccl, waits, lambda comm, over: None, raised)
    assert (type(error), error.culprits) == (AbortedError, (0,))


def test_finalize_ends_a_call_of_another_thread_that_waits_on_the_host(
    mock_nccl, raised, monkeypatch, eventually
):
    monkeypatch.setenv("NCCL_MOCK_LAZY_CONNECT", "1")
    errors = []

    def waits(comm: Communicator) -> None:
        call = partial(HOST_WAITS["collective"], comm, torch.ones(4), 60)
        other = threading.Thread(target=lambda: errors.append(raised(call)))
        other.start()
        eventually(lambda: len(recorded.of(comm)) == 2)
        try:
            comm.finalize(0.3)
        finally:
            other.join(60)

    error = pair(mock_nccl, waits, lambda comm, over: None, raised)
    assert type(error) is CommTimeoutError
    assert "and aborted: broadcast #2" in error.message
    assert [type(error) for error in errors] == [AbortedError]


def test_no_finalize_in_the_midst_of_a_call(mock_nccl, raised, monkeypatch):
    """As in a signal handler that interrupts the call: it uses the communicator when the handler returns."""
    comm = unicomm.new_comm(mock_nccl, "cpu", rank=0, size=1)
    streams = comm.unsafe_backend.streams()
    native_stream, errors = streams.handle, []

    def stream(of: object) -> int:
        errors.append(raised(comm.finalize))
        return native_stream(of)

    monkeypatch.setattr(streams, "handle", stream)
    comm.all_reduce(torch.ones(4), SUM, True).wait_blocking()
    assert [type(error) for error in errors] == [NotReadyError]
    assert "in the midst of all_reduce #1" in errors[0].message
    comm.finalize()


def test_a_message_that_nobody_sends_names_the_sender(mock_nccl, raised):
    def waits(comm: Communicator) -> None:
        comm.recv(torch.ones(4), 1, True, timeout=1).wait_blocking()

    error = pair(mock_nccl, waits, lambda comm, over: None, raised)
    assert (type(error), error.culprits) == (CommTimeoutError, (1,))
    assert error.op == "recv"


def test_a_message_of_the_other_direction_is_not_the_awaited_one(mock_nccl, raised):
    def waits(comm: Communicator) -> None:
        comm.recv(torch.ones(4), 1, True, timeout=1).wait_blocking()

    def receives_too(comm: Communicator, over: threading.Event) -> None:
        comm.recv(torch.ones(4), 0, True, timeout=4)

    assert pair(mock_nccl, waits, receives_too, raised).culprits == (1,)


@pytest.mark.parametrize("known_by", ["ring", "store"])
def test_a_device_that_does_not_come_to_it_is_named(mock_nccl, raised, known_by, monkeypatch, eventually):
    issued = threading.Event()
    if known_by == "store":  # as if the ranks were on two hosts
        monkeypatch.setattr(writer, "recorder_path", lambda: None)

    def waits(comm: Communicator) -> None:
        assert issued.wait(60)
        comm.all_reduce(torch.ones(4), SUM, True, timeout=1).wait_blocking()

    def stuck(comm: Communicator, over: threading.Event) -> None:
        streams_of(comm).call(lambda: over.wait(60))
        comm.all_reduce(torch.ones(4), SUM, True, timeout=20 if known_by == "ring" else 8)
        store = UnicommProcessGroup(comm).get_group_store().underlying_store  # that of the communicator
        cause = FirstCause(store, comm.get_uid(), comm.get_name(), 1, 2)
        if known_by == "store":
            eventually(lambda: cause.reports([1]))
        issued.set()

    error = pair(mock_nccl, waits, stuck, raised)
    assert (type(error), error.culprits, error.late) == (CommTimeoutError, (1,), (1,))
    assert error.message.startswith(
        "timed out after 1 s: all ranks had issued it, but the device of rank 1 had not come to it"
    )


def test_ranks_of_other_hosts_are_known_by_their_reports(mock_nccl, raised, monkeypatch):
    monkeypatch.setattr(writer, "recorder_path", lambda: None)
    error = pair(mock_nccl, late_reduce, lambda comm, over: None, raised)
    assert (type(error), error.culprits) == (CommTimeoutError, (1,))
    assert "timed out after 1 s: rank 1 had not arrived" in error.message


def test_what_one_rank_finds_all_raise(mock_nccl, raised):
    """Rank 0's time is up; rank 1, which could wait much longer, hears of it."""
    issued, over = threading.Event(), threading.Barrier(3)

    def program(comm: Communicator) -> str:
        comm.barrier(False)
        error = None
        if comm.get_rank() == 0:
            assert issued.wait(60)
            error = raised(comm.all_reduce(torch.ones(4), SUM, True, timeout=1).wait_blocking)
        elif comm.get_rank() == 1:
            # A rank looks at what others have found after a quarter of its timeout.
            work = comm.all_reduce(torch.ones(4), SUM, True, timeout=12)
            issued.set()
            error = raised(work.wait_blocking)
        over.wait(60)
        if error is None:
            return ""
        assert (type(error), error.culprits) == (CommTimeoutError, (2,))
        return error.message

    first, second, _ = run_ranks(program, 3, backend=mock_nccl, timeout=60)
    assert "timed out after 1 s: rank 2 had not arrived" in first
    assert first == second


def test_an_abort_reaches_ranks_that_the_library_does_not_tell(mock_nccl, raised):
    told = threading.Event()

    def program(comm: Communicator) -> None:
        comm.barrier(False)
        if comm.get_rank() == 0:
            comm.abort()
            assert told.wait(60)
            return
        work = comm.all_reduce(torch.ones(4), SUM, True, timeout=8)
        error = raised(work.wait_blocking)
        assert (type(error), error.culprits) == (AbortedError, (0,))
        assert "rank 0 aborted the communicator" in error.message
        told.set()

    run_ranks(program, 2, backend=mock_nccl)


def test_the_librarys_log_and_the_known_cause_are_in_the_error(mock_nccl, raised):
    told, heard = threading.Event(), threading.Event()

    def program(comm: Communicator) -> None:
        comm.barrier(False)
        if comm.get_rank() == 2:  # never comes, so that nothing is over
            assert heard.wait(60)
            return
        if comm.get_rank() == 0:
            work = comm.all_reduce(torch.ones(4), SUM, True)
            c_of(comm).mock_warn(b"NET/IB : Got completion from peer 10.0.0.2<4> with status=12 opcode=0")
            assert c_of(comm).mock_inject_error(handle(comm), 2) == 0
            error = raised(work.wait_blocking)
            assert type(error) is BackendError
            lines = error.message.splitlines()
            assert lines[0] == (
                "NCCL operation failed with unhandled system error: an injected error (NCCL mock)"
            )
            log = "  NCCL's log: mock.cc:1 "
            assert lines[1:] == [
                f"{log}NET/IB : Got completion from peer 10.0.0.2<4> with status=12 opcode=0",
                f"{log}an injected error (NCCL mock)",
            ]
            assert "NCCL_IB_GID_INDEX" in error.hint
            told.set()
            return
        work = comm.all_reduce(torch.ones(4), SUM, True, timeout=8)
        error = raised(work.wait_blocking)
        assert (type(error), error.culprits) == (BackendError, (0,))
        assert "rank 0: NCCL operation failed with unhandled system error" in error.message
        assert told.wait(60)
        heard.set()

    run_ranks(program, 3, backend=mock_nccl)


def test_a_timeout_has_what_the_library_said_before(mock_nccl, raised):
    def absent(comm: Communicator, over: threading.Event) -> None:
        c_of(comm).mock_warn(b"Call to connect to 10.0.0.2<5> failed : Connection refused")

    error = pair(mock_nccl, late_reduce, absent, raised)
    words = "Call to connect to 10.0.0.2<5> failed : Connection refused"
    assert f"\n  NCCL's log: mock.cc:1 {words}" in str(error)
    assert "firewalls" in error.hint


def test_a_failed_creation_has_the_log(mock_nccl, raised, monkeypatch):
    monkeypatch.setenv("NCCL_MOCK_INIT_ERROR", "2")
    error = raised(unicomm.new_comm, mock_nccl, "cpu", rank=0, size=1)
    assert "a planned error at initialisation" in error.message
    assert not any("NCCL_DEBUG" in name for name in os.environ)


class Native:
    """A library that writes where NCCL_DEBUG_FILE says."""

    def __init__(self) -> None:
        self.calls = 0
        self.file = f"libnccl {id(self)}"

    def count(self, comm: int) -> tuple[int, int]:
        self.calls += 1
        self.log = open(os.environ["NCCL_DEBUG_FILE"], "w", buffering=1)  # noqa: SIM115
        self.write("CommCount : comm argument is NULL")
        return 4, 0

    def write(self, words: str) -> None:
        print(f"\n[2026-01-01 00:00:00] host:1:2 [0] init.cc:7 (f) NCCL WARN {words}", file=self.log)

    def last_error(self, comm: int) -> str:
        return "CommCount : comm argument is NULL"


@pytest.fixture
def no_settings(monkeypatch, tmp_path):
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_CONF_FILE", str(tmp_path / "nccl.conf"))
    return tmp_path / "nccl.conf"


@pytest.mark.parametrize("where", ["NCCL_DEBUG", "NCCL_DEBUG_FILE", "settings file"])
def test_a_log_that_the_program_asked_for_is_left_alone(no_settings, monkeypatch, where):
    if where == "settings file":
        no_settings.write_text("# mine\nNCCL_DEBUG=INFO\n")
    else:
        monkeypatch.setenv(where, "INFO")
    native = Native()
    assert library_log.start(native) is None
    assert native.calls == 0


def test_the_log_is_small_and_ends_with_the_last_lines(no_settings):
    native = Native()
    log = library_log.start(native)
    assert log is not None
    assert log.lines() == []  # the call that opened it is no news
    mark = log.position()
    native.write("first")
    assert log.lines(mark) == ["init.cc:7 first"]
    for i in range(20_000):
        native.write(f"line {i} {'x' * 60}")
    assert log.lines(mark)[-1].startswith("init.cc:7 line 19999 x")
    assert os.fstat(log._descriptor).st_blocks * 512 < 1 << 16
    native.write("after")
    assert log.lines() == ["init.cc:7 after"]


def test_of_several_causes_the_special_one_is_named():
    for words, expected in (
        ("Call to ibv_modify_qp failed with 110 Connection timed out, on dev mlx5_0:1", "NCCL_CROSS_NIC"),
        ("NET/IB : Got completion with error 12, opcode 0, len 0, vendor err 129", "ib_write_bw"),
        ("NET/IB: Got completion with error 4, opcode 1, len 21938, vendor err 81", "nvidia-peermem"),
        ("unlink shared memory /dev/shm/nccl-d5rTd0 failed, error: No such file or directory", "RemoveIPC"),
        ("Error: failed to extend /dev/shm/nccl-03v824 to 4194660 bytes", "--shm-size"),
        ("Cuda failure 'system not yet initialized'", "nvidia-fabricmanager"),
        ("transport/nvls.cc:598 Cuda failure 1 'invalid argument'", "NCCL_NVLS_ENABLE=0"),
        (
            "Cuda failure 'CUDA driver version is insufficient for CUDA runtime'",
            "no usable GPU driver",
        ),
        ("socketProgress: Connection closed by remote peer dgxh100-3<41109>", "another rank died"),
        ("peer 1 message truncated : receiving 8 bytes instead of 4", "different sizes"),
        ('Missing "iommu=pt" from kernel command line which can lead to system instablity', "iommu=pt"),
        ("Bootstrap : no socket interface found", "NCCL_SOCKET_IFNAME"),
        ("Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000", "give each its own"),
    ):
        assert expected in causes.known_cause(words), words
    assert causes.cure(2, "nothing that is known").startswith("a system call failed")
    assert "firewalls" in causes.cure(2, "", "Connection refused")
    assert causes.known_cause("") == ""


def test_the_catalogue_has_no_entry_that_an_earlier_one_hides():
    cures = [cure for _, cure in causes.CATALOGUE]
    assert len(set(cures)) == len(cures)


def test_a_lost_peer_of_which_nothing_is_known_stays_one(mock_nccl, raised):
    def absent(comm: Communicator, over: threading.Event) -> None:
        assert c_of(comm).mock_inject_error(handle(comm), 0) == 0

    def waits(comm: Communicator) -> None:
        work = comm.all_reduce(torch.ones(4), SUM, True)
        assert c_of(comm).mock_inject_error(handle(comm), 6) == 0
        work.wait_blocking()

    error = pair(mock_nccl, waits, absent, raised)
    assert (type(error), error.culprits) == (PeerLostError, ())
