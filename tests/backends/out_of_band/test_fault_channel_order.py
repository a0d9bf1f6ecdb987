"""Messages of a fault channel in unlucky orders, which docs/design/models/fault_channel.py has found."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tests.eventually import eventually
from unicomm._core import FaultCode
from unicomm.backends.out_of_band import fault_channel, wire
from unicomm.backends.out_of_band.channel_thread import FOREVER
from unicomm.backends.out_of_band.fault_channel import FaultChannel
from unicomm.backends.out_of_band.operation import Operation
from unicomm.comms.failures.faults import Fault

pytestmark = pytest.mark.timeout(90)


def heard(s: socket.socket) -> Iterator[wire.Message]:
    """The messages that a rank played by the test receives."""
    s.settimeout(30)
    inbox = wire.Inbox()
    while data := s.recv(4096):
        yield from inbox.feed(data)


def test_a_rank_that_leaves_because_of_a_fault_is_not_taken_for_its_cause():
    """Rank 0 tells rank 1 of its fault, is slow to tell rank 2, and rank 1 leaves in between."""
    (zero_one, one_zero), (zero_two, two_zero), (one_two, two_one) = (socket.socketpair() for _ in range(3))
    one = FaultChannel({0: one_zero, 2: one_two}, 1, lambda: None)
    two = FaultChannel({0: two_zero, 1: two_one}, 2, lambda: None)
    try:
        two.begin(Operation("barrier", 1, 30.0, FOREVER))
        fault = wire.encode(Fault(FaultCode.ABORTED, 0, (0,)))
        zero_one.send(fault)
        eventually(lambda: one.fault is not None)
        one.close()
        eventually(lambda: 1 not in dict(two.sockets()))
        zero_two.send(fault)
        eventually(lambda: two.fault is not None)
        assert two.fault is not None
        assert (two.fault.code, two.fault.named) == (FaultCode.ABORTED, [0])
    finally:
        two.close()
        for s in (zero_one, zero_two):
            s.close()


def test_a_rank_whose_teller_died_is_not_awaited_for_ever():
    """Rank 0 tells only rank 1 of its fault: rank 1 passes it on before it leaves."""
    (zero_one, one_zero), (zero_two, two_zero), (one_two, two_one) = (socket.socketpair() for _ in range(3))
    one = FaultChannel({0: one_zero, 2: one_two}, 1, lambda: None)
    two = FaultChannel({0: two_zero, 1: two_one}, 2, lambda: None)
    try:
        two.begin(Operation("barrier", 1, 30.0, FOREVER))
        zero_one.send(wire.encode(Fault(FaultCode.ABORTED, 0, (0,))))
        eventually(lambda: one.fault is not None)
        one.close()
        for s in (zero_one, zero_two):
            s.close()
        eventually(lambda: two.fault is not None)
        assert two.fault is not None
        assert (two.fault.code, two.fault.by, two.fault.named) == (FaultCode.ABORTED, 0, [0])
    finally:
        two.close()


def test_an_answer_to_an_earlier_question_does_not_count(monkeypatch):
    """Rank 1 answers a question about collective 1 only when rank 0 asks about collective 2."""
    monkeypatch.setattr(fault_channel, "ANSWER", 30.0)
    mine, theirs = socket.socketpair()
    zero = FaultChannel({1: mine}, 0, lambda: None)
    try:
        messages = heard(theirs)
        zero.begin(Operation("barrier", 1, 0.1, 0.0))
        first = next(messages)
        zero.end()
        zero.begin(Operation("barrier", 2, 0.1, 0.0))
        second = next(messages)
        assert isinstance(first, wire.Ask)
        assert isinstance(second, wire.Ask)
        # The reply to the question shows that the answer has been read.
        theirs.send(
            wire.encode(wire.Here(1, "", 0, 0, 0, 0, "", about=first.about)) + wire.encode(wire.Ask())
        )
        assert isinstance(next(messages), wire.Here)
        theirs.send(wire.encode(wire.Here(2, "barrier", 0, 0, 0, 0, "", about=second.about)))
        eventually(lambda: zero.fault is not None)
        assert zero.fault is not None
        assert zero.fault.named == []  # rank 1 was in the collective when it was asked
    finally:
        zero.close()
        theirs.close()
