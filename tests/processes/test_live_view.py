"""`unicomm trace top` on four ranks of which one is stopped or killed: names the rank, operation and line."""

import json
import os
import select
import signal
import subprocess
import sys
import time

import pytest

from tests.commands import clean_environment
from tests.processes.forked_interpreters import run
from tests.processes.waits import slowdown

pytestmark = pytest.mark.processes

VICTIM = 2
KEEP = {"UNICOMM_TRACE_KEEP": "always"}  # the survivors of a killed rank catch their error and end well
SOON = 5.0  # seconds from the fault to its name on the screen, where cores have nothing else to run


def top(rings, *options):
    """The output of `unicomm trace top`."""
    done = run(
        [sys.executable, "-m", "unicomm", "trace", "top", str(rings), *options],
        env=clean_environment() | {"COLUMNS": "250"},
        check=True,
    )
    return done.stdout


def shown(rings, until):
    """What `top` says as soon as `until(job)` holds, and the time."""
    deadline = time.monotonic() + 30
    while True:
        [job] = json.loads(top(rings, "--json"))["jobs"]
        if until(job):
            return job, time.monotonic()
        assert time.monotonic() < deadline, job


def line_of(job, text):
    source = job.script.read_text().splitlines()
    [line] = [i for i, code in enumerate(source, 1) if text in code]
    return line


def by_rank(job):
    return {rank["rank"]: rank for rank in job["ranks"]}


@pytest.mark.parametrize(("number", "state"), [(signal.SIGSTOP, "stopped"), (signal.SIGKILL, "dead")])
def test_a_rank_that_never_comes(start, rings, number, state):
    """The victim is struck outside of the communicator; the others wait in an all-reduce."""
    job = start("faults.py", 4, "collective", VICTIM, "SIGSTOP", 60, settings=KEEP)
    job.next("ready")
    line = line_of(job, "idle_or(comm, lambda: comm.all_reduce(x")
    before = line_of(job, "comm.all_reduce(torch.ones(10), unicomm.ReduceOp.SUM, False)")
    for other in job.but(VICTIM):
        other.tell()
    for other in job.but(VICTIM):
        other.next("calling")
    struck = time.monotonic()
    job[VICTIM].signal(number)
    seen, at = shown(
        rings,
        lambda job: (
            by_rank(job)[VICTIM]["process"] == state
            and all(r["operation"]["seq"] == 2 for r in job["ranks"] if r["rank"] != VICTIM)
        ),
    )
    assert at - struck < SOON * slowdown()
    ranks = by_rank(seen)
    assert sorted(ranks) == [0, 1, 2, 3]
    assert [b["rank"] for b in seen["blockers"]] == [VICTIM]
    assert seen["blockers"][0]["holds_up"] == [0, 1, 3]
    for rank, entry in ranks.items():
        assert entry["pid"] == job[rank].pid
        operation = entry["operation"]
        assert operation["name"] == "all_reduce"
        assert operation["group"] == "main"
        assert operation["file"] == str(job.script)
        if rank == VICTIM:
            assert (operation["seq"], operation["state"], operation["line"]) == (1, "completed", before)
            assert entry["waits_for"] == []
        else:
            assert (operation["seq"], operation["line"], operation["size"]) == (2, line, 4000)
            assert operation["state"] in ("started", "failed")
            assert entry["waits_for"] == [VICTIM]
            assert entry["process"] in ("running", "sleeping") or (
                state == "dead" and entry["process"] == "ended"
            )
    text = top(rings, "--once")
    assert f"rank {VICTIM} is {state}, last did all_reduce #1 of 'main'" in text
    assert f"faults.py:{line}" in text
    assert "held up: 0-1,3" in text
    if number == signal.SIGSTOP:
        job[VICTIM].signal(signal.SIGCONT)


@pytest.mark.parametrize(("number", "state"), [("SIGSTOP", "stopped"), ("SIGKILL", "dead")])
def test_in_the_middle_of_a_transfer(start, rings, number, state):
    job = start("faults.py", 4, "transfer", VICTIM, number, 60, settings=KEEP)
    job.next("ready")
    struck = job[VICTIM].next("struck")["at"]
    line = line_of(job, "the line that the recorder has to show")
    seen, at = shown(rings, lambda job: by_rank(job)[VICTIM]["process"] == state)
    assert at - struck < SOON * slowdown()
    operation = by_rank(seen)[VICTIM]["operation"]
    assert operation["name"] == "all_reduce"
    assert operation["state"] == "started"
    assert operation["line"] == line
    assert operation["size"] == 256 << 20
    assert (operation["seconds"] is None) == (state == "dead")
    assert [b["rank"] for b in seen["blockers"]] == [VICTIM]
    text = top(rings, "--once")
    assert (
        f"rank {VICTIM} is {state}, in all_reduce #3 of 'main' at programs/faults.py:{line} interrupted"
        in text
    )


def test_messages(start, rings):
    """A stopped rank's neighbours wait to receive from it and to send to it, one rank for both."""
    job = start("faults.py", 4, "p2p", VICTIM, "SIGSTOP", 60)
    job.next("ready")
    job[VICTIM].signal(signal.SIGSTOP)
    for other in job.but(VICTIM):
        other.tell()
    for other in job.but(VICTIM):
        other.next("calling")
    waiting = {0, 1, 3}
    seen, _ = shown(
        rings, lambda job: all(r["waits_for"] == [VICTIM] for r in job["ranks"] if r["rank"] in waiting)
    )
    names = {rank: entry["operation"]["name"] for rank, entry in by_rank(seen).items()}
    assert names[1] == "recv"
    assert names[3] == "send"
    assert names[0] in ("send", "recv")
    assert by_rank(seen)[VICTIM]["process"] == "stopped"
    assert seen["blockers"] == [{"rank": VICTIM, "holds_up": [0, 1, 3]}]
    job[VICTIM].signal(signal.SIGCONT)


def test_the_view_follows(start, rings):
    """The drawing itself on a pseudo-terminal, until it is interrupted."""
    job = start("faults.py", 4, "collective", VICTIM, "SIGSTOP", 60)
    job.next("ready")
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "unicomm", "trace", "top", str(rings), "--interval", "0.05"]
    env = clean_environment() | {"COLUMNS": "200", "LINES": "40", "TERM": "xterm"}
    view = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    screen = b""

    def see(text):
        nonlocal screen
        deadline = time.monotonic() + 30
        while text not in screen:
            assert select.select([ours], [], [], max(0.0, deadline - time.monotonic()))[0], screen
            screen += os.read(ours, 1 << 16)

    try:
        see(b"all_reduce")
        job[VICTIM].signal(signal.SIGSTOP)
        see(b"1 stopped")
        view.send_signal(signal.SIGINT)
        while select.select([ours], [], [], 30)[0]:
            try:
                if not os.read(ours, 1 << 16):
                    break
            except OSError:  # the other end is closed
                break
        assert view.wait(30) == 0
    finally:
        view.kill()
        view.wait()
        os.close(ours)
        job[VICTIM].signal(signal.SIGCONT)
