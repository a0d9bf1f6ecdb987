"""Real processes on hosts that share no memory and no loopback: network namespaces with their own pids."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.backends.hosts.between import BETWEEN
from tests.backends.hosts.namespace_job import PORT, PROGRAMS, Job
from tools import namespaces

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(bool(namespaces.why_not()), reason=f"no namespaces: {namespaces.why_not()}"),
]


@pytest.fixture
def job(tmp_path):
    """`job(n)`: an empty job on n hosts."""
    open_jobs = []

    def make(n, only_ipv6=False):
        hosts = namespaces.Namespaces(n, only_ipv6)
        hosts.__enter__()
        open_jobs.append(hosts)
        made = Job(hosts, tmp_path)
        made.__enter__()
        open_jobs.append(made)
        return made

    yield make
    for each in reversed(open_jobs):
        each.__exit__(None, None, None)


def test_torchrun_with_the_switch_on_two_hosts(job, tmp_path):
    """A program of torch.distributed, unchanged; its groups are within a host, across, and both."""
    torchrun = job(2)
    for host in (0, 1):
        torchrun.start(
            host,
            *("-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={host}", "--nproc-per-node=2"),
            *(f"--master-addr={torchrun.hosts.address(0)}", f"--master-port={PORT}"),
            PROGRAMS / "groups.py",
            tmp_path,
            TORCH_DISTRIBUTED_USE_TORCHCOMMS=1,
        )
    assert [process.wait() for process in torchrun.processes] == [0, 0], str(torchrun)
    said = [(tmp_path / f"{rank}.txt").read_text() for rank in range(4)]
    assert said == [
        f"hosts shm - {BETWEEN} hosts",
        "hosts shm - - hosts",
        f"hosts - shm {BETWEEN} -",
        "hosts - shm - hosts",
    ]


@pytest.mark.parametrize("way", ["gloo", "auto", "given", "init_process_group", "reconfigure"])
def test_hosts_without_ipv4(job, way):
    """The job's store, a store that the program opens, Gloo's connections and init handles."""
    ranks = job(2, only_ipv6=True)
    for rank in (0, 1):
        ranks.start(
            rank,
            PROGRAMS / "ipv6.py",
            way,
            RANK=rank,
            WORLD_SIZE=2,
            LOCAL_RANK=0,
            LOCAL_WORLD_SIZE=1,
            MASTER_ADDR=ranks.hosts.address(0),
            MASTER_PORT=PORT,
            UNICOMM_INTERFACE="eth0" if way == "reconfigure" else "",
            TORCH_DISTRIBUTED_USE_TORCHCOMMS=1,
        )
    for rank in (0, 1):
        assert ranks.hear(rank) == [3.0, 3.0]
    assert [process.wait() for process in ranks.processes] == [0, 0], str(ranks)


def test_three_uneven_hosts(job):
    """Ranks in no order over the hosts: conformance, splits of each kind and messages of both."""
    three = job(3)
    placement = [0, 1, 0, 2, 1, 1]
    three.start_ranks(placement, "conform.py")
    said = [three.hear(rank) for rank in range(len(placement))]
    assert {one["hosts"] for one in said} == {"[[0, 2], [1, 4, 5], [3]]"}
    assert all(one["cases"] == said[0]["cases"] > 100 for one in said)
    assert [one["address"] for one in said] == [three.hosts.address(host) for host in placement]
    assert [process.wait() for process in three.processes] == [0] * len(placement), str(three)


def test_killed_ranks_are_named_on_all_hosts(job):
    """First a rank that is no leader, then, of those that are left, the leader of the other host."""
    two = job(2)
    two.start_ranks([0, 0, 1, 1, 1], "killed.py")
    for rank in range(5):
        assert two.hear(rank) == "ready"
    for victim, survivors in ((4, (0, 1, 2, 3)), (2, (0, 1, 3))):
        for rank in survivors:
            two.tell(rank)
            assert two.hear(rank) == "calling"
        kill(two, victim)
        for rank in survivors:
            said = two.hear(rank)
            assert said[:2] == ["PeerLostError", [victim]], f"rank {rank}: {said}"


def kill(job, rank):
    """Ends the rank itself: what the job has started is `nsenter`, which waits for it outside."""
    parent = job.processes[rank].pid
    child = int(Path(f"/proc/{parent}/task/{parent}/children").read_text())
    os.kill(child, signal.SIGKILL)


def test_a_host_needs_no_name(job):
    """Its own name means 127.0.0.1 on most machines: the address comes from the way to the others."""
    lonely = job(1)
    lonely.start(0, PROGRAMS / "address.py")
    assert lonely.hear(0) == lonely.hosts.address(0)


def test_nothing_is_left():
    with namespaces.Namespaces(2) as hosts:
        names = set(hosts.names)
        assert names <= set(os.listdir("/run/netns"))
        sleeper = subprocess.Popen([*hosts.enter(1), "sleep", "infinity"])
    assert sleeper.wait(30) != 0
    assert not names & set(os.listdir("/run/netns"))
