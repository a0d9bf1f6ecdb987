"""One of four ranks is killed: the others know within two seconds who it was, and nothing is left behind.

It may take longer where cores have more to run.
"""

import signal
import sys
import time

import pytest

from tests.commands import clean_environment
from tests.processes.forked_interpreters import run
from tests.processes.waits import slowdown
from unicomm.comms.membership.processes import status

pytestmark = pytest.mark.processes

VICTIM = 2
SOON = 2.0  # seconds from the kill to the errors
TIMEOUT = 4.0  # seconds in which creations fail


def check_errors(job, killed_at):
    for survivor in job.but(VICTIM):
        error = survivor.next("error")
        assert error["type"] == "PeerLostError"
        assert error["culprits"] == [VICTIM], error
        assert f"rank {VICTIM} is gone" in error["text"]
        assert error["rank"] == survivor.rank
        assert error["at"] - killed_at < SOON * slowdown()


def check_nothing_is_left(job, rings):
    for survivor in job.but(VICTIM):
        said = survivor.next("finalized")
        assert said["after"] == said["before"]
    assert job.end() == [-signal.SIGKILL if process.rank == VICTIM else 0 for process in job.ranks]
    left = [path for path in rings.rglob("*") if path.is_file()]
    assert sorted(path.suffix for path in left) == [".ending", ".stacks", ".ucring"], left
    assert all(str(job[VICTIM].pid) in path.name for path in left)


@pytest.mark.parametrize("moment", ["collective", "p2p", "asynchronous"])
def test_while_the_others_wait(start, rings, moment):
    job = start("faults.py", 4, moment, VICTIM, "SIGKILL", 60)
    for said in job.next("ready"):
        assert said["memfd"]  # so that its absence later means something
        assert said["dev_shm"] == []
    for survivor in job.but(VICTIM):
        survivor.tell()
    for survivor in job.but(VICTIM):
        survivor.next("calling")
    killed_at = time.monotonic()  # the ranks use this clock, too
    job[VICTIM].signal(signal.SIGKILL)
    check_errors(job, killed_at)
    check_nothing_is_left(job, rings)


def test_between_two_collectives(start, rings):
    job = start("faults.py", 4, "collective", VICTIM, "SIGKILL", 60)
    job.next("ready")
    job[VICTIM].signal(signal.SIGKILL)
    job[VICTIM].end()
    for survivor in job.but(VICTIM):
        survivor.tell()
    called_at = max(survivor.next("calling")["at"] for survivor in job.but(VICTIM))
    check_errors(job, called_at)
    check_nothing_is_left(job, rings)


def test_in_the_middle_of_a_transfer(start, rings):
    job = start("faults.py", 4, "transfer", VICTIM, "SIGKILL", 60)
    job.next("ready")
    killed_at = job[VICTIM].next("struck")["at"]
    check_errors(job, killed_at)
    for survivor in job.but(VICTIM):
        assert survivor.next("tensor")["last"] == 2.0  # it never got there
    check_nothing_is_left(job, rings)

    # What the dead rank was doing can be read from its ring.
    source = job.script.read_text().splitlines()
    line = next(i for i, text in enumerate(source, 1) if "the line that the recorder has to show" in text)
    shown = run(
        [sys.executable, "-m", "unicomm", "trace", "show", str(rings)],
        env=clean_environment() | {"COLUMNS": "250"},
        check=True,
    ).stdout
    rows = [row for row in shown.splitlines() if f"faults.py:{line}" in row]
    assert len(rows) == 1, shown
    assert "all_reduce" in rows[0]
    assert "float32" in rows[0]


def test_who_calls_late_hears_of_the_victim_and_not_of_those_who_left_because_of_it(start):
    job = start("faults.py", 4, "collective", VICTIM, "SIGKILL", 60)
    job.next("ready")
    job[VICTIM].signal(signal.SIGKILL)
    job[VICTIM].end()
    for survivor in job.but(VICTIM):
        survivor.tell()
        survivor.next("calling")
        error = survivor.next("error")
        assert error["type"] == "PeerLostError"
        assert error["culprits"] == [VICTIM], error
        survivor.next("finalized")
        assert survivor.end() == 0


OPERATIONS = [
    *("barrier", "all_reduce", "queued", "broadcast", "reduce", "all_gather", "gather", "scatter"),
    *("all_gather_single", "reduce_scatter_single", "all_to_all_single"),
    *("receives", "sends", "batch", "signal", "window_barrier"),
]


def asleep(process):
    """Whether the main thread of the process sleeps: it waits for others, and has done what it could."""
    return status(process.pid)[0] == "S"


def wait_until(condition, job):
    end = time.monotonic() + 20
    while not condition():
        states = [status(process.pid)[0] for process in job.ranks]
        assert time.monotonic() < end, f"the ranks are in these states: {states}\n{job}"
        time.sleep(0.01)


def check_first_error(survivor, victim):
    error = survivor.next("error")
    assert (error["type"], error["culprits"]) == ("PeerLostError", [victim]), error
    assert f"rank {victim} is gone" in error["text"]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_after_its_part_while_another_rank_is_missing(start, operation):
    """Rank 0 waits for rank 2 alone when rank 1 dies; its deadline is far beyond that of this test."""
    job = start("contributed.py", 3, operation)
    job.next("ready")
    job[0].next("calling")
    job[1].next("calling")
    wait_until(lambda: asleep(job[0]) and asleep(job[1]), job)
    job[1].signal(signal.SIGKILL)
    check_first_error(job[0], 1)
    job[2].tell()
    job[2].next("calling")
    check_first_error(job[2], 1)
    assert job.end() == [0, -signal.SIGKILL, 0]


STOPS = ["all_reduce", "broadcast", "all_gather_single", "all_to_all_single"]


@pytest.mark.parametrize("operation", STOPS)
def test_after_its_part_in_a_later_round(start, operation):
    """Rank 2 is stopped in the midst of the data, and alive: it is not the one that is lost."""
    job = start("contributed.py", 3, f"{operation}_stops")
    job.next("ready")
    job.next("calling")
    wait_until(lambda: status(job[2].pid)[0] == "T", job)
    wait_until(lambda: asleep(job[0]) and asleep(job[1]), job)
    job[1].signal(signal.SIGKILL)
    check_first_error(job[0], 1)
    job[2].signal(signal.SIGCONT)
    check_first_error(job[2], 1)
    assert job.end() == [0, -signal.SIGKILL, 0]


def test_after_its_message_has_arrived(start):
    """As on gloo: whoever waits in a communicator of a dead rank is told, whatever it waits for."""
    job = start("contributed.py", 3, "sent")
    job.next("ready")
    job[1].next("calling")
    job[1].next("sent")
    job[0].next("calling")
    job[1].signal(signal.SIGKILL)
    check_first_error(job[0], 1)
    job[2].tell()
    job[2].next("calling")
    check_first_error(job[2], 1)


@pytest.mark.parametrize("backend", ["gloo", "tcp", "ucx"])
@pytest.mark.parametrize("moment", ["collective", "p2p", "asynchronous"])
def test_over_messages(start, rings, moment, backend):
    job = start("faults.py", 4, moment, VICTIM, "SIGKILL", 60, backend)
    job.next("ready")
    for survivor in job.but(VICTIM):
        survivor.tell()
    for survivor in job.but(VICTIM):
        survivor.next("calling")
    killed_at = time.monotonic()
    job[VICTIM].signal(signal.SIGKILL)
    check_errors(job, killed_at)
    check_nothing_is_left(job, rings)


@pytest.mark.parametrize("backend", ["gloo", "tcp"])
def test_while_chunks_in_a_wire_format_travel(start, rings, backend):
    job = start("faults.py", 4, "encoded", VICTIM, "SIGKILL", 60, backend)
    job.next("ready")
    killed_at = job[VICTIM].next("struck")["at"]
    check_errors(job, killed_at)
    for survivor in job.but(VICTIM):
        assert survivor.next("tensor")["last"] == 2.0
    check_nothing_is_left(job, rings)


@pytest.mark.parametrize("moment", ["before", "inside"])
def test_during_creation(start, rings, moment):
    """Nobody can know the process of a rank that has not come: the others learn at the deadline of one.

    If it has come, they look for it, and learn long before a deadline.
    """
    last = 3 if moment == "before" else -1
    job = start("creation.py", 4, "killed", moment, VICTIM, last, TIMEOUT)
    job.next("here")
    if moment == "before":
        job[VICTIM].signal(signal.SIGKILL)
        job[VICTIM].end()
    else:
        job[VICTIM].tell()
    for survivor in job.but(VICTIM, last):
        survivor.tell()
    for survivor in job.but(VICTIM, last):
        survivor.next("came")
    if moment == "before":
        job[last].tell()
        job[last].next("came")
    errors = {survivor.rank: survivor.next("error") for survivor in job.but(VICTIM)}
    for survivor in job.but(VICTIM):
        error = errors[survivor.rank]
        assert error["culprits"] == [VICTIM]
        if moment == "before":
            assert error["type"] == "CommTimeoutError"
            assert f"rank {VICTIM} did not" in error["text"]
            assert "ranks 0-1, 3 did" in error["text"]
            assert error["at"] - errors[last]["began"] < TIMEOUT + SOON * slowdown()
        else:
            assert error["type"] == "PeerLostError"
            assert f"rank {VICTIM} is gone: the process has ended" in error["text"]
            assert error["at"] - error["began"] < TIMEOUT * slowdown()
        said = survivor.next("failed")
        assert said["after"] == said["before"]
    assert job.end() == [-signal.SIGKILL if process.rank == VICTIM else 0 for process in job.ranks]
    assert all(str(job[VICTIM].pid) in path.name for path in rings.rglob("*.ucring"))


def test_before_the_memory_that_it_offers_was_opened(start):
    """Its descriptors, by which the others open it, are gone before its end can be seen."""
    job = start("offered.py", 2)
    job.next("ready")
    time.sleep(0.5)  # rank 0 waits in the gather by then; if not, its end is noticed as usual
    job[0].signal(signal.SIGKILL)
    assert job[0].end() == -signal.SIGKILL
    job[1].tell()
    error = job[1].next("error")
    assert (error["type"], error["culprits"]) == ("PeerLostError", [0]), error
    assert job[1].end() == 0
