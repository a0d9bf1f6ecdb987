"""`unicomm doctor --network`: what is measured between hosts, and what counts as off."""

import itertools
import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.commands import clean_environment
from tools.namespaces import Namespaces, why_not
from tools.relay import Relay
from unicomm.comms.membership.environment import Environment
from unicomm.launch.cli import app
from unicomm.launch.doctor import network
from unicomm.launch.doctor.network import MOST_ROUNDS, Pair, Place, Way, look, rounds
from unicomm.launch.doctor.network_report import of_pairs, of_ways

UNICOMM = Path(sys.executable).with_name("unicomm")
PLACES = [Place(f"node{i}", f"10.0.0.{i}", f"10.0.0.{i}", "eth0", 9000, 10.0) for i in range(4)]
GOOD = [
    Pair(*pair, round_trip=5e-5, slowest=1e-4, there=9e9, back=9e9, path_mtu=9000)
    for pair in itertools.combinations(range(4), 2)
]


def found(places=PLACES, pairs=GOOD):
    return [(finding.what, finding.detail) for finding in of_pairs(places, pairs)]


def changed(at, **what):
    return [replace(pair, **what) if i == at else pair for i, pair in enumerate(GOOD)]


def test_nothing_is_off_between_equal_hosts():
    assert found() == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_silent_store_keeps_nobody_when_all_is_measured(monkeypatch, rank):
    class Silent:
        def __init__(self):
            self.answer, self.answers = threading.Event(), []

        def add(self, key, amount):
            self.answers.append(self.answer.wait(20))
            return 1

    monkeypatch.setattr(network, "_PATIENCE", 0.1)
    store = Silent()
    network._leave(store, Environment(rank, 2, None, None, "test", ""))
    assert store.answers == []
    store.answer.set()


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ({"trouble": "10.0.0.2 port 4711: no answer"}, "not connected"),
        ({"round_trip": 1e-3, "slowest": 2e-3}, "round trip 1.0 ms"),
        ({"slowest": 0.2}, "one message of 100 takes 200.0 ms"),
        ({"resent": 0.02}, "2.00% of the packets"),
        ({"there": 3e9, "back": 9e9}, "3.00 Gbit/s one way, 9.00 Gbit/s the other"),
        ({"there": 5e9, "back": 5e9}, "5.00 Gbit/s over interfaces of 10 Gbit/s"),
        ({"path_mtu": 1500}, "the path carries 1500 bytes, the interfaces 9000"),
    ],
)
def test_a_bad_pair_is_named(what, says):
    said = found(pairs=changed(1, **what))
    assert {name for name, _ in said} == {"node0 - node2"}
    assert any(says in detail for _, detail in said), said


def test_a_slow_pair_of_interfaces_without_a_speed():
    places = [replace(place, gigabits=None) for place in PLACES]
    said = found(places, changed(5, there=1e9, back=1e9))
    assert said == [("node2 - node3", "1.00 Gbit/s, where the median of all pairs is 9.00 Gbit/s")]


def test_bad_hosts_are_named():
    assert found([replace(PLACES[0], mtu=1500), *PLACES[1:]])[0][0] == "MTU"
    assert found([replace(PLACES[0], address=""), *PLACES[1:]])[0][0] == "node0"
    named = [replace(place, own_name="127.0.1.1") for place in PLACES]
    (loopback,) = of_pairs(named, GOOD)
    assert (loopback.what, loopback.ok) == ("node0, node1, node2 and 1 more", None)
    paced = [replace(place, congestion="bbr" if i > 1 else "cubic") for i, place in enumerate(PLACES)]
    (remark,) = of_pairs(paced, GOOD)
    assert (remark.what, remark.ok) == ("node2, node3", None)
    assert "bbr" in remark.detail
    assert "net.ipv4.tcp_congestion_control=cubic" in remark.cure


def test_hosts_of_one_name_are_told_apart():
    places = [replace(place, hostname="node") for place in PLACES]
    assert found(places, changed(0, resent=0.5))[0][0] == "node (10.0.0.0) - node (10.0.0.1)"


@pytest.mark.parametrize("hosts", range(2, 12))
def test_all_pairs_meet_once_and_no_host_twice_in_a_round(hosts):
    met = list(rounds(hosts))
    assert sorted(itertools.chain(*met)) == list(itertools.combinations(range(hosts), 2))
    for pairs in met:
        assert len(set(itertools.chain(*pairs))) == 2 * len(pairs)


def test_a_large_job_is_measured_in_part():
    met = list(rounds(1000))
    assert len(met) == MOST_ROUNDS
    assert set(itertools.chain(*itertools.chain(*met))) == set(range(1000))


def test_ways_that_lead_nowhere():
    said = {f.what: f.detail for f in of_ways(look(["127.0.0.1", "no.such.host.invalid"]))}
    assert "loopback" in said["127.0.0.1"]
    assert "has no address" in said["no.such.host.invalid"]
    assert list(of_ways([Way("a", "", "10.0.0.1", "10.0.0.2", "eth0", 1500, "refused", 1e-4)])) == []
    (silent,) = of_ways([Way("a", "", "10.0.0.1", "10.0.0.2", "eth0", 1500, "no answer")])
    assert silent.detail == "10.0.0.1: no answer"


@pytest.mark.parametrize(("arguments", "code"), [(["node1"], 2), (["--network"], 2)])
def test_options_that_cannot_be(arguments, code):
    assert (
        CliRunner(env=dict.fromkeys(("RANK", "WORLD_SIZE"))).invoke(app, ["doctor", *arguments]).exit_code
        == code
    )


@pytest.mark.processes
@pytest.mark.timeout(240)
@pytest.mark.skipif(bool(why_not()), reason=f"no network namespaces: {why_not()}")
def test_the_bad_path_between_three_hosts_is_found(tmp_path):
    """The rank beside the leader of a host takes part without measuring."""
    with Namespaces(3, congestion="reno") as hosts, Relay(hosts) as network:
        network.set(1, 2, rate=4e6)  # far below what the relay serves on a busy machine
        where = [0, 1, 2, 2]
        ranks = []
        for rank, host in enumerate(where):
            more = {"RANK": rank, "WORLD_SIZE": len(where), "LOCAL_RANK": where[:rank].count(host)}
            more |= {"MASTER_ADDR": hosts.address(0), "MASTER_PORT": 29500}
            ranks.append(
                subprocess.Popen(
                    [*hosts.enter(host), str(UNICOMM), "doctor", "--network", "--json"],
                    env=clean_environment() | {name: str(value) for name, value in more.items()},
                    stdout=subprocess.PIPE,
                    stderr=(tmp_path / f"{rank}").open("w"),
                    text=True,
                )
            )
        try:
            said = [rank.communicate(timeout=100)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        report = json.loads(said[0])
        looked = subprocess.run(
            [*hosts.enter(0), str(UNICOMM), "doctor", "--network", "--json", hosts.address(1), "10.77.0.99"],
            env=clean_environment(),
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    assert [rank.returncode for rank in ranks] == [1, 0, 0, 0]
    assert said[1:] == ["", "", ""]
    assert [place["address"] for place in report["hosts"]] == ["10.77.0.1", "10.77.0.2", "10.77.0.3"]
    assert {place["congestion"] for place in report["hosts"]} == {"reno"}
    slow = min(report["pairs"], key=lambda pair: pair["there"])
    assert (slow["one"], slow["other"], slow["path_mtu"]) == (1, 2, 1500)
    assert slow["there"] < 6e6
    name = f"{os.uname().nodename} (10.77.0.2) - {os.uname().nodename} (10.77.0.3)"
    assert any(f["what"] == name and "one way" in f["detail"] for f in report["findings"])
    assert looked.returncode == 1
    (one, other) = json.loads(looked.stdout)["ways"]
    assert (one["source"], one["interface"], one["answer"]) == (
        "10.77.0.1",
        "eth0",
        "nothing listens at port 29500",
    )
    assert other["round_trip"] is None
