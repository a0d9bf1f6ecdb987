"""Ranks that come late, never, or have left: who is named, where, and when."""

from __future__ import annotations

import json
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch

from tests.commands import clean_environment
from tests.comms.calls import COLLECTIVES, call, check_sum
from tests.eventually import eventually
from tests.in_operation import in_operation
from tests.processes.forked_interpreters import run
from unicomm import CommTimeoutError, Communicator, PeerLostError, ReduceOp
from unicomm.backends.out_of_band.user_frame import where_is
from unicomm.c10d.process_group import UnicommProcessGroup
from unicomm.testing import run_ranks

SUM = ReduceOp.SUM
SHORT = 0.05  # seconds
SOON = 20.0  # what a loaded machine may take on top; a wait that does not end takes the communicator's 60
LARGE = 2_000_000  # elements of a message that does not fit into the transport's own memory


@pytest.fixture(params=["shm", "gloo", "tcp"])
def backend(request):
    return request.param


def absent(n: int, missing: list[int], raised, name: str = "all_reduce", backend: str = "shm") -> None:
    """Ranks `missing` stay away from an operation until the others have given up, and come then.

    The last of the others has the short timeout. It calls when the rest wait, and takes them along.
    """
    present = [rank for rank in range(n) if rank not in missing]
    comms: dict[int, Communicator] = {}
    threads: dict[int, int] = {}
    gave_up = threading.Barrier(n - len(missing) + 1, timeout=60)
    known = threading.Event()
    together = threading.Barrier(n, timeout=60)  # a rank that has not left the sum yet is late, not absent
    waiting_at = 0  # the line where the missing are
    began = 0.0  # when the last of the present ranks called

    def place() -> str:
        return f"{__file__}:{waiting_at} in program"

    def program(comm: Communicator) -> None:
        check_sum(comm)
        me = comm.get_rank()
        comms[me], threads[me] = comm, threading.get_ident()
        together.wait()
        nonlocal waiting_at, began
        if me in missing:
            waiting_at = sys._getframe().f_lineno + 1
            assert known.wait(60)
            error = raised(call(comm, name).issue, False)
        else:
            operation, timeout = call(comm, name), None
            if me == present[-1]:
                eventually(lambda: all(in_operation(comms[rank]) for rank in present[:-1]))
                eventually(lambda: {where_is(threads[rank]) for rank in missing} == {place()})
                began, timeout = time.monotonic(), SHORT
            error = raised(operation.issue, False, timeout=timeout)
            assert SHORT <= time.monotonic() - began < SHORT + SOON
            gave_up.wait()
        assert type(error) is CommTimeoutError, repr(error)
        assert (error.op, error.comm, error.seq, error.rank) == (name, "ranks", 2, me)
        if backend == "shm":
            assert error.culprits == tuple(missing)
            # One that comes after all may find itself late.
            if me in missing:
                assert {*error.absent, *error.late} == {*missing}
            else:
                assert error.absent == error.culprits
            for rank in error.culprits if me not in missing else ():
                assert f"rank {rank} was last in all_reduce #1 (" in error.message
            assert "calls.py:" in error.message  # whose check_sum called it
        else:
            assert error.culprits == error.absent == tuple(missing)
            assert (place() if me not in missing else "is at") in error.message
        assert "had not arrived" in error.message
        assert error.hint
        assert comm.is_aborted()
        for later in (comm.barrier, lambda a: comm.recv(torch.ones(1), (me + 1) % n, a)):
            again = raised(later, False)
            assert type(again) is CommTimeoutError
            assert again.message == f"broken earlier: {error.message}"
            assert again.culprits == error.culprits

    def release() -> None:
        gave_up.wait()
        known.set()

    releasing = threading.Thread(target=release, daemon=True)
    releasing.start()
    run_ranks(program, n, backend=backend, timeout=60)


@pytest.mark.parametrize(
    ("n", "missing"), [(2, [1]), (2, [0]), (3, [1]), (4, [3]), (4, [1, 2]), (4, [0, 2, 3])]
)
def test_absent_ranks_are_named_and_told_when_they_come(n, missing, backend, raised):
    absent(n, missing, raised, backend=backend)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_in_every_collective(name, backend, raised):
    absent(3, [2], raised, name, backend)


def test_who_gives_up_takes_the_others_along(backend, raised):
    """A rank that would wait longer is told at once, with the same culprits; so is one in a message."""
    over = threading.Event()
    comms: dict[int, Communicator] = {}
    began = 0.0  # when rank 0 called

    def program(comm: Communicator) -> None:
        nonlocal began
        me = comm.get_rank()
        comms[me] = comm
        if me >= 3:
            assert over.wait(60)
            return
        if me == 0:
            eventually(lambda: all(rank in comms and in_operation(comms[rank]) for rank in (1, 2)))
            began = time.monotonic()
        if me == 2:
            error = raised(comm.recv, torch.ones(1), 1, False)  # rank 1 is no culprit, and would never send
            assert error.culprits == (2, 3, 4)
        else:
            error = raised(comm.barrier, False, timeout=SHORT if me == 0 else 50)
            assert error.culprits == (2, 3, 4)
            if backend == "gloo":
                assert error.late == (2,)  # it waits in an operation, not in this one
                assert error.absent == (3, 4)
        assert type(error) is CommTimeoutError
        assert time.monotonic() - began < SHORT + SOON
        if me == 1:
            over.set()

    run_ranks(program, 5, backend=backend, timeout=60)


def test_a_timeout_for_one_operation(backend, raised):
    """It replaces the communicator's, in both directions, and counts from the operation's start."""
    come, over = threading.Event(), threading.Event()

    def program(comm: Communicator) -> None:
        comm.set_timeout(timedelta(seconds=SHORT))
        assert comm.get_timeout() == SHORT
        x = torch.ones(3)
        if comm.get_rank() == 1:
            assert come.wait(60)
            comm.all_reduce(x, SUM, True, timeout=60).wait()
            comm.all_reduce(x, SUM, True, timeout=60).wait()
            assert over.wait(60)
            return
        first = comm.all_reduce(x, SUM, True, timeout=60)
        queued = comm.all_reduce(x, SUM, True, timeout=2 * SOON)
        assert type(raised(queued.wait, 4 * SHORT)) is CommTimeoutError  # of this wait; the operation goes on
        come.set()
        queued.wait()
        first.wait()
        assert x.tolist() == [4.0] * 3
        for zero in (None, 0, timedelta(0)):  # all mean the communicator's own
            began = time.monotonic()
            error = raised(comm.barrier, False, timeout=zero)
            assert type(error) is CommTimeoutError
            assert time.monotonic() - began < SOON
        assert error.seq == 3
        over.set()

    run_ranks(program, 2, backend=backend, timeout=60)


def test_set_timeout(backend, raised):
    """For this rank's later operations, whichever way they go."""
    over = threading.Event()

    def program(comm: Communicator) -> None:
        assert comm.get_timeout() == comm.get_options().timeout == 60
        check_sum(comm)
        if comm.get_rank() == 1:
            assert over.wait(60)
            return
        comm.set_timeout(SHORT)
        began = time.monotonic()
        error = raised(comm.barrier, False)
        assert time.monotonic() - began < SOON
        assert error.message.startswith(f"timed out after {SHORT:g} s: rank 1 had not arrived")
        comm.set_timeout(None)
        assert comm.get_timeout() == SHORT
        comm.set_timeout(float("inf"))
        assert comm.get_timeout() >= 1e8
        over.set()

    run_ranks(program, 2, backend=backend, timeout=60)


@pytest.mark.parametrize("long", [86400.0 * 60, 1e12, float("inf"), timedelta(days=10000)])
def test_very_long_timeouts(long, backend):
    def program(comm: Communicator) -> None:
        comm.barrier(False, timeout=long)
        comm.barrier(True, timeout=long).wait(long)
        if comm.get_rank() == 0:
            comm.send(torch.ones(1), 1, False, timeout=long)
        else:
            comm.recv(torch.ones(1), 0, False, timeout=long)
        comm.set_timeout(long)
        check_sum(comm)
        comm.finalize(long)

    run_ranks(program, 2, backend=backend)


# --- messages ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["recv", "large send", "batch"])
def test_messages_that_nobody_answers(kind, backend, raised):
    over = threading.Event()

    def program(comm: Communicator) -> None:
        me = comm.get_rank()
        if me == 2 and kind == "batch":
            comm.send(torch.ones(1), 0, False)
        if me > 0:
            assert over.wait(60)
            return
        began = time.monotonic()
        if kind == "recv":
            error = raised(comm.recv, torch.ones(1), 1, False, timeout=SHORT)
        elif kind == "large send":
            error = raised(comm.send, torch.ones(LARGE), 1, False, timeout=SHORT)
        else:
            got = torch.zeros(1)
            batch = comm.batch_op_create().recv(torch.ones(1), 1).recv(got, 2).send(torch.ones(1), 1)
            error = raised(batch.issue, False, timeout=SHORT)
            assert got.item() == 1
        assert type(error) is CommTimeoutError
        assert error.culprits == (1,)
        assert error.op == kind.rpartition(" ")[2]
        assert time.monotonic() - began < SHORT + SOON
        over.set()

    run_ranks(program, 3, backend=backend, timeout=60)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_queued_message_tells_the_timeout_that_was_given(backend, raised):
    """Not what was left of it when the wait began."""
    over = threading.Event()

    def program(comm: Communicator) -> None:
        comm.barrier(False)
        if comm.get_rank() > 0:
            assert over.wait(60)
            return
        comm.set_timeout(5 * SHORT)
        receiving = UnicommProcessGroup(comm).recv([torch.zeros(1)], 1, 0)
        threading.Event().wait(SHORT)  # some of the time passes before anybody waits
        error = raised(receiving.wait)
        over.set()
        assert type(error) is CommTimeoutError
        assert error.message.startswith(f"timed out after {5 * SHORT:g} s: rank 1 "), error

    run_ranks(program, 2, backend=backend, timeout=60)


# --- ranks that have left ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["barrier", "all_reduce", "recv", "send", "large send", "batch"])
def test_a_rank_that_has_finalized(kind, backend, raised):
    left = threading.Event()

    def program(comm: Communicator) -> None:
        me = comm.get_rank()
        check_sum(comm)
        if me == 2:
            comm.finalize()
            left.set()
            return
        if me == 0:
            assert left.wait(60)
        other = {
            "barrier": lambda: comm.barrier(False),
            "all_reduce": lambda: comm.all_reduce(torch.ones(70001), SUM, False),
            "recv": lambda: comm.recv(torch.ones(1), 2, False),
            "send": lambda: comm.send(torch.ones(1), 2, False),
            "large send": lambda: comm.send(torch.ones(LARGE), 2, False),
            "batch": lambda: comm.batch_op_create().recv(torch.ones(1), 2).issue(False),
        }[kind]
        if kind == "send":
            assert left.wait(60)
            if backend != "shm":  # the system takes a small message until this rank has heard of the end
                eventually(lambda: 2 in comm.unsafe_backend.channel._left)
        began = time.monotonic()
        error = raised(other)
        assert type(error) is PeerLostError, repr(error)
        assert error.culprits == (2,)
        assert error.message == "rank 2 has finalized this communicator"
        assert time.monotonic() - began < SOON
        assert type(raised(comm.barrier, False)) is PeerLostError

    run_ranks(program, 3, backend=backend, timeout=60)


def test_what_was_sent_before_finalize_arrives():
    left = threading.Event()

    def program(comm: Communicator) -> list[float]:
        x = torch.zeros(3)
        if comm.get_rank() == 0:
            comm.send(torch.ones(3), 1, False)
            comm.finalize()
            left.set()
        else:
            assert left.wait(60)
            comm.recv(x, 0, False)
        return x.tolist()

    assert run_ranks(program, 2)[1] == [1.0] * 3


@pytest.mark.processes
def test_ending_the_process_instead(tmp_path):
    """`abort_process_on_timeout_or_error` ends the process by SIGABRT, and says why."""
    program = """
import threading, torch, unicomm
from torch._C._distributed_c10d import HashStore
store = HashStore()
def rank(r):
    comm = unicomm.new_comm("shm", "cpu", rank=r, size=2, store=store, abort_process_on_timeout_or_error=True)
    assert comm.get_options().abort_process_on_timeout_or_error
    if r == 0:
        comm.barrier(False, timeout=0.05)
        print("came back")
    else:
        threading.Event().wait(60)
threads = [threading.Thread(target=rank, args=(r,)) for r in (0, 1)]
[t.start() for t in threads]
"""
    done = run(
        [sys.executable, "-c", program], env=clean_environment() | {"UNICOMM_TRACE_DIR": str(tmp_path)}
    )
    assert done.returncode == -6, done.stderr
    [ending] = tmp_path.glob("*.ending")
    raised = json.loads(ending.read_text())["raised"]
    assert (raised["type"], raised["consequence"]) == ("CommTimeoutError", True)  # it is no crash of its own
    assert "timed out after 0.05 s: rank 1 had not arrived" in done.stderr
    assert "came back" not in done.stdout
