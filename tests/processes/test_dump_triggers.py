"""Dumps without being asked by the program: on a timeout, on a lost peer, on an exception, on a signal."""

import json
import os
import pickle
import signal
import time

import pytest

pytestmark = pytest.mark.processes

VICTIM = 2


def settings(folder, **more):
    return {"UNICOMM_TRACE_DUMP": str(folder)} | {f"UNICOMM_TRACE_DUMP_{k}": v for k, v in more.items()}


@pytest.mark.parametrize(("number", "timeout"), [(signal.SIGKILL, 60), (signal.SIGSTOP, 2)])
def test_when_a_communicator_breaks(start, tmp_path, number, timeout):
    """A killed rank writes nothing; those who notice do. A stopped one writes when it goes on."""
    folder = tmp_path / "dumps"
    job = start("faults.py", 4, "collective", VICTIM, "SIGKILL", timeout, settings=settings(folder))
    job.next("ready")
    job[VICTIM].signal(number)
    for other in job.but(VICTIM):
        other.tell()
    for other in job.but(VICTIM):
        other.next("calling")
        other.next("error")
        other.next("finalized")
    assert sorted(path.name for path in folder.iterdir()) == ["rank_0", "rank_1", "rank_3"]
    for path in folder.iterdir():
        last = pickle.loads(path.read_bytes())["entries"][-1]
        assert last["collective_seq_id"] == 2
        assert last["state"] == "started"
        assert last["frames"][0]["filename"] == str(job.script)
    if number == signal.SIGSTOP:
        job[VICTIM].signal(signal.SIGCONT)
        job[VICTIM].tell()
        job[VICTIM].next("calling")
        job[VICTIM].next("error")
        assert (folder / f"rank_{VICTIM}").exists()


def test_when_an_exception_ends_the_program(start, tmp_path):
    job = start("exits.py", 2, "raises", settings=settings(tmp_path / "dumps", FORMAT="json"))
    job.next("ready")
    assert job.end() == [1, 1]
    for rank in (0, 1):
        trace = json.loads((tmp_path / "dumps" / f"rank_{rank}.json").read_text())
        assert [entry["state"] for entry in trace["entries"]] == ["completed"]
        assert "a mistake of the program" in job[rank].complaints


def test_a_signal_to_a_rank_that_hangs(start, tmp_path):
    """The main thread is inside of the native core and runs no Python."""
    folder = tmp_path / "dumps"
    job = start("faults.py", 4, "collective", VICTIM, "SIGKILL", 60, settings=settings(folder, SIGNAL="1"))
    job.next("ready")
    for other in job.but(VICTIM):
        other.tell()
    for other in job.but(VICTIM):
        other.next("calling")
    deadline = time.monotonic() + 200
    for rank in range(4):
        path, seq = folder / f"rank_{rank}", 0
        wanted = 1 if rank == VICTIM else 2
        while seq != wanted:  # a signal may come before the call
            path.unlink(missing_ok=True)
            job[rank].signal(signal.SIGUSR2)
            while not path.exists():
                assert time.monotonic() < deadline
                os.sched_yield()
            seq = pickle.loads(path.read_bytes())["entries"][-1]["collective_seq_id"]
    job[VICTIM].tell()
    for rank in job.ranks:
        if rank.rank == VICTIM:
            rank.next("calling")
        rank.next("done")
        rank.next("finalized")
    assert job.end() == [0, 0, 0, 0]


def test_without_the_variable_the_signal_does_what_it_always_did(start, tmp_path):
    job = start("faults.py", 2, "collective", 1, "SIGKILL", 60, settings=settings(tmp_path / "dumps"))
    job.next("ready")
    job[1].signal(signal.SIGUSR2)
    assert job[1].end() == -signal.SIGUSR2
