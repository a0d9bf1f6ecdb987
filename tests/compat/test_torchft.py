"""torchft's Manager over unicomm loses a replica in the middle of a step, goes on, and regains it."""

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.commands import clean_environment

PROGRAM = Path(__file__).with_name("torchft_program.py")
WITHIN = 60.0  # seconds until something is said: a hang, not a slow machine
MANY = 12  # steps that are more than a coincidence


def version():
    """The version of the released torchft; empty for a nightly one, or none."""
    try:
        return importlib.metadata.version("torchft")
    except importlib.metadata.PackageNotFoundError:
        return ""


has_torchft = importlib.util.find_spec("torchft") is not None and importlib.util.find_spec(
    "torchft.torchcomms"
)
pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not has_torchft, reason="torchft with ProcessGroupTorchComms is not installed: pip install torchft"
    ),
]


class Process:
    """A process of the program; `said` is the JSON that it has printed."""

    def __init__(self, *arguments):
        self.said = []
        self.complaints = []
        self._changed = threading.Condition()
        self.popen = subprocess.Popen(
            [sys.executable, PROGRAM, *map(str, arguments)],
            env=clean_environment() | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for stream, take in ((self.popen.stdout, self._event), (self.popen.stderr, self.complaints.append)):
            threading.Thread(target=self._follow, args=(stream, take), daemon=True).start()

    def _event(self, line):
        self.said.append(json.loads(line))

    def _follow(self, stream, take):
        for line in stream:
            with self._changed:
                take(line)
                self._changed.notify_all()

    def until(self, condition):
        """Waits until `condition(said)` holds for something that was said; returns the first such."""
        with self._changed:
            found = self._changed.wait_for(lambda: next(filter(condition, self.said), None), WITHIN)
        assert found, f"not within {WITHIN} s: {self.said[-5:]}\n{''.join(self.complaints)[-3000:]}"
        return found

    def steps(self):
        return [s for s in self.said if s["event"] == "step"]

    def committed(self, replicas):
        """Step -> what was said of it, of the steps that were taken with so many replicas."""
        return {s["step"]: s for s in self.steps() if s["committed"] and s["replicas"] == replicas}

    def end(self):
        code = self.popen.wait(WITHIN)
        assert code == 0, "".join(self.complaints)[-3000:]


@pytest.fixture
def start():
    """`start(*arguments)`: a process of the program that does not outlive the test."""
    with contextlib.ExitStack() as stack:

        def one(*arguments):
            process = Process(*arguments)
            stack.callback(process.popen.wait, WITHIN)
            stack.callback(process.popen.kill)
            return process

        yield one


def taken(replicas, at_least):
    return lambda s: s["event"] == "step" and s["replicas"] == replicas and s["step"] >= at_least


def stop_soon(stop, process):
    """Has all replicas stop at the same step, which is near."""
    written = stop.with_suffix(".new")
    written.write_text(str(process.steps()[-1]["step"] + 100))
    written.rename(stop)


def agree(one, other):
    """The steps that both took together; weights and losses are the same bits after each."""
    together = one.committed(2).keys() & other.committed(2).keys()
    for step in together:
        assert one.committed(2)[step]["weights"] == other.committed(2)[step]["weights"], step
        assert one.committed(2)[step]["loss"] == other.committed(2)[step]["loss"], step
    return together


def survivor_of(start, folder, backend):
    """Starts the lighthouse and replica 0. Returns the file that stops replicas, the address, the replica."""
    stop = folder / "stop"
    address = start("lighthouse").until(lambda s: s["event"] == "lighthouse")["address"]
    survivor = start("replica", 0, address, backend, stop)
    survivor.until(taken(1, 3))
    return stop, address, survivor


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_replica_is_lost_and_comes_back(start, tmp_path, backend):
    stop, address, survivor = survivor_of(start, tmp_path, backend)
    victim = start("replica", 1, address, backend, stop)
    met = victim.until(taken(2, 1))["step"]
    victim.until(taken(2, met + MANY))
    victim.popen.send_signal(signal.SIGKILL)
    assert victim.popen.wait(WITHIN) == -signal.SIGKILL
    assert len(agree(survivor, victim)) >= MANY

    last = victim.steps()[-1]["step"]
    alone = survivor.until(taken(1, last + 1))["step"]
    survivor.until(taken(1, alone + MANY))

    again = start("replica", 1, address, backend, stop)
    met = again.until(taken(2, alone))["step"]
    again.until(taken(2, met + MANY))
    survivor.until(taken(2, met + MANY))
    stop_soon(stop, survivor)
    for process in (survivor, again):
        process.end()
    assert len(agree(survivor, again)) >= MANY
    assert survivor.steps()[-1]["loss"] < survivor.steps()[0]["loss"] / 2


@pytest.mark.skipif(
    version() == "0.2.0", reason="torchft 0.2.0 asserts in its DDP when an all-reduce fails, and dies, too"
)
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_step_in_which_a_replica_dies_is_taken_again_without_it(start, tmp_path, backend):
    stop, address, survivor = survivor_of(start, tmp_path, backend)
    victim = start("replica", 1, address, backend, stop, MANY)
    assert victim.popen.wait(WITHIN) == -signal.SIGKILL
    last = victim.steps()[-1]["step"]
    survivor.until(taken(1, last + MANY))
    stop_soon(stop, survivor)
    survivor.end()
    failed = [s for s in survivor.steps() if not s["committed"]]
    assert [(s["step"], s["failure"]) for s in failed] == [(last, "PeerLostError")]
