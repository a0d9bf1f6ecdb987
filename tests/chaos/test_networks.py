"""Jobs whose network fails, and what counts as good: a part of what `make networks` plays."""

import socket

import pytest
import torch
from torch.distributed import HashStore

import unicomm
from tests.chaos.networks import CLOSING, FAULTS, PLACEMENT, Round, play, struck, table, wrong
from tests.threads import results
from tools.namespaces import why_not

NAMESPACES = pytest.mark.skipif(bool(why_not()), reason=f"no network namespaces: {why_not()}")


@NAMESPACES
@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("fault", "backend"), [("down 5 s", "hosts"), ("reordering", "gloo")])
def test_a_job_survives_what_it_has_to(fault, backend):
    done = play(fault, backend, seed=1)
    assert done.wrong == []
    assert [said["outcome"] for said in done.ranks] == ["right"] * len(PLACEMENT)


@NAMESPACES
@pytest.mark.processes
@pytest.mark.timeout(300)
def test_a_host_that_is_gone_is_named_in_time():
    done = play("one way 60 s", "gloo", seed=2)
    assert done.wrong == []
    assert {said["outcome"] for said in done.ranks} == {"PeerLostError"}


def told(outcome, *culprits, when=5.0, closed=0.1):
    return {
        "outcome": outcome,
        "culprits": list(culprits),
        "text": "",
        "when": when,
        "closed": closed,
        "steps": 9,
        "longest": 0.1,
    }


@pytest.mark.parametrize(
    ("fault", "said", "why"),
    [
        ("down 60 s", told("PeerLostError", 2), None),
        ("down 60 s", told("right"), None),
        ("down 5 s", told("PeerLostError", 2), "only slow"),
        ("down 60 s", told("WrongDataError"), "WrongDataError"),
        ("down 60 s", told("PeerLostError"), "nobody"),
        ("down 60 s", told("PeerLostError", 1), "own host"),
        ("down 60 s", told("PeerLostError", 2, when=FAULTS["down 60 s"].within + 1), "after the fault"),
        ("down 60 s", told("PeerLostError", 2, closed=CLOSING + 1), "give the communicator up"),
    ],
)
def test_what_counts_as_good(fault, said, why):
    found = wrong(FAULTS[fault], 0.0, 0, said)
    assert len(found) == (why is not None)
    assert why is None or why in found[0]


@pytest.mark.parametrize(("longest", "noticed"), [(0.1, False), (5.5, True)])
def test_an_outage_that_nobody_notices_has_not_struck(longest, noticed):
    assert struck(FAULTS["down 5 s"], [told("right") | {"longest": longest}]) is noticed
    assert struck(FAULTS["loss"], [told("right") | {"longest": longest}])


def test_the_page_has_a_row_for_each_fault_and_backend():
    rounds = [
        Round("down 60 s", "hosts", 1, [told("PeerLostError", 2, when=20.0)] * 4, struck=4.0),
        Round("loss", "gloo", 1, [told("right")] * 4),
    ]
    page = table(rounds)
    assert "| down 60 s | hosts | 1 | PeerLostError 4 | 16.0 s, 16.0 s | 0.1 s |" in page
    assert "| loss | gloo | 1 | right 4 | - | 0.1 s |" in page


@pytest.mark.parametrize(("hints", "seconds"), [(None, 15), ({"host_silence": "60"}, 60)])
def test_how_long_a_host_may_be_silent(hints, seconds, monkeypatch):
    """What the kernel was told about the connections by which ranks watch each other."""
    made, original = [], socket.socket.setsockopt

    def setsockopt(self, *arguments):
        original(self, *arguments)
        if arguments[1] == socket.TCP_USER_TIMEOUT:
            made.append(arguments[2])

    monkeypatch.setattr(socket.socket, "setsockopt", setsockopt)
    store = HashStore()

    def rank(number):
        cpu = torch.device("cpu")
        unicomm.new_comm("gloo", cpu, name="s", store=store, rank=number, size=2, hints=hints).finalize()

    results([lambda n=n: rank(n) for n in range(2)])
    assert made
    assert set(made) == {1000 * seconds}


@pytest.mark.parametrize("text", ["3", "nan", "soon", "1e9"])
def test_a_silence_that_cannot_be(text):
    with pytest.raises(unicomm.InvalidArgumentError, match="host_silence"):
        unicomm.new_comm("gloo", torch.device("cpu"), name="s", rank=0, size=1, hints={"host_silence": text})
