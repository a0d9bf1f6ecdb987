"""More than 2 GiB in one operation."""

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.large]


def test_more_than_two_gib(start):
    job = start("large.py", 2)
    for said in job.next("moved", within=250):
        assert said["sums"]
        assert said["copies"]
        assert said["places"] > 3000
    assert job.end() == [0, 0]
