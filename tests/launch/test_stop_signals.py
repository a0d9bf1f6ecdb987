"""Signals that stop the launcher: when they interrupt it, and which rank its exit code is of."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException

from tests import commands
from tests.commands import clean_environment
from unicomm.launch.run.job import Attempt, Job
from unicomm.launch.run.job_folder import JobFolder
from unicomm.launch.run.launcher import _Ending
from unicomm.launch.run.outcome import Ended, outcome
from unicomm.launch.run.stop_signals import Reacting, Received, StopSignals
from unicomm.launch.run.time_limit import time_limit


class Stopped(Exception):
    pass


@pytest.fixture
def stop():
    """The stop signals of this process, installed; SIGUSR1 comes there, too."""
    numbers = [*(signal.Signals[name] for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")), signal.SIGUSR1]
    before = {number: signal.getsignal(number) for number in numbers}
    made = StopSignals()
    made.install()
    signal.signal(signal.SIGUSR1, made.handle)
    yield made
    for number, handler in before.items():
        signal.signal(number, handler)


def raise_signal(number=signal.SIGUSR1):
    os.kill(os.getpid(), number)
    time.sleep(0)  # the interpreter runs the handler


def test_it_raises_once_where_the_job_can_be_interrupted(stop):
    raise_signal(signal.SIGHUP)  # nothing can be interrupted yet
    with pytest.raises(Stopped, match="SIGHUP"), stop.interrupting(lambda number: Stopped(number.name)):
        pytest.fail("an earlier signal was lost")
    raise_signal(signal.SIGTERM)
    assert [received.signal.name for received in stop.received] == ["SIGHUP", "SIGTERM"]
    assert stop.first.signal is signal.SIGHUP


def test_a_second_one_raises_nothing(stop):
    def interrupted():
        with stop.interrupting(Stopped):
            try:
                raise_signal()
            finally:
                stop.ending()
                raise_signal()
                stop.check()

    with pytest.raises(Stopped):
        interrupted()
    assert len(stop.received) == 2


def test_deferred(stop):
    done = []

    def interrupted():
        with stop.interrupting(Stopped):
            with stop.deferred():
                with stop.deferred():
                    raise_signal()
                done.append("both")
            done.append("more")

    with pytest.raises(Stopped):
        interrupted()
    assert done == ["both"]


def test_an_exception_that_a_library_swallows_is_raised_again(stop):
    """As logging does with those of its handlers."""
    swallowed = []

    def interrupted():
        with stop.interrupting(Stopped):
            try:
                raise_signal()
            except Stopped as error:
                swallowed.append(error)
            with stop.deferred():
                pass

    with pytest.raises(Stopped):
        interrupted()
    assert len(swallowed) == 1


def test_only_those_that_are_named(stop):
    before = signal.getsignal(signal.SIGQUIT)
    stop.only(["SIGTERM"])
    assert signal.getsignal(signal.SIGQUIT) != before
    assert set(stop.handled()) == {signal.SIGTERM, signal.SIGUSR1}
    stop.ignore()
    raise_signal(signal.SIGTERM)
    assert stop.received == []


def test_a_fork_has_the_usual_handlers(stop):
    pid = os.fork()
    if pid == 0:
        usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler and not stop.handled()
        os._exit(0 if usual else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert signal.SIGTERM in stop.handled()


def test_what_reacts_beside_the_main_thread_ends_with_it(stop):
    before = threading.active_count()
    reacting = Reacting(stop, lambda number: None)
    assert threading.active_count() == before + 1
    raise_signal()
    reacting.close()
    reacting.close()
    assert threading.active_count() == before
    assert signal.set_wakeup_fd(-1) == -1
    assert len(stop.received) == 1


def test_a_limit_of_time():
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(TimeoutError, match=r"0\.05 s"), time_limit(0.05):
        time.sleep(10)
    with time_limit(10):
        pass
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) == before


def test_no_process_of_others_is_killed(tmp_path):
    """The number of a rank that was reaped may be somebody else's by now."""
    starting = ["sh", "-c", "sleep 100 >/dev/null 2>&1 & echo $!"]
    other = int(subprocess.run(starting, capture_output=True, text=True, check=True).stdout)
    own = subprocess.Popen(["sleep", "100"])
    job = Job(JobFolder(tmp_path), None, None)
    job.attempt = Attempt(0, pids={0: other, 1: own.pid})
    job.abandon()
    assert own.wait(20) == -signal.SIGKILL
    os.kill(other, signal.SIGTERM)  # which would raise
    job.close(keep=False)


def test_a_thread_in_the_store_aborts_no_launcher():
    """Without the launcher's own end the interpreter would end by SIGABRT."""
    code = """
import threading
from torch.distributed import TCPStore
from unicomm.launch.commands.run import _end
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
before, running = set(threading.enumerate()), threading.Event()
def look():
    while True:
        store.check(["never"])
        running.set()
threading.Thread(target=look, daemon=True).start()
running.wait()
print("the end")
_end(3, before)
"""
    done = commands.run([sys.executable, "-c", code], env=clean_environment())
    assert (done.returncode, done.stdout) == (3, "the end\n"), done.stderr


# --- exit codes -------------------------------------------------------------------------------------------

FAILED = RuntimeError("torchrun's")


def received(number, monotonic):
    return Received(number, 0.0, monotonic)


@pytest.mark.parametrize(
    ("ended", "culprits", "code", "rank"),
    [
        ({0: 1, 1: 5}, (), 1, 0),
        ({0: 1, 1: 5}, (1,), 5, 1),  # the culprit
        ({0: 1, 1: 5}, (2,), 1, 0),  # which was on another host, or had not ended
        ({0: 1, 2: -9, 3: -11}, (), 137, 2),  # the others raise when a process is gone
        ({0: -6, 1: 3}, (0, 1), 134, 0),
    ],
)
def test_whose_exit_code(ended, culprits, code, rank):
    end = outcome(FAILED, Attempt(0, ended=ended), None, culprits)
    assert (end.ended, end.exit_code) == (Ended.RANK_FAILED, code)
    assert end.why.startswith(f"rank {rank} ")


@pytest.mark.parametrize(("at", "code"), [(9.0, 143), (10.0, 3), (11.0, 3)])
def test_what_came_first_counts(at, code):
    attempt = Attempt(0, "a rank failed", 10.0, {1: 3})
    assert outcome(FAILED, attempt, received(signal.SIGTERM, at)).exit_code == code
    attempt.last = False  # a restart was left, which the signal has prevented
    assert outcome(FAILED, attempt, received(signal.SIGTERM, at)).exit_code == 143
    assert outcome(FAILED, attempt, None).exit_code == 3


@pytest.mark.parametrize("replaced", [True, False])
def test_nobody_is_to_blame_while_hosts_change(replaced, tmp_path, monkeypatch):
    """The launcher has ended the ranks itself, because hosts joined, and is stopped before they run again."""
    job = Job(JobFolder(tmp_path), None, None)
    job.attempt = Attempt(0, "hosts joined or left the job", replaced=replaced)
    stop, shown = StopSignals(), []
    monkeypatch.setattr(_Ending, "show", lambda *_: shown.append("a verdict"))
    stop.received.append(received(signal.SIGTERM, 1.0))
    end = _Ending(None, job, stop, 0.0).conclude(SignalException("stopped", signal.SIGTERM))
    assert (end.exit_code, shown) == (143, [] if replaced else ["a verdict"])
    job.close(keep=False)


def test_a_job_that_has_succeeded_is_not_stopped():
    assert outcome(None, Attempt(0), received(signal.SIGTERM, 1.0)).exit_code == 0


def test_other_ends():
    assert outcome(ValueError("3:2"), Attempt(-1), None).exit_code == 2
    assert outcome(ValueError("later"), Attempt(0), None).exit_code == 1
    assert outcome(SystemExit(7), Attempt(0), None).exit_code == 7
    end = outcome(ConnectionError("no store\nmore"), Attempt(-1), None)
    assert (end.ended, end.exit_code, end.why) == (Ended.LAUNCHER_FAILED, 1, "ConnectionError: no store")
