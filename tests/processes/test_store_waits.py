"""Stores and peers that do not answer: all calls end by their own deadline and name who is to blame."""

import signal
import socket
import time

import pytest

from tests.ports import free_port
from tests.processes.waits import seconds_waited

pytestmark = pytest.mark.processes

HOST = 0  # the rank that holds the store


def hosted(size, address="127.0.0.1", port=None):
    """Environments of ranks of which the first one holds the store."""
    port = port or free_port()
    return [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }
        for rank in range(size)
    ]


@pytest.mark.parametrize(
    "call",
    ["new_comm", "split", "new_group", "symm_mem.rendezvous", "reconfigure", "reconfigure inside"],
)
def test_the_stores_host_is_stopped(start, call):
    job = start("store_waits.py", None, "stopped", call, environments=hosted(3))
    job.next("here")
    if call.startswith("reconfigure"):
        job.tell(" ".join(said["handle"] for said in job.next("handle")))
    job.next("ready")
    if call != "reconfigure inside":  # where it stops itself, having invited the others
        job[HOST].signal(signal.SIGSTOP)
    for other in job.but(HOST):
        other.tell()
    for other in job.but(HOST):
        error = other.next("error")
        assert error["type"] == "CommTimeoutError", error
        assert error["culprits"] == [HOST]
        # Not so long as a request to the store, or its connection, waits by itself.
        assert 1 <= error["share"] < 2
        if call != "reconfigure":  # where the ranks have not met in the store of the attempt yet
            assert "rank 0, which holds the store" in error["text"]
        other.next("finalized")
    assert [other.end() for other in job.but(HOST)] == [0, 0]  # with a request that is still under way


def test_an_answer_that_comes_when_the_interpreter_ends(start):
    job = start("store_waits.py", None, "end", environments=hosted(2))
    job.next("here")
    job.tell()
    pid = job.next("ready")[HOST]["pid"]
    job[HOST].signal(signal.SIGSTOP)
    job[1].tell()
    job[1].next("error")
    job[1].next("finalized")
    job[1].tell(str(pid))
    assert job[1].end() == 0


def error_of_connecting(start, how, environments):
    """What a single rank says that cannot reach its store: a timeout that names the store's host."""
    job = start("store_waits.py", None, "connect", how, environments=environments)
    job.next("here")
    job.tell()
    (error,) = job.next("error")
    assert error["type"] == "CommTimeoutError"
    assert error["culprits"] == [HOST]
    assert job.end() == [0]
    return error


@pytest.mark.parametrize("how", ["new_comm", "init_process_group", "unicomm"])
def test_a_listener_that_answers_nothing(start, how):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        environments = hosted(2, port=listener.getsockname()[1])[1:]
        error = error_of_connecting(start, how, environments)
    assert "did not answer at 127.0.0.1:" in error["text"]
    assert 1 <= error["share"] < 2


@pytest.mark.parametrize("how", ["new_comm", "init_process_group", "unicomm"])
def test_a_host_that_the_name_service_does_not_know(start, how):
    environments = hosted(2, address="no-such-host.invalid")[1:]
    error = error_of_connecting(start, how, environments)
    assert "'no-such-host.invalid' has no address" in error["text"]
    assert error["share"] < 2


@pytest.mark.parametrize("where", ["posted", "arrived", "exchange"])
def test_a_rank_is_killed_during_new_comm(start, where):
    """Ranks 0 and 1 come; rank 2 does not, so that nothing but the end of rank 1 ends the wait."""
    job = start("store_waits.py", 3, "halt", where, "SIGKILL")
    job.next("here")
    for rank in (0, 1) if where == "posted" else (0, 2):
        job[rank].tell()
    if where != "posted":  # the last to come dies, whoever else waits
        job[1].tell()
    assert job[1].end() == -signal.SIGKILL
    known = time.monotonic()
    for rank in (0,) if where == "posted" else (0, 2):
        error = job[rank].next("error")
        assert error["type"] == "PeerLostError"
        assert error["culprits"] == [1]
        assert error["share"] < 0.3
        assert seconds_waited(error, known) < 2


@pytest.mark.parametrize("where", ["posted", "arrived"])
def test_a_rank_is_stopped_during_new_comm(start, where):
    job = start("store_waits.py", 3, "halt", where, "SIGSTOP")
    job.next("here")
    job.tell()
    for rank in (0, 2):
        error = job[rank].next("error")
        assert error["type"] == "CommTimeoutError"
        assert error["culprits"] == [1], error
        assert "rank 1 stopped before it could answer" in error["text"] or where == "arrived"
    job[1].signal(signal.SIGCONT)
    assert job[1].next("error")["culprits"] == [1]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("order", "ranks is '[2, 1, 0]' on "),
        ("list", "ranks is '[0, 1]' on "),
        ("split name", "name is 'odd' on "),
        ("name", "name is 'odd' on "),
        ("size", "size is 4 on "),
    ],
)
def test_calls_that_differ(start, what, words):
    job = start("store_waits.py", 3, "differing", what)
    job.next("here")
    job.tell()
    job.next("ready")
    for rank in (0, 2, 1):  # the one that differs is the last to come
        job[rank].tell()
    errors = job.next("error")
    known = max(error["came"] for error in errors)
    for error in errors:
        assert error["type"] == "MismatchError"
        assert error["culprits"] == [1]
        assert words in error["text"]
        assert error["share"] < 0.3
        assert seconds_waited(error, known) < 4
    job.next("waits again")
    job.next("works")
    assert job.end() == [0, 0, 0]


def test_calls_in_another_order_that_other_threads_may_still_make(start):
    job = start("store_waits.py", 2, "differing", "other thread")
    job.next("here")
    job.tell()
    job.next("ready")
    job.tell()
    job.next("looked")  # several looks of each found the other one waiting elsewhere, without an error
    job[1].tell()
    job.next("done")
    job.next("both")
    assert job.end() == [0, 0]
