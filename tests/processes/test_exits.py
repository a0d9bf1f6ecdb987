"""Ranks that end without finalize, in every way: what the others see, exit codes, and which rings stay."""

import signal
import time

import pytest

pytestmark = pytest.mark.processes


def ring_pids(rings):
    """Pids of the processes whose rings are there."""
    return sorted(int(path.name.split("-")[-2]) for path in rings.glob("*.ucring"))


@pytest.mark.parametrize("backend", ["shm", "gloo", "tcp"])
def test_forgetting_finalize_is_no_mistake(start, rings, backend):
    job = start("exits.py", 3, "forgets", backend)
    assert job.end() == [0, 0, 0]
    assert not any(process.complaints for process in job.ranks)
    assert ring_pids(rings) == []


@pytest.mark.parametrize("backend", ["shm", "gloo", "tcp"])
def test_a_rank_that_ends_early(start, backend):
    job = start("exits.py", 3, "early", backend)
    job.next("ready")
    for other in job.but(1):
        other.tell()
    job[1].tell()
    for other in job.but(1):
        error = other.next("error")
        assert error["type"] == "PeerLostError"
        if backend == "shm":  # TCP does not tell whose connection is gone
            assert error["culprits"] == [1]
            assert "rank 1" in error["text"]
    assert job.end() == [0, 0, 0]


def test_a_rank_that_vanishes(start, rings):
    """os._exit runs no handlers: for the others that is a death, and the ring stays."""
    job = start("exits.py", 3, "vanishes")
    job.next("ready")
    job[1].tell()
    assert job[1].end() == 3
    for other in job.but(1):
        other.tell()
        error = other.next("error")
        assert error["type"] == "PeerLostError"
        assert error["culprits"] == [1]
        assert "is gone" in error["text"]
    assert job.end() == [0, 3, 0]
    assert ring_pids(rings) == [job[1].pid]


def test_an_error_of_the_program(start, rings):
    job = start("exits.py", 2, "raises")
    assert job.end() == [1, 1]
    for process in job.ranks:
        assert "a mistake of the program" in process.complaints
    assert ring_pids(rings) == sorted(process.pid for process in job.ranks)


def test_an_error_that_the_program_handles(start, rings):
    job = start("exits.py", 2, "catches")
    job.next("ready")
    job.next("caught")
    assert job.end() == [0, 0]
    assert ring_pids(rings) == []


def test_pending_work_does_not_keep_a_process(start):
    job = start("exits.py", 2, "pending")
    job.next("ready")
    began = time.monotonic()
    assert job[0].end(within=20) == 0
    assert time.monotonic() - began < 15
    job[1].tell()
    assert job[1].end() == 0


def test_a_send_that_was_on_its_way_arrives(start):
    job = start("exits.py", 2, "buffered")
    job.next("ready")
    assert job[0].end() == 0
    job[1].tell()
    assert job[1].next("received")["right"]
    assert job.end() == [0, 0]


@pytest.mark.parametrize(
    ("keep", "scenario", "kept"),
    [
        ("always", "clean", True),
        ("always", "raises", True),
        ("failure", "clean", False),
        ("failure", "raises", True),
        ("never", "clean", False),
        ("never", "raises", False),
    ],
)
def test_what_is_kept(start, rings, keep, scenario, kept):
    job = start("exits.py", 2, scenario, settings={"UNICOMM_TRACE_KEEP": keep})
    assert job.end() == ([0, 0] if scenario == "clean" else [1, 1])
    assert ring_pids(rings) == (sorted(process.pid for process in job.ranks) if kept else [])


def test_a_kill_leaves_the_ring_whatever_was_set(start, rings):
    job = start("exits.py", 2, "early", settings={"UNICOMM_TRACE_KEEP": "never"})
    job.next("ready")
    job[1].signal(signal.SIGKILL)
    assert job[1].end() == -signal.SIGKILL
    job[0].tell()
    assert job[0].next("error")["culprits"] == [1]
    assert job[0].end() == 0
    assert ring_pids(rings) == [job[1].pid]
