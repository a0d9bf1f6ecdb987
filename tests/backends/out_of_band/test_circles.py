"""Ranks that wait for each other out of band: at the deadline every member is named."""

from __future__ import annotations

from typing import Any

import pytest

from tests.backends.waiting_ranks import Program, message_and_collective, name_every_member, ring
from unicomm.backends.out_of_band.circles import find_circle

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


@pytest.mark.parametrize(("backend", "hints"), BACKENDS)
@pytest.mark.parametrize(("program", "members"), [(ring, {0, 1, 2}), (message_and_collective, {0})])
def test_every_member_is_named(backend: str, hints: Any, program: Program, members: set[int]):
    name_every_member(lambda comm: program(comm, 1.5), members, backend, hints)
