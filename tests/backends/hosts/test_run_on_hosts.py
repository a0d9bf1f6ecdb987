"""`unicomm run` on several hosts, which are network namespaces: each is told the same, and no more."""

import json
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests import ROOT
from tests.backends.hosts.between import BETWEEN
from tests.backends.hosts.namespace_job import PORT, PROGRAMS, WITHIN, Job
from tests.commands import run
from tools import namespaces
from unicomm.flight_recorder.table.load import load

FAULTS = ROOT / "tests/processes/programs/torch_faults.py"

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(bool(namespaces.why_not()), reason=f"no namespaces: {namespaces.why_not()}"),
]


@pytest.fixture
def job(tmp_path):
    """`job(n)`: an empty job on n hosts, which have no IPv4 between them with `only_ipv6`."""
    opened = []

    def make(n, only_ipv6=False):
        hosts = namespaces.Namespaces(n, only_ipv6)
        hosts.__enter__()
        opened.append(hosts)
        opened.append(Job(hosts, tmp_path).__enter__())
        return opened[-1]

    yield make
    for each in reversed(opened):
        each.__exit__(None, None, None)


def start(job, host, *arguments, **more):
    endpoint = f"--rdzv-endpoint={job.hosts.address(0)}:{PORT}"
    options = ("--rdzv-backend=c10d", endpoint, f"--nnodes={len(job.hosts.names)}")
    job.start(host, "-m", "unicomm", "run", *options, *arguments, **more)


@pytest.mark.parametrize("rendezvous", ["c10d", "static"])
def test_hosts_without_ipv4_meet(job, tmp_path, rendezvous):
    """The rendezvous, torch's store, the hubs, and groups within a host, across, and of both."""
    two = job(2, only_ipv6=True)
    address = two.hosts.address(0)
    where = {
        "c10d": ("--rdzv-backend=c10d", f"--rdzv-endpoint=[{address}]:{PORT}"),
        "static": (f"--master-addr={address}", f"--master-port={PORT}"),
    }[rendezvous]
    token = {"UNICOMM_JOB_TOKEN": "a token of the job"}
    for host in (0, 1):
        options = ("--nnodes=2", f"--node-rank={host}", "--nproc-per-node=2", "--hub", *where)
        two.start(host, "-m", "unicomm", "run", *options, PROGRAMS / "groups.py", tmp_path, **token)
    assert [process.wait() for process in two.processes] == [0, 0], str(two)
    assert (tmp_path / "0.txt").read_text() == f"hosts shm - {BETWEEN} hosts"
    assert (tmp_path / "3.txt").read_text() == "hosts - shm - hosts"
    assert f"--connect [{address}]:" in log(two, 0)
    assert "no hub" not in log(two, 0) + log(two, 1)


def log(job, host):
    return job._log(host).read_text()


def test_the_demo_trains(job, tmp_path):
    """Two hosts of two ranks: memory within, Gloo between. Neither a name nor an address is said twice."""
    two, result = job(2), tmp_path / "result.json"
    program = (ROOT / "examples/ddp.py", "--epochs=1", "--width=128", f"--result={result}")
    for host in (0, 1):
        start(two, host, "--nproc-per-node=2", *program)
    assert [process.wait() for process in two.processes] == [0, 0], str(two)
    figures = json.loads(result.read_text())
    assert figures["group"] == "UnicommProcessGroup"
    assert figures["identical"]
    assert figures["accuracy"] > 0.5
    assert "(hosts), 4 ranks" in log(two, 0) + log(two, 1)
    assert not list(tmp_path.glob("rings*/run-*")), "rings were left"


def test_three_hosts_by_gloo_and_interfaces_by_name(job, tmp_path):
    """What a host is told of its interface is its own affair; the others go by the way to the endpoint."""
    three = job(3)
    program = ("--nproc-per-node=1", "--backend=gloo", FAULTS, "none", 9)
    start(three, 0, *program)
    start(three, 1, "--interface=eth0", *program)
    start(three, 2, *program, UNICOMM_INTERFACE="eth0", GLOO_SOCKET_IFNAME="nonesuch")
    assert [process.wait() for process in three.processes] == [0, 0, 0], str(three)
    assert "(gloo), 3 ranks" in "".join(log(three, host) for host in range(3))
    for process in three.processes:
        assert "UnicommProcessGroup" in process.stdout.read()


def test_a_killed_rank_is_named_on_all_hosts(job, tmp_path, eventually):
    """While it runs the hub of either host shows the ranks of both; then one is killed from outside."""
    pytest.importorskip("zmq")
    two, began = job(2), time.monotonic()
    for host in (0, 1):
        start(two, host, "--nproc-per-node=2", FAULTS, "waits", 2, tmp_path / "pid", host)
    eventually((tmp_path / "pid").exists, WITHIN)
    starting = time.monotonic() - began
    pid, host = (tmp_path / "pid").read_text().split()

    def look(viewer):
        top = [sys.executable, "-m", "unicomm", "trace", "top", "--connect=localhost", "--json"]
        command = [*two.hosts.enter(viewer), *top]
        done = run(command, within=WITHIN)
        jobs = json.loads(done.stdout)["jobs"] if done.returncode == 0 else []
        return jobs and {r["rank"]: r["waits_for"] for r in jobs[0]["ranks"]} == {
            0: [2],
            1: [2],
            2: [],
            3: [2],
        }

    for viewer in (0, 1):
        eventually(lambda viewer=viewer: look(viewer), WITHIN)
    subprocess.run([*two.hosts.enter(int(host)), "kill", "-KILL", pid], check=True, timeout=WITHIN)
    killed = time.monotonic()
    said = {}

    def follow(host):
        said[host] = two.processes[host].wait(), time.monotonic() - killed

    followers = [threading.Thread(target=follow, args=(host,)) for host in (0, 1)]
    for follower in followers:
        follower.start()
    for follower in followers:
        follower.join(WITHIN)
    codes = {host: code for host, (code, _) in said.items()}
    assert codes == {int(host): 128 + signal.SIGKILL, 1 - int(host): 1}, str(two)
    verdict = "Rank 2 was killed by SIGKILL after all_reduce #3"
    for each in (0, 1):
        tail = " ".join(
            log(two, each).partition("what the flight recorder tells")[2].replace("│", " ").split()
        )
        assert verdict in tail, str(two)
        assert "rings of 2 hosts:" in tail
    [folder] = re.findall(r"^rings of 2 hosts: (/.*)$", log(two, 0) + log(two, 1), re.MULTILINE)
    table = load([folder])
    assert sorted(source.rank for source in table.sources) == [0, 1, 2, 3]
    # Ten seconds, or on a machine that is too busy less than it took the job to start: one takes a second or
    # two, the other imports torch six times.
    assert max(seconds for _, seconds in said.values()) < max(10.0, starting), said


def test_each_host_serves_the_metrics_of_its_own_ranks(job, tmp_path, eventually):
    """From the host itself and from the other one, as far as its launcher was asked to listen."""
    two, port = job(2), 9400
    program = ("--nproc-per-node=2", "--no-hub", FAULTS, "waits", 2, tmp_path / "pid")
    start(two, 0, f"--metrics-port={port}", "--metrics-host=0.0.0.0", *program)
    start(two, 1, f"--metrics-port={port}", *program)
    eventually((tmp_path / "pid").exists, WITHIN)
    code = (
        "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=20).read().decode())"
    )

    def scrape(viewer, address):
        url = f"http://{address}:{port}/metrics"
        return run([*two.hosts.enter(viewer), sys.executable, "-c", code, url], within=WITHIN)

    def states(done):
        assert done.returncode == 0, done.stderr
        rows = re.findall(r'unicomm_rank_state\{rank="(\d+)",state="(\w+)"\} 1\.0', done.stdout)
        return {int(rank): state for rank, state in rows}

    def seen():
        mine, other = (states(scrape(host, "127.0.0.1")) for host in (0, 1))
        assert not set(mine) & set(other)
        return mine | other

    waiting = {0: "waiting", 1: "waiting", 2: "running", 3: "waiting"}
    eventually(lambda: seen() == waiting, WITHIN)
    assert len(states(scrape(0, "127.0.0.1"))) == 2
    assert states(scrape(1, two.hosts.address(0))) == states(scrape(0, "127.0.0.1"))
    refused = scrape(0, two.hosts.address(1))
    assert "Connection refused" in refused.stderr
