"""Groups of torch's own Gloo in programs that have groups of unicomm: both go by torch's operators."""

import pytest

pytestmark = pytest.mark.processes


def test_stock_groups_do_not_wait_for_the_interpreter_lock(start):
    job = start("stock_gloo.py", 2)
    assert [said["sum"] for said in job.next("done")] == [[2.0] * 4] * 2
    assert job.end() == [0, 0]
