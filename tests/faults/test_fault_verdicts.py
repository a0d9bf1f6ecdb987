"""Each of the commonest faults in a real job: the verdict names rank, cause and line."""

import re
import subprocess
import sys
import time

import pytest

from tests import ROOT
from tests.commands import torchrun
from tests.faults.faulty_runs import FAULTS, culprit, expected, run_and_analyze, run_fault, why_not
from tools import mpi_libraries
from unicomm.launch.hub.hub_process import START_OF_HUBS

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


def test_a_hub_that_starts_slowly_is_waited_for(tmp_path):
    """As on a busy host, in a job that fails at once: without that hub the culprit would be unknown."""
    if reason := why_not("raise", "hosts"):
        pytest.skip(reason)
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import unicomm.launch.hub.server"], cwd=ROOT, check=True)
    # A hub is waited for from the failure on, and a busy machine takes a part of that for its start.
    left = START_OF_HUBS - 4 * (time.monotonic() - began)
    verdict = run_fault("raise", "hosts", tmp_path, hub_after=max(3.5, min(6.0, left)))
    assert expected("raise", "hosts").match(verdict.sentence), f"{verdict.sentence}\n{verdict.output}"


# What needs no launcher of ours: the processes themselves, or Python's own handlers, have written it.
WITHOUT_US = ("raise", "raise-everywhere", "exit", "crash", "terminate", "hang")


@pytest.mark.parametrize("fault", WITHOUT_US)
def test_under_torchrun_the_analyzer_finds_it_in_what_is_left(fault, tmp_path):
    said = run_and_analyze(torchrun(2), fault, tmp_path)
    # Its activity is known only if it was asked.
    pattern = expected(fault, "shm").pattern.removesuffix(r", sleeping\.")
    assert re.match(pattern, said), said


@pytest.mark.parametrize("fault", ["raise", "exit"])
@pytest.mark.parametrize("library", ["MPICH", "Open MPI"])
def test_under_mpiexec(library, fault, tmp_path):
    found, missing = mpi_libraries.find()
    chosen = [one for one in found if one.name == library]
    if not chosen:
        pytest.skip(f"{library} is not there: {missing}")
    command = [*chosen[0].command, "-n", "2", sys.executable]
    said = run_and_analyze(command, fault, tmp_path, chosen[0].environment)
    assert expected(fault, "shm").match(said), said
