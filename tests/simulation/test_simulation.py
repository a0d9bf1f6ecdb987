"""Some seeds of `make simulate`, what keeps it deterministic, and defects that it must find."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import unicomm
from tests import ROOT
from unicomm.backends.out_of_band import wire
from unicomm.backends.out_of_band.fault_channel import FaultChannel
from unicomm.comms.membership.reconfigure_session import ReconfigureSession

pytest.importorskip("greenlet")

from . import primitives
from .conductor import shrunk
from .found import FOUND
from .installation import installed
from .judge import unexplained, violations
from .player import Run, play
from .program import Program, program_of, to_text
from .scheduler import Process, Scheduler, Stuck

SEEDS = 300  # those that are played
SCHEDULES = 12  # of each program that showed a defect


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    with installed():
        yield


def _broken(program: Program) -> list[str]:
    return unexplained(violations(play(program)))


def _first_seed() -> int:
    """0, or with UNICOMM_SIMULATE_NEW=1 a seed that is another one after each change of the code under test.

    A seed that finds a defect would fail `make test` by chance, for changes that have nothing to do with it.
    """
    if os.environ.get("UNICOMM_SIMULATE_NEW", "0") != "1":
        return 0
    digest = hashlib.sha256()
    for folder in ("comms", "backends/out_of_band", "backends/gloo"):
        for path in sorted((Path(unicomm.__file__).parent / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return int(digest.hexdigest()[:8], 16)


def _facts(run: Run) -> list[Any]:
    """What a run was, without objects that are never equal."""
    return [
        run.digest,
        run.steps,
        run.seconds,
        run.died,
        [(r.op, r.rank, r.began, r.ended, r.uid, r.bug, str(r.error)) for r in run.records],
    ]


def test_programs_use_every_operation_and_fault() -> None:
    programs = [program_of(seed) for seed in range(400)]
    operations = Counter(op["op"] for program in programs for op in program["ops"])
    assert set(operations) == {
        *("create", "coll", "msgs", "batch", "split", "late", "final", "abort", "later", "cause", "reconf")
    }
    assert {f["kind"] for p in programs for f in p["faults"]} == {"kill", "stop", "reset", "break store"}
    assert {program["ranks"] for program in programs} == {2, 3, 4, 5, 6}
    assert all(json.loads(json.dumps(program)) == program for program in programs)


@pytest.mark.parametrize("seed", [3, 16, 33, 127])
def test_a_seed_is_the_same_run_each_time(seed: int) -> None:
    once, again = play(program_of(seed), trace=True), play(program_of(seed), trace=True)
    assert once.trace == again.trace
    assert _facts(once) == _facts(again)
    assert once.steps > 50


def test_a_seed_is_the_same_run_in_another_process() -> None:
    code = (
        "import json\n"
        "from tests.simulation.installation import installed\n"
        "from tests.simulation.player import play\n"
        "from tests.simulation.program import program_of\n"
        "with installed():\n"
        "    print(json.dumps([play(program_of(seed), trace=True).trace for seed in range(6)]))"
    )
    there = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100, check=True
    )
    for seed, trace in enumerate(json.loads(there.stdout)):
        for line, (there_, here) in enumerate(
            itertools.zip_longest(trace, play(program_of(seed), trace=True).trace or [])
        ):
            assert there_ == here, f"seed {seed}, after:\n" + "\n".join(trace[max(0, line - 20) : line])


def test_what_was_played_before_changes_nothing() -> None:
    """Seed 30 leaves a post in the store, which a process knows as its own."""
    assert play(program_of(30)).digest == play(program_of(30)).digest


def test_a_thread_from_outside_changes_nothing() -> None:
    """Such as one that looks after communicators of an earlier test, whose modules are replaced, too."""
    alone = play(program_of(3)).digest
    over, naps, failed = threading.Event(), [0.0], []

    def nap() -> None:
        try:
            while not over.is_set():
                primitives.sim_time.sleep(1e-4)
                naps.append(primitives.sim_time.monotonic())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=nap)
    thread.start()
    try:
        while len(naps) < 100 and not failed:  # also between two runs
            assert play(program_of(3)).digest == alone
    finally:
        over.set()
        thread.join()
    assert not failed
    assert naps == sorted(naps)


def test_another_schedule_is_another_run() -> None:
    program = program_of(3)
    assert len({play({**program, "schedule": s}).digest for s in range(5)}) == 5


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_stays_repaired(name: str) -> None:
    program = FOUND[name]
    for schedule in (program["schedule"], *range(SCHEDULES)):
        tried = {**program, "schedule": schedule}
        assert not (found := _broken(tried)), f"{name}, schedule {schedule}: {found[0]}\n{to_text(tried)}"


@pytest.mark.timeout(400)  # seconds of computing alone: nothing in it waits for the clock
def test_seeds_break_nothing() -> None:
    """A failure's message holds the program: `python -m tests.simulation.conductor --program FILE`."""
    first, errors = _first_seed(), 0
    for count in range(SEEDS):
        run = play(program_of(first + count))
        errors += sum(record.error is not None for record in run.records)
        found = unexplained(violations(run))
        assert not found, f"seed {first + count}: {found[0]}\n{json.dumps(run.program)}"
    assert errors  # or no fault had an effect


def _answer_nothing(channel: FaultChannel, peer: int, message: wire.Message) -> None:
    if not isinstance(message, wire.Ask):
        _hear(channel, peer, message)


_hear = FaultChannel._hear

BROKEN: dict[str, tuple[Any, str, Callable[..., Any], str]] = {
    "a rank that is asked where it is does not answer": (
        FaultChannel,
        "_hear",
        _answer_nothing,
        "false accusation",
    ),
    "the first rank of a reconfiguration does not wait for the others": (
        ReconfigureSession,
        "settle",
        lambda session: None,
        "some connected, some failed",
    ),
    "a rank whose connection has ended does not wait for the cause": (
        FaultChannel,
        "explain",
        lambda channel, awaits: channel.fault,
        "not the dead rank",
    ),
}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_protocol_is_found_and_shrunk(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, method, replacement, symptom = BROKEN[name]
    monkeypatch.setattr(owner, method, replacement)
    for seed in range(200):
        program = program_of(seed)
        found = [text for text in _broken(program) if text.startswith(symptom)]
        if found:
            break
    assert found, "not found"
    short = shrunk(program, found, seconds=150)  # a few, on an idle machine
    again = [text for text in _broken(short) if text.startswith(symptom)]
    assert again
    assert len(short["ops"]) <= 3
    assert len(short["ops"]) <= len(program["ops"])
    assert len(short["faults"]) <= 1
    monkeypatch.undo()
    assert not _broken(short)  # the program is legal: the protocol was broken


def test_a_hang_says_where_each_thread_waits() -> None:
    """Two threads that wait for each other's lock."""
    scheduler = Scheduler(1)
    primitives.activate(scheduler)
    try:
        one, other = primitives.Lock(), primitives.Lock()

        def hold(first: primitives.Lock, second: primitives.Lock) -> None:
            with first:
                primitives.sim_time.sleep(1.0)
                with second:
                    pass

        process = Process(0)
        scheduler.spawn(process, "ours", lambda: hold(one, other), awaited=True)
        scheduler.spawn(process, "theirs", lambda: hold(other, one), awaited=True)
        with pytest.raises(Stuck, match="deadlock") as caught:
            scheduler.run()
        assert len(caught.value.where) == 2
        assert all("(lock) at test_simulation.py" in line for line in caught.value.where)
        scheduler.close()
    finally:
        primitives.deactivate()


def test_nothing_fails_where_nothing_is_broken() -> None:
    """Each seed's program without its faults, as far as it breaks nothing itself."""
    played = 0
    for seed in range(60):
        program = program_of(seed)
        ops = [op for op in program["ops"] if op["op"] in ("create", "msgs", "coll")]
        run = play({**program, "ops": [{**op, "timeout": 60.0} for op in ops], "faults": []})
        errors = [record.error for record in run.records if record.error is not None]
        assert not errors, f"seed {seed}: {errors[0]}"
        played += sum(op["op"] == "msgs" for op in ops)
    assert played > 20
