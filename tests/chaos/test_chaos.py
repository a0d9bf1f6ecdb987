"""Some rounds of `make chaos`: every backend, and every fault; and that a bad round is called bad."""

from __future__ import annotations

import contextlib
import itertools
import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.chaos import mpi_places, program, report
from tests.chaos.judge import judge
from tests.chaos.play import Play, Seen
from tests.chaos.players import Players
from tests.chaos.rounds import BACKENDS, FAULTS, SCENES, Round
from tests.commands import run
from tools import namespaces

ROUNDS = {
    "shm": (
        *("full", "kill two", "leave", "no memory", "stop", "kill in ddp", "kill in symm"),
        *("stop in symm", "no memory in symm", "kill in reconfigure", "stop store in reconfigure"),
    ),
    "gloo": (
        *("pause", "kill", "abort", "no descriptors", "cut", "stop in ddp", "kill in fsdp2", "filled"),
        *("stop in reconfigure", "no address space", "kill store"),
    ),
    "tcp": ("pause", "kill", "leave", "cut", "no descriptors", "no address space"),
    "ucx": ("pause", "kill"),
    "hosts": (
        *("none", "flicker", "kill", "leave", "no memory", "kill in reconfigure", "stop in fsdp2"),
        "stop store",
    ),
    "hosts-gloo": ("none", "leave", "kill in ddp"),
    "hosts-ucx": ("none", "abort"),
    "mpi": ("kill", "abort", "kill in ddp"),
}
SEEDS = {"kill two": 5, "no descriptors": 3, "abort": 8, "leave": 12, "kill": 7}  # the others have 2


def _played_apart(plan, folder):
    """The record of a round that a new interpreter plays.

    Ranks are forked from what plays them. A process in which other tests have used UCX knows the interfaces
    of its own host, and so would ranks on other hosts.
    """
    log = folder / f"{plan.fault}.jsonl"
    where = ["--log", log, "--keep", folder, "--jobs", "1"]
    ended = run([sys.executable, "-m", "tests.chaos.conductor", *shlex.split(plan.again), *where], within=280)
    assert log.exists(), ended.stdout + ended.stderr
    return json.loads(log.read_text())


def test_every_fault_is_played():
    assert tuple(ROUNDS) == BACKENDS
    assert set(itertools.chain.from_iterable(ROUNDS.values())) == set(FAULTS)
    assert all(backend in FAULTS[fault].backends for backend, faults in ROUNDS.items() for fault in faults)


@pytest.mark.processes
@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "mpi"])  # `make chaos` plays MPI's
def test_rounds(backend, tmp_path):
    plans = [Round.of(SEEDS.get(fault, 2), [4], [backend], [fault]) for fault in ROUNDS[backend]]
    why = mpi_places.why_not() if backend == "mpi" else namespaces.why_not()
    playable = [plan for plan in plans if not (why and (plan.placement or backend == "mpi"))]
    if "ucx" in backend:
        records = [_played_apart(plan, tmp_path) for plan in playable]
    else:
        with Players(2, tmp_path, "") as players:
            records = [record for _, record in players.play(playable) if record is not None]
    assert len(records) == len(playable)
    bad = [f"{record['fault']}: {line}" for record in records for line in record["wrong"]]
    assert not bad, "\n".join(bad)
    if len(playable) < len(plans):
        pytest.skip(f"{len(plans) - len(playable)} rounds were left out: {why}")


@pytest.mark.processes
@pytest.mark.skipif(bool(namespaces.why_not()), reason=f"no namespaces: {namespaces.why_not()}")
def test_who_ends_the_conductor_leaves_no_hosts(tmp_path, eventually):
    """Neither namespaces nor processes in them."""
    command = [sys.executable, str(Path(__file__).with_name("conductor.py")), "--backend", "hosts"]
    log = tmp_path / "rounds.jsonl"
    conductor = subprocess.Popen(
        [*command, "--sizes", "4", "--jobs", "2", "--fault", "none", "--log", str(log)]
    )
    try:
        eventually(log.exists, 100.0)
        children = psutil.Process(conductor.pid).children(recursive=True)
        assert len(children) > 2
        hosts = 0
        for child in children:
            with contextlib.suppress(psutil.Error):  # one that has just ended
                hosts += child.cmdline() == ["sleep", "infinity"]
        assert hosts >= 2
    finally:
        conductor.terminate()
    assert conductor.wait(60) == 143
    assert not psutil.wait_procs(children, timeout=60)[1]


def test_a_seed_says_everything():
    for seed in range(50):
        plan = Round.of(seed, [4, 8], BACKENDS, list(FAULTS))
        assert plan == Round.of(seed, [4, 8], BACKENDS, list(FAULTS))
        assert plan == Round.of(seed, [plan.size], [plan.backend], [plan.fault])
        assert len(plan.placement) in (0, plan.size)
        assert not plan.placement or set(plan.placement) == {0, 1}
    plans = [Round.of(seed, [4, 8], BACKENDS, list(FAULTS)) for seed in range(3000)]
    assert {(p.fault, p.backend) for p in plans} == {(f, b) for f in FAULTS for b in FAULTS[f].backends}


class Played(Play):
    """A round that nobody played."""

    def __init__(self, plan: Round, seen: list[Seen]) -> None:
        self.plan, self.seen, self.hung, self.struck = plan, seen, [], 100.0


@pytest.fixture
def killed():
    """A good round of four ranks, of which rank 1 is killed where no split is near."""
    plan = replace(Round.of(1, [4], ["shm"], ["kill"]), victims=(1,), at=6)
    told = Seen(6, "PeerLostError", [1], "", 100.1, [], 0)
    seen = [told, Seen(6, exit_code=-9), replace(told), replace(told, step=7)]
    return Played(plan, seen)


def test_a_good_round_is_good(killed, tmp_path):
    (tmp_path / "rank1.log").touch()
    killed.seen[1].inner_pid = 77
    (tmp_path / "host-rank00001-77-abc.ucring").touch()
    assert judge(killed, tmp_path) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"outcome": "right", "culprits": []}, "right"),
        ({"outcome": "wrong"}, "wrong"),
        ({"outcome": ""}, "nothing"),
        ({"outcome": "CommTimeoutError"}, "CommTimeoutError"),
        ({"culprits": [2]}, "PeerLostError [2]"),
        ({"culprits": [1, 2]}, "PeerLostError [1, 2]"),
        ({"culprits": []}, "PeerLostError []"),
        ({"when": 150.0}, "only after 50.0 s"),
        ({"left": ["socket"]}, "still holds ['socket']"),
        ({"exit_code": -6}, "ended with code -6"),
    ],
)
def test_a_bad_round_is_bad(killed, tmp_path, change, said):
    killed.seen[3] = replace(killed.seen[3], **change)
    (wrong,) = judge(killed, tmp_path)
    assert "rank 3" in wrong
    assert said in wrong


def test_who_does_not_go_on_after_a_lost_rank_is_bad(killed, tmp_path):
    killed.plan = replace(killed.plan, fault="kill in reconfigure")
    for seen, afterwards in zip(killed.seen, ("", None, None, "it failed"), strict=True):
        seen.afterwards = afterwards
    assert judge(killed, tmp_path) == ["rank 2 at step 6: did not go on", "rank 3 at step 7: it failed"]


@pytest.mark.parametrize(
    ("backend", "code", "good"), [("gloo", -6, True), ("gloo", -11, False), ("shm", -6, False)]
)
def test_gloo_may_abort_a_process_without_address_space(killed, tmp_path, backend, code, good):
    killed.plan = replace(killed.plan, fault="no address space", backend=backend)
    killed.seen[1] = Seen(6, exit_code=code, inner_pid=77)
    (tmp_path / "host-rank00001-77-abc.ucring").touch()
    assert (not judge(killed, tmp_path)) == good


@pytest.mark.parametrize(("culprits", "good"), [([1], True), ([], False), ([1, 2], False)])
def test_an_error_for_the_end_of_the_store_names_its_rank(killed, tmp_path, culprits, good):
    killed.plan = replace(killed.plan, fault="kill store")
    killed.seen[3] = replace(killed.seen[3], outcome="BackendError", culprits=culprits)
    assert (not judge(killed, tmp_path)) == good


@pytest.mark.parametrize(("named", "good"), [([0], True), ([2], False), ([0, 2], False), ([], False)])
def test_who_read_the_outcome_of_a_stopped_first_rank_may_be_ended_by_those_who_did_not(
    killed, tmp_path, named, good
):
    killed.plan = replace(killed.plan, fault="stop store in reconfigure")
    timeout = replace(killed.seen[0], outcome="CommTimeoutError", afterwards="")
    told = replace(timeout, outcome="AbortedError", culprits=named)
    killed.seen = [timeout, replace(timeout, culprits=[0]), replace(timeout, outcome="right"), told]
    killed.seen[2].afterwards = None
    wrong = [text for text in judge(killed, tmp_path) if "rank 3" in text]
    assert (not wrong) == good


def test_scenes_are_those_that_ranks_can_play():
    assert set(program.SCENES) == set(SCENES) == {fault.scene for fault in FAULTS.values()}


def test_what_is_left_and_who_hangs_is_bad(killed, tmp_path):
    (tmp_path / "host-rank00002-78-abc.ucring").touch()
    killed.hung = [2]
    assert judge(killed, tmp_path) == ["rank 2 did not end", "left behind: host-rank00002-78-abc.ucring"]


def test_the_page_counts(killed):
    records = [report.record(killed, [], 1.0, commit) for commit in ("abc", "abc", "def")]
    page = report.table(records)
    assert "3 rounds, all good" in page
    assert "commit abc (2 rounds), def (1 rounds)" in page
    assert "| kill | shm | 3 | PeerLostError 9 | 0.10 s, 0.10 s |" in page
