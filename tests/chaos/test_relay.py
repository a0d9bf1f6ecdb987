"""The network of the network faults: packets are lost, delayed, reordered and limited as it was told."""

import json
import subprocess
import sys

import pytest

from tools.namespaces import Namespaces, why_not
from tools.relay import Relay

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(bool(why_not()), reason=f"no network namespaces: {why_not()}"),
]
PORT = 7007
# Answers each packet. The other program sends numbered ones, and tells the answers' order and times.
ECHO = f"""
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(("0.0.0.0", {PORT}))
print("here", flush=True)
while True:
    data, sender = s.recvfrom(65536)
    s.sendto(data, sender)
"""
ASK = f"""
import json, socket, struct, sys, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(1.5)
count, size, answers = int(sys.argv[2]), int(sys.argv[3]), []
sent = []
for number in range(count):
    sent.append(time.monotonic())
    s.sendto(struct.pack("i", number) + bytes(size), (sys.argv[1], {PORT}))
try:
    while len(answers) < count:
        number = struct.unpack_from("i", s.recv(65536))[0]
        answers.append((number, time.monotonic() - sent[number]))
except TimeoutError:
    pass
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def hosts():
    with Namespaces(2) as made, Relay(made, seed=1) as network:
        echo = [*made.enter(1), sys.executable, "-c", ECHO]
        with subprocess.Popen(echo, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "here\n"
            yield made, network
            process.kill()


@pytest.fixture
def ask(hosts):
    made, network = hosts

    def asked(count, size=100, **path):
        network.set(0, 1, **path)
        words = [*made.enter(0), sys.executable, "-c", ASK, made.address(1), count, size]
        done = subprocess.run([str(w) for w in words], capture_output=True, text=True, timeout=60, check=True)
        return json.loads(done.stdout)

    yield asked
    network.set(0, 1, loss=0.0, delay=0.0, jitter=0.0, rate=None)


def test_nothing_is_lost_or_reordered_without_being_told(ask):
    assert [number for number, _ in ask(100)] == list(range(100))


def test_a_part_of_the_packets_is_lost(ask):
    assert 20 < len(ask(100, loss=0.5)) < 80
    assert ask(3, loss=1.0) == []


def test_packets_are_delayed(ask):
    assert all(seconds > 0.2 for _, seconds in ask(10, delay=0.2))


def test_packets_overtake_each_other(ask):
    numbers = [number for number, _ in ask(100, jitter=0.1)]
    assert sorted(numbers) == list(range(100))
    assert numbers != sorted(numbers)


def test_a_rate_delays_and_then_loses(ask):
    """1 Mbit/s: packets of 1028 bytes of UDP and IP take 8.2 ms each, of which half a second is kept."""
    found = ask(100, size=1000, rate=1e6)
    assert 50 <= len(found) < 100
    assert found[-1][1] > 0.4
