"""Ranks that do not come, or do not agree: all that came get the same error, in time."""

import pytest

from tests.commands import clean_environment
from tests.processes.rank_processes import agent_environments, new_store
from tests.processes.waits import seconds_waited

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("came", [3, 1])
def test_missing_ranks(start, rings, came):
    store = new_store()
    base = clean_environment() | {"UNICOMM_TRACE_DIR": str(rings)}
    environments = agent_environments(4, store, base)[:came]
    last = came - 1
    job = start("creation.py", came, "missing", last, 2, environments=environments)
    absent = list(range(came, 4))
    names = "rank 3" if came == 3 else "ranks 1-3"
    present = "ranks 0-2" if came == 3 else "rank 0"
    job.next("here")
    for other in job.but(last):
        other.tell()
    for other in job.but(last):
        other.next("came")
    job[last].tell()
    job[last].next("came")
    errors = job.next("error")
    began = errors[last]["began"]  # of whose deadline the others hear
    for error in errors:
        assert error["type"] == "CommTimeoutError"
        assert error["culprits"] == absent
        assert f"{names} did not arrive within 2 s; {present} did" in error["text"]
        assert 2 <= error["at"] - began < 10
    for said in job.next("failed"):
        assert said["after"] == said["before"]
    assert job.end() == [0] * came
    assert not list(rings.rglob("*.ucring"))


@pytest.mark.parametrize(("what", "words"), [("backend", "backend is 'gloo' on rank 1"), ("hints", "65536")])
def test_differing_arguments(start, what, words):
    job = start("creation.py", 3, "differing", what)
    job.next("here")
    job.tell()
    job.next("came")
    errors = job.next("error")
    known = max(error["came"] for error in errors)  # the last to come compares all
    for error in errors:
        assert error["type"] == "MismatchError"
        assert error["culprits"] == [1]
        assert words in error["text"]
        assert seconds_waited(error, known) < 1
        assert error["at"] - error["began"] < 10  # not at the deadline
    for said in job.next("failed"):
        assert said["after"] == said["before"]
    assert job.end() == [0, 0, 0]
