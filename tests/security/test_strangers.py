"""Strangers at the sockets of a job: most reach no store, and what they write into one is not run."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tests.backends.hosts.namespace_job import PORT, Job
from tests.commands import clean_environment, run
from tests.processes import forked_interpreters
from tests.security import listeners, stranger
from tests.security.listeners import Listener
from tools import namespaces

pytestmark = pytest.mark.processes

WITHIN = 250.0  # seconds that a job may take: a hang, not a slow machine
WAITS = Path(__file__).parent / "programs/waits.py"


@pytest.mark.parametrize("options", [(), ("--standalone",), ("--rdzv-backend=c10d",)], ids=repr)
def test_a_stranger_on_the_host_of_a_launcher(options, tmp_path, eventually):
    """Whoever gets at the launcher's stores replaces the state of its rendezvous by a pickle of his own.

    torch's agent reads the state at the latest when the job ends, so the file would be there then.
    """
    trap = tmp_path / "made by the pickle"
    command = [sys.executable, "-m", "unicomm", "run", "--nproc-per-node=2", "--no-hub", *options]
    words = [*map(str, (*command, WAITS, tmp_path))]
    with forked_interpreters.Popen(words, env=clean_environment()) as launcher:
        try:
            eventually(lambda: {"0", "1"} <= {path.name for path in tmp_path.iterdir()}, WITHIN)
            found = listeners.listeners(listeners.family(launcher.pid))
            assert {one.bound for one in found} <= {"loopback"}, found
            replaced = []
            for one in found:
                replaced += stranger.attack("127.0.0.1", one.port, trap)["replaced"]
            (tmp_path / "go").touch()
            assert launcher.wait(WITHIN) == 0
        finally:
            (tmp_path / "go").touch()
            launcher.terminate()
            launcher.wait(WITHIN)
    assert not trap.exists(), f"the launcher has run it, from {replaced}"
    assert not replaced
    pickle.loads(stranger.evil(trap))
    assert trap.is_dir(), "the pickle is harmless: this test would prove nothing"


# --- several hosts ------------------------------------------------------------------------------------

TOKEN = "a token that the stranger does not have"
several = pytest.mark.skipif(bool(namespaces.why_not()), reason=f"no namespaces: {namespaces.why_not()}")


class OnHosts:
    """A job of `unicomm run` on hosts 0 and 1, whose ranks wait; host 2 is the stranger's."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.job, self.folder = job, folder

    def start(self, host: int, *options: object, token: str = TOKEN) -> None:
        endpoint = f"--rdzv-endpoint={self.job.hosts.address(0)}:{PORT}"
        launch = ("-m", "unicomm", "run", "--nnodes=2", "--rdzv-backend=c10d", endpoint, *options)
        self.job.start(host, *launch, WAITS, self.folder, UNICOMM_JOB_TOKEN=token)

    def ended(self) -> list[int]:
        (self.folder / "go").touch()
        return [process.wait(WITHIN) for process in self.job.processes]

    def said(self, host: int) -> str:
        return " ".join(self.job._log(host).read_text().split())

    def listeners(self, host: int) -> list[Listener]:
        command = [*self.job.hosts.enter(host), sys.executable, "-m", "tests.security.listeners"]
        done = run(command, WITHIN, check=True)
        return [Listener(*one) for one, _ in json.loads(done.stdout)]

    def attack(self, trap: Path, targets: Sequence[str]) -> dict[str, Any]:
        """What the stranger says of its attacks, by target."""
        command = [*self.job.hosts.enter(2), sys.executable, "-m", "tests.security.stranger", trap]
        told: dict[str, Any] = json.loads(run([*command, *targets], WITHIN, check=True).stdout)
        return told


@contextlib.contextmanager
def _hosts(place: Path, fresh: bool) -> Iterator[OnHosts]:
    os.chdir(ROOT)
    with namespaces.Namespaces(3) as hosts, Job(hosts, place, 2 * WITHIN, fresh) as job:
        folder = place / "ranks"
        folder.mkdir()
        yield OnHosts(job, folder)


@pytest.fixture
def on_hosts(tmp_path: Path) -> Iterator[OnHosts]:
    with _hosts(tmp_path, fresh=False) as made:
        yield made


@pytest.fixture
def on_hosts_with_names(tmp_path: Path) -> Iterator[OnHosts]:
    """The same with new interpreters, whose command lines tell what they are."""
    with _hosts(tmp_path, fresh=True) as made:
        yield made


def up(on_hosts: OnHosts) -> bool:
    return {"0", "1"} <= {path.name for path in on_hosts.folder.iterdir()}


@several
@pytest.mark.timeout(900)
def test_a_stranger_on_the_network_of_a_job(
    on_hosts_with_names: OnHosts, tmp_path: Path, eventually: Callable[..., None]
) -> None:
    """It reaches the rendezvous, which answers nobody without the token, and no store at all."""
    on_hosts = on_hosts_with_names
    for host in (0, 1):
        on_hosts.start(host)
    eventually(lambda: up(on_hosts), WITHIN)
    trap = tmp_path / "made by the pickle"
    found = {}
    for host in (0, 1):
        for one in on_hosts.listeners(host):
            assert one.bound in ("one address", "loopback"), one
            if one.bound == "one address":
                found[f"{one.address}:{one.port}"] = one.process
    told = on_hosts.attack(trap, list(found))
    assert on_hosts.ended() == [0, 0], str(on_hosts.job)
    endpoint = f"{on_hosts.job.hosts.address(0)}:{PORT}"
    assert found.pop(endpoint) == "launcher"
    assert told.pop(endpoint) == {"reached": True, "store": False, "replaced": [], "stored": False}
    # The store of the ranks, on one of the hosts: the kernel drops what comes from a stranger.
    assert [told[target]["reached"] for target, process in found.items() if process == "launcher"] == [False]
    assert not any(each["store"] or each["stored"] for each in told.values()), told
    assert not trap.exists()
    assert "no token" not in on_hosts.said(0)


@several
@pytest.mark.timeout(900)
def test_a_stranger_at_a_job_without_a_token(
    on_hosts: OnHosts, tmp_path: Path, eventually: Callable[..., None]
) -> None:
    """It can end the job, which the launcher warns of; but what it writes is not run."""
    for host in (0, 1):
        on_hosts.start(host, token="")
    eventually(lambda: up(on_hosts), WITHIN)
    trap = tmp_path / "made by the pickle"
    endpoint = f"{on_hosts.job.hosts.address(0)}:{PORT}"
    assert on_hosts.attack(trap, [endpoint])[endpoint] == {
        "reached": True,
        "store": False,
        "replaced": [],
        "stored": True,
    }

    def codes() -> set[int | None]:
        return {process.poll() for process in on_hosts.job.processes}

    # The ranks wait: only a launcher whose ranks run looks at the state (once a second).
    eventually(lambda: 1 in codes() or None not in codes(), WITHIN)
    assert not trap.exists()
    assert codes() <= {1, None}
    assert 1 in codes(), str(on_hosts.job)  # the state was replaced, and it was noticed
    said = " ".join(map(on_hosts.said, (0, 1)))
    assert "was not written by `unicomm run`" in said
    assert "this job has no token" in said


@several
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("second", "why"),
    [("the token of another job", "the host has another token"), ("", "the host has a token")],
)
def test_hosts_with_different_tokens(on_hosts: OnHosts, tmp_path: Path, second: str, why: str) -> None:
    """The second host ends at once, and says what to do; the first one waits for the right one."""
    on_hosts.start(0)
    began = time.monotonic()
    on_hosts.start(1, token=second)
    assert on_hosts.job.processes[1].wait(WITHIN) == 1, str(on_hosts.job)
    assert time.monotonic() - began < 60  # torch waits ten minutes for hosts
    assert re.search(
        f"the tokens of the job's hosts differ: {why} at .*set UNICOMM_JOB_TOKEN", on_hosts.said(1)
    )
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    on_hosts.start(1, f"--token-file={tmp_path / 'token'}", token="")
    (on_hosts.folder / "go").touch()
    assert [on_hosts.job.processes[i].wait(WITHIN) for i in (0, 2)] == [0, 0], str(on_hosts.job)
