"""Each of the commonest faults in a real job: the verdict names rank, cause and line."""

import pytest

from tests.faults.faulty_runs import FAULTS, culprit, expected, run_fault, why_not

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

# Every fault on shared memory. The others add another transport, and rings that come by the hub.
RUNS = [(fault, "shm") for fault in FAULTS] + [("raise", "gloo"), ("raise", "hosts"), ("hang", "hosts")]


@pytest.mark.parametrize(("fault", "place"), RUNS)
def test_the_verdict_names_rank_cause_and_line(fault, place, tmp_path):
    if reason := why_not(fault, place):
        pytest.skip(reason)
    verdict = run_fault(fault, place, tmp_path)
    assert expected(fault, place).match(verdict.sentence), f"{verdict.sentence}\n{verdict.output}"
    if verdict.culprits and fault != "raise-everywhere":
        assert verdict.culprits == [culprit(place)]
