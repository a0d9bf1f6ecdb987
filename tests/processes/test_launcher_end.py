"""How a job of `unicomm run` ends: each row of the table in docs/run.md, and that signals lose no verdict."""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time

import pytest

from tests import ROOT, commands
from tests.commands import clean_environment
from tests.ports import free_port
from tests.processes import launcher_ends
from tests.processes.launcher_ends import CASES, RANKS, Launcher
from tests.processes.rank_processes import PROGRAMS
from unicomm.flight_recorder.analysis.analyze import analyze
from unicomm.flight_recorder.analysis.verdict import Verdict
from unicomm.flight_recorder.table.load import load
from unicomm.launch.run import stop_signals

pytestmark = pytest.mark.processes

LAUNCHED, FAULTS = PROGRAMS / "launched.py", PROGRAMS / "torch_faults.py"
FORKED = ("--run-path", "--start-method=fork")  # ranks that need not import torch
SOON = 30.0  # seconds; less than torchrun waits for ranks that do not end
TRIES = 20


@pytest.fixture
def launch(fork_server, tmp_path):
    """`launch(*arguments, fresh=False)`: a `Launcher`, which ends with the test, and its ranks with it."""
    started = []

    def make(*arguments, fresh=False):
        folder = tmp_path / str(len(started))
        started.append(Launcher(None if fresh else fork_server, folder, list(arguments)))
        return started[-1]

    yield make
    for launcher in started:
        with contextlib.suppress(ProcessLookupError):
            launcher.signal(signal.SIGKILL)
        for pid in launcher.ranks():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        launcher.end()


def verdict(launcher):
    return json.loads(launcher.file.read_text())


def stuck(launcher):
    """The culprits if the job's rings show now that it is stuck: an operation has run for long enough."""
    main = analyze(load(sorted((launcher.folder / "rings").rglob("*.ucring")))).main
    return main.culprits if main.verdict is Verdict.BLOCKED_OUTSIDE else []


def ctrl_c_until(launcher, text):
    """Presses Ctrl-C once a second until the launcher says this.

    A busy launcher may note two signals as if they came at once, and those count as one decision.
    """
    pressed = time.monotonic()

    def told():
        nonlocal pressed
        if text not in launcher.said and time.monotonic() >= pressed + 1.0:
            launcher.signal(signal.SIGINT)
            pressed = time.monotonic()
        return text in launcher.said

    launcher.until(told)


def sleeping(launcher):
    launcher.until(lambda: len(launcher.ranks()) == RANKS)


# --- the table --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("do", "code", "ended", "failed"),
    [
        (["exit", 0], 0, "succeeded", ("", 0)),
        (["exit", 3], 3, "rank-failed", ("", 3)),
        (["raise"], 1, "rank-failed", ("", 1)),
        (["kill", "SIGKILL"], 137, "rank-failed", ("SIGKILL", 137)),
        (["kill", "SIGSEGV"], 139, "rank-failed", ("SIGSEGV", 139)),
        (["kill", "SIGTERM"], 143, "rank-failed", ("SIGTERM", 143)),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, list) else None,
)
def test_the_exit_code_is_that_of_the_rank(launch, do, code, ended, failed):
    launcher = launch(LAUNCHED, "{folder}", *do)
    assert launcher.end() == code, launcher.said
    told = verdict(launcher)
    assert (told["exit_code"], told["ended"], told["attempts"]) == (code, ended, 1)
    ranks = told["failed_ranks"]
    assert {(rank["signal"], rank["exit_code"]) for rank in ranks} == ({failed} if code else set())
    assert bool(told["why"]) == bool(code)
    assert (told["rings"] is None) == (not code)
    assert told["signals"] == []
    assert launcher.left() == []


def test_a_killed_rank_counts_and_not_those_that_raise_then(launch):
    launcher = launch("--no-hub", *FORKED, FAULTS, "killed", 1)
    assert launcher.end() == 128 + signal.SIGKILL, launcher.said
    told = verdict(launcher)
    assert told["why"] == "rank 1 was ended by SIGKILL"
    assert told["report"]["culprits"] == [1]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"])
def test_stop_signals(launch, name):
    launcher = launch(LAUNCHED, "{folder}", "sleep")
    sleeping(launcher)
    launcher.signal(signal.Signals[name])
    code = 128 + signal.Signals[name]
    assert launcher.end() == code, launcher.said
    told = verdict(launcher)
    assert (told["exit_code"], told["ended"], told["failed_ranks"]) == (code, "stopped", [])
    assert [received["signal"] for received in told["signals"]] == [name]
    assert f"unicomm run: the launcher was stopped by {name}" in launcher.said
    assert launcher.left() == []


def test_only_the_signals_that_the_user_names(launch):
    launcher = launch("--signals-to-handle=SIGTERM,SIGUSR1", LAUNCHED, "{folder}", "sleep")
    sleeping(launcher)
    launcher.signal(signal.SIGUSR1)
    assert launcher.end() == 128 + signal.SIGUSR1, launcher.said
    assert verdict(launcher)["ended"] == "stopped"


@pytest.mark.parametrize(("program", "code"), [("nonesuch", 127), (FAULTS, 126)])
def test_a_program_that_cannot_be_started(launch, program, code):
    launcher = launch("--no-python", program)
    assert launcher.end() == code, launcher.said
    assert verdict(launcher)["ended"] == "not-started"
    assert f"cannot start {program}" in launcher.said
    assert "Traceback" not in launcher.said


@pytest.mark.parametrize(
    "options",
    [
        ("--nnodes=3:2",),
        ("--nnodes=two",),
        ("--nnodes=1:2:3",),
        ("--no-python", "-m"),
        ("--backend=shn",),
        ("--nonesuch",),
    ],
    ids=str,
)
def test_options_that_contradict(launch, options):
    launcher = launch(*options, LAUNCHED, "{folder}", "raise")
    assert launcher.end() == 2, launcher.said
    assert launcher.ranks() == []
    assert "Traceback" not in launcher.said


@pytest.mark.parametrize("file", ["{folder}", "{folder}/nonesuch/verdict.json"])
def test_a_verdict_file_that_cannot_be_written(launch, file):
    launcher = launch(f"--verdict-file={file}", LAUNCHED, "{folder}", "sleep")
    assert launcher.end() == 2, launcher.said
    assert launcher.ranks() == []


def test_a_restart_that_helps(launch):
    launcher = launch("--max-restarts=1", LAUNCHED, "{folder}", "once")
    assert launcher.end() == 0, launcher.said
    told = verdict(launcher)
    assert (told["ended"], told["attempts"], told["report"]) == ("succeeded", 2, None)
    assert launcher.said.count("what the flight recorder tells") == 1


def test_the_file_of_an_earlier_job_is_not_taken_for_this_one(launch):
    launcher = launch(LAUNCHED, "{folder}", "sleep")
    launcher.file.write_text("{}")
    again = launch(f"--verdict-file={launcher.file}", LAUNCHED, "{folder}", "sleep")
    sleeping(again)
    assert not launcher.file.exists()


# --- signals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pause", [0.0, 0.003, 0.01])
def test_a_second_signal_loses_no_verdict(launch, pause):
    """`timeout` signals its child, and then the group, of which the child is a member."""
    launcher = launch("--no-hub", *FORKED, FAULTS, "waits", 1, "{folder}/pid")
    launcher.until((launcher.folder / "pid").exists)
    launcher.until(lambda: stuck(launcher) == [1])
    for _ in range(2):  # to the launcher alone, as forked ranks belong to its group
        os.kill(launcher.pid, signal.SIGTERM)
        time.sleep(pause)
    assert launcher.end() == 128 + signal.SIGTERM, launcher.said
    assert launcher.said.count("what the flight recorder tells") == 1
    told = verdict(launcher)
    assert told["report"]["verdict"] == "blocked-outside-the-communicator"
    assert told["report"]["culprits"] == [1]
    assert 1 <= len(told["signals"]) <= 2  # the kernel delivers two that are pending as one
    assert launcher.left() == []


def test_a_signal_while_torch_is_imported(launch):
    launcher = launch(LAUNCHED, "{folder}", "sleep", fresh=True)
    launcher.until(launcher.listens)
    launcher.signal(signal.SIGTERM)
    assert launcher.end() == 128 + signal.SIGTERM, launcher.said
    told = verdict(launcher)
    assert (told["ended"], told["attempts"]) == ("stopped", 0)
    assert launcher.ranks() == []
    assert "Traceback" not in launcher.said


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_a_signal_while_it_waits_for_another_host(launch, backend):
    """The static rendezvous waits inside of torch's store, where no handler of Python runs."""
    options = [f"--rdzv-backend={backend}", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--nnodes=2"]
    launcher = launch("--no-hub", *options, "--node-rank=1", LAUNCHED, "{folder}", "sleep")
    launcher.until((launcher.folder / "rings").exists)
    time.sleep(2.0)
    launcher.signal(signal.SIGTERM)
    began = time.monotonic()
    assert launcher.end() == 128 + signal.SIGTERM, launcher.said
    assert time.monotonic() - began < SOON
    told = verdict(launcher)
    assert (told["ended"], told["attempts"], len(told["signals"])) == ("stopped", 0, 1)


def test_forked_ranks_end_by_the_signal(launch):
    """They have inherited the launcher's handlers."""
    launcher = launch(*FORKED, LAUNCHED, "{folder}", "sleep")
    sleeping(launcher)
    began = time.monotonic()
    launcher.signal(signal.SIGTERM)
    assert launcher.end() == 128 + signal.SIGTERM, launcher.said
    assert time.monotonic() - began < SOON
    assert "forcefully" not in launcher.said


def test_ranks_that_heed_no_signal(launch):
    launcher = launch("--shutdown-timeout=1", LAUNCHED, "{folder}", "stubborn")
    sleeping(launcher)
    began = time.monotonic()
    launcher.signal(signal.SIGTERM)
    assert launcher.end() == 128 + signal.SIGTERM, launcher.said
    assert time.monotonic() - began < SOON
    assert launcher.left() == []


def test_a_person_gives_up(launch):
    """The second Ctrl-C says how, the third does it."""
    launcher = launch("--shutdown-timeout=1000", LAUNCHED, "{folder}", "stubborn")
    sleeping(launcher)
    launcher.signal(signal.SIGINT)
    ctrl_c_until(launcher, "press Ctrl-C again to give up")
    ctrl_c_until(launcher, "given up; there is no verdict")
    assert launcher.end() == 128 + signal.SIGINT, launcher.said
    assert not launcher.file.exists()
    launcher.until(lambda: launcher.left() == [])


def test_many_fast_signals_are_not_a_person(launch):
    """Repeats what a busy machine has made too slow, or where the kernel has merged all signals into one."""
    tries = []
    while len(tries) < TRIES:
        launcher = launch(LAUNCHED, "{folder}", "sleep")
        sleeping(launcher)
        began = time.monotonic()
        for _ in range(5):
            with contextlib.suppress(ProcessLookupError):
                launcher.signal(signal.SIGINT)
            time.sleep(0.01)
        sent = time.monotonic() - began
        assert launcher.end() == 128 + signal.SIGINT, launcher.said
        if not launcher.file.exists():  # the launcher took them for a person who gives up
            tries.append((sent, launcher.said))
            continue
        told = verdict(launcher)
        assert told["ended"] == "stopped"
        at = [received["seconds"] for received in told["signals"]]  # rounded to milliseconds
        if len(at) > 1 and max(sent, at[-1] - at[0] + 0.002) < stop_signals._BY_HAND:
            assert "give up" not in launcher.said
            return
        tries.append((sent, at))
    pytest.fail(f"the signals were never fast enough: {tries}")


@pytest.fixture
def wrapped(tmp_path):
    """`wrapped(*command)`: a `Popen` of `unicomm run` behind another command; its rank sleeps."""
    started = []

    def make(*command):
        options = ["--nproc-per-node=1", "--no-hub", f"--verdict-file={tmp_path / 'verdict'}"]
        process = subprocess.Popen(
            [*command, sys.executable, "-m", "unicomm", "run", *options, LAUNCHED, tmp_path, "sleep"],
            env=clean_environment() | {"UNICOMM_TRACE_DIR": str(tmp_path / "rings")},
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield make
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_timeout_as_a_program(wrapped, tmp_path):
    """It runs over while the rank sleeps or, on a busy machine, before there is one."""
    process = wrapped("timeout", "--preserve-status", "10")
    assert process.wait(launcher_ends.WITHIN) == 128 + signal.SIGTERM
    told = json.loads((tmp_path / "verdict").read_text())
    assert (told["ended"], told["exit_code"]) == ("stopped", 143)
    assert {received["signal"] for received in told["signals"]} == {"SIGTERM"}


def test_nohup(wrapped, tmp_path, eventually):
    """torchrun ends with the terminal all the same."""
    process = wrapped("nohup")
    eventually(lambda: list(tmp_path.glob("rank-*")), launcher_ends.WITHIN)
    process.send_signal(signal.SIGHUP)
    time.sleep(1.0)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(launcher_ends.WITHIN) == 128 + signal.SIGTERM
    told = json.loads((tmp_path / "verdict").read_text())
    assert [received["signal"] for received in told["signals"]] == ["SIGTERM"]


# --- threads ------------------------------------------------------------------------------------------------


MAIN = """
import os, signal, sys, threading
from unicomm.launch.run import launcher
from unicomm.launch.run.stop_signals import StopSignals
{before}
stop = StopSignals()
stop.install()
print(launcher.main(sys.argv[1:], stop))
print([thread.name for thread in threading.enumerate()])
"""


def run_main(folder, does, before=""):
    """Runs a job in an interpreter that says afterwards which exit code it has, and which threads."""
    env = clean_environment() | {"UNICOMM_TRACE_DIR": str(folder / "rings")}
    arguments = ("--nproc-per-node=1", "--hub-port=0", LAUNCHED, folder, does)
    return commands.run([sys.executable, "-c", MAIN.format(before=before), *arguments], env=env)


def test_no_thread_outlives_the_job(tmp_path):
    done = run_main(tmp_path, "raise")
    assert done.stdout.splitlines()[-2:] == ["1", "['MainThread']"], done.stdout + done.stderr


def test_a_signal_just_before_a_thread_of_torch_starts(tmp_path):
    """At the end torch joins its keep-alive thread, which must have started by then."""
    before = """
start = threading.Thread.start
def interrupted(self):
    if "KeepAlive" in self.name:
        print("interrupted")
        os.kill(os.getpid(), signal.SIGTERM)
    start(self)
threading.Thread.start = interrupted
"""
    done = run_main(tmp_path, "sleep", before)
    expected = ["interrupted", "143", "['MainThread']"]
    assert done.stdout.splitlines()[-3:] == expected, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", CASES)
def test_ends_under_load(fork_server, tmp_path, name):
    """`python -m tests.processes.launcher_ends --repeat 200` does the same many times."""
    with launcher_ends.load(2):
        for number in range(2):
            result = launcher_ends.play(
                fork_server, tmp_path / str(number), CASES[name], random.Random(f"{name} {number}")
            )
            assert result.problems == []


@pytest.mark.timeout(300)
def test_nobody_reads_what_the_launcher_says(tmp_path):
    """The reader of its stderr has gone, as with `| head`: the job runs on, and ends as it would."""
    file = tmp_path / "verdict.json"
    command = [sys.executable, "-m", "unicomm", "run", "--nproc-per-node=2", "--max-restarts=1"]
    command += [f"--verdict-file={file}", LAUNCHED, tmp_path, "raise"]
    env = clean_environment() | {"UNICOMM_TRACE_DIR": str(tmp_path / "rings")}
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=writer, stderr=writer, check=False)
    os.close(writer)
    assert done.returncode == 1
    said = json.loads(file.read_text())
    assert (said["ended"], said["exit_code"], said["attempts"]) == ("rank-failed", 1, 2)
    # The launcher may have ended the other rank before its program began.
    sentence = said["report"]["findings"][0]["sentence"]
    assert re.match(r"(Both ranks|Rank [01]) ended with exit code 1", sentence), sentence
