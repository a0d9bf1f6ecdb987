"""Ranks that wait for each other through several communicators, as processes and as threads of one."""

import importlib.util
import re

import pytest

from tests.processes.rank_processes import PROGRAMS

specification = importlib.util.spec_from_file_location("circles", PROGRAMS / "circles.py")
circles = importlib.util.module_from_spec(specification)
specification.loader.exec_module(circles)

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


def check(name, errors):
    """Every involved rank has said the whole circle, with communicators, numbers and lines."""
    involved = circles.INVOLVED.get(name, (0, 1, 2))
    if name == "two_groups_in_two_orders":  # there are two circles, of rank 0 with each of the others
        assert errors[0][1], errors
        for rank in (1, 2):
            kind, culprits, text = errors[rank]
            assert kind == "DeadlockError", errors
            assert re.search(r"(these ranks|ranks 0, [12]) wait for each other forever", text), errors
        said = [rank for rank in (1, 2) if "these ranks wait" in errors[rank][2]]
        assert said, errors
        involved = (0, said[0])
    for rank in involved:
        kind, culprits, text = errors[rank]
        assert kind == "DeadlockError", errors
        assert culprits, errors
        assert "these ranks wait for each other forever: " in text, errors
        circle = text.split("forever: ")[1].splitlines()[0]
        waits = circle.removeprefix("rank ").split(", rank ")
        assert len(waits) == len(involved), errors
        for wait in waits:
            assert re.search(r" in \w+ (#1 )?(to|from|for) rank \d \(.*circles\.py:\d+\)$", wait), wait
        communicators = {wait.split("'")[1] for wait in waits}
        assert len(communicators) == len(involved), errors


def test_circles_of_threads_are_said_at_once(start):
    """In a process of their own: all of a process's threads count, and a test worker has others."""
    job = start("circles.py", 1, "threads", *circles.CIRCLES)
    for name in circles.CIRCLES:
        (said,) = job.next("errors")
        check(name, [(error["type"], error["culprits"], error["text"]) for error in said["errors"]])
    assert job.end() == [0]


def test_circles_of_processes_are_said_at_once(start):
    job = start("circles.py", 3, *circles.CIRCLES)
    for name in circles.CIRCLES:
        errors = job.next("error")
        check(name, [(error["type"], error["culprits"], error["text"]) for error in errors])
    assert job.end() == [0, 0, 0]


def test_members_of_two_circles_all_leave(start):
    """Rank 1 is told of the circle of the ranks 0 and 2, at times before it has found its own with rank 0."""
    names = ["two_groups_in_two_orders"] * 20
    job = start("circles.py", 3, *names)
    for name in names:
        errors = job.next("error")
        check(name, [(error["type"], error["culprits"], error["text"]) for error in errors])
    assert job.end() == [0, 0, 0]


def test_what_is_no_circle_of_threads_is_left_alone(start):
    job = start("circles.py", 1, "threads", *circles.NO_CIRCLES)
    for _ in circles.NO_CIRCLES:
        job.next("done")
    assert job.end() == [0]


def test_what_is_no_circle_of_processes_is_left_alone(start):
    job = start("circles.py", 3, *circles.NO_CIRCLES)
    for _ in circles.NO_CIRCLES:
        job.next("done")
    assert job.end() == [0, 0, 0]
