"""Ranks that wait for each other out of band: at the deadline every member is named."""

from __future__ import annotations

from typing import Any

import pytest

from tests.backends.waiting_ranks import Program, message_and_collective, name_every_member, ring
from unicomm._core import Counts
from unicomm.backends.out_of_band.circles import Circles, find_circle
from unicomm.backends.out_of_band.operation import Awaited, Operation
from unicomm.backends.out_of_band.wire import Here

BACKENDS = [("gloo", None), ("auto", {"hosts": "a,b,c,d"})]  # several ranks a host: test_circles_of_hosts.py


@pytest.mark.parametrize(
    ("waits", "circle"),
    [
        ({0: [1], 1: [2], 2: [0]}, [0, 1, 2]),
        ({3: [1], 1: [2], 2: [1]}, [1, 2]),  # the asking rank waits for a circle
        ({0: [1, 2], 1: [], 2: [0]}, [0, 2]),
        ({0: [1], 1: [2]}, []),
        ({}, []),
    ],
)
def test_circles_of_waits(waits, circle):
    assert find_circle(waits, next(iter(waits), 0)) == circle


def here(inside: str, *awaits: Awaited, sent: int = 0, taken: int = 0, entered: int = 0) -> Here:
    return Here(entered, inside, sent, taken, 0, 0, "a.py:1", awaits)


def circles_of_others(*awaits: Awaited, third: Here | None = None) -> Circles:
    """Rank 0 waits for rank 1, which waits for rank 2; that one lists the messages `awaits`."""
    answers = {1: here("recv", Awaited(2, False, 1, 8)), 2: here("batch", *awaits)}
    if third is not None:
        answers[3] = third
    return Circles(0, Counts(4), Operation("recv", 0, 1.0, 0.0, [Awaited(1, False, 1, 8)]), answers)


TO_1, FROM_3 = Awaited(1, True, 3, 8), Awaited(3, False, 1, 8)


def test_a_circle_is_certain_when_every_awaited_rank_has_said_that_it_has_not_begun():
    circles = circles_of_others(TO_1)
    assert circles.find() == [1, 2]
    asked = circles.uncertain([1, 2])
    assert asked == {2: 1, 1: 2}
    circles.hear(asked, {1: here("recv", taken=2), 2: here("batch")})
    assert circles.find() == [1, 2]
    assert circles.uncertain([1, 2]) == {}


@pytest.mark.parametrize("answers", [{1: here("recv", taken=3), 2: here("batch")}, {2: here("batch")}, {}])
def test_a_message_that_is_through_is_no_wait(answers):
    """Nor is one whose other end does not say where it is."""
    circles = circles_of_others(TO_1)
    circles.hear(circles.uncertain(circles.find()), answers)
    assert circles.find() == []


def test_another_circle_is_found_when_the_first_is_none():
    """Rank 1 has taken the message of rank 2. Rank 2 also waits for rank 3, which waits for rank 1."""
    circles = circles_of_others(TO_1, FROM_3, third=here("recv", Awaited(1, False, 1, 8)))
    assert circles.find() == [1, 2]
    while unsure := circles.uncertain(circles.find()):
        circles.hear(unsure, {1: here("recv", taken=3), 2: here("batch"), 3: here("recv")})
    assert circles.find() == [1, 2, 3]


def test_messages_with_tags_make_a_circle_only_alone():
    """They have no numbers. Of several, any may be over."""
    tagged = Awaited(1, True, 0, 8, tag=5)
    for awaits, found in (((tagged,), [1, 2]), ((tagged, Awaited(3, True, 0, 8, tag=5)), [])):
        circles = circles_of_others(*awaits)
        circles.hear(circles.uncertain(circles.find()), {1: here("recv"), 2: here("batch")})
        assert circles.find() == found


def test_a_rank_that_has_joined_a_collective_meanwhile_is_no_longer_awaited():
    answers = {1: here("barrier", entered=4), 2: here("recv", Awaited(1, False, 1, 8), entered=3)}
    for entered, found in ((3, [1, 2]), (4, [])):
        operation = Operation("recv", 0, 1.0, 0.0, [Awaited(1, False, 1, 8)])
        counts = Counts(3)
        counts.entered = 4
        circles = Circles(0, counts, operation, answers)
        asked = circles.uncertain(circles.find())
        circles.hear(asked, {1: here("barrier", entered=4), 2: here("recv", entered=entered)})
        assert circles.find() == found


@pytest.mark.parametrize(("backend", "hints"), BACKENDS)
@pytest.mark.parametrize(("program", "members"), [(ring, {0, 1, 2}), (message_and_collective, {0})])
def test_every_member_is_named(backend: str, hints: Any, program: Program, members: set[int]):
    name_every_member(lambda comm: program(comm, 1.5), members, backend, hints)
