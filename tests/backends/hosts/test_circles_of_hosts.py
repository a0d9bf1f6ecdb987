"""Ranks that wait for each other, within hosts and between: at the first deadline every member is named."""

from __future__ import annotations

import pytest

from tests.backends.hosts.between import use
from tests.backends.waiting_ranks import (
    Program,
    asynchronous_ring,
    batch_and_ring,
    message_and_collective,
    message_and_list,
    name_every_member,
    ring,
)
from unicomm import Communicator

SHORT, LONG = 1.5, 50.0  # seconds that an operation may take


@pytest.mark.parametrize("between", ["tcp", "gloo"])
@pytest.mark.parametrize(
    ("layout", "short"),
    [
        ("a,a,b,b", {0, 1, 2, 3}),
        ("a,a,b,b", {1}),
        ("a,b,a,b", {0}),
        ("a,b,a,b", {2}),
        ("a,b,b,b", {0}),
        ("a,b,b,b", {1}),
    ],
    ids=lambda value: value if isinstance(value, str) else f"deadline of {value}",
)
@pytest.mark.parametrize(
    ("program", "members"),
    [
        (ring, {0, 1, 2}),
        (asynchronous_ring, {0, 1, 2}),
        (batch_and_ring, {0, 2}),
        (message_and_collective, {0}),
        (message_and_list, {0}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_member_is_named(
    program: Program,
    members: set[int],
    layout: str,
    short: set[int],
    between: str,
    monkeypatch: pytest.MonkeyPatch,
):
    use(between, monkeypatch)

    def job(comm: Communicator) -> object:
        comm.set_timeout(SHORT if comm.get_rank() in short else LONG)
        return program(comm, None)  # small operations run in native code then

    for error in name_every_member(job, members, "auto", {"hosts": layout}, LONG):
        for part in ("in barrier", "in reduce", "in all_gather_v"):
            assert part not in str(error), "no operation of the program"
