"""Calls of `new_group` that some ranks do not make: a remark with the line, and no finding."""

import sys
from pathlib import Path

import pytest

from tests.commands import run
from unicomm.rehearse.details import Details
from unicomm.rehearse.groups import calls_of_some

PROGRAM = Path(__file__).parent / "corpus" / "good_groups_of_members_only.py"


def called(*lists):
    """The details of a rank that calls `new_group` at line 1, 2, ... of train.py."""
    details = Details()
    details.new_groups = [(",".join(map(str, ranks)), f"train.py:{at}") for at, ranks in enumerate(lists, 1)]
    return details


def test_calls_of_all_ranks_in_one_order_are_no_remark():
    assert calls_of_some({rank: called([0, 1], [2, 3]) for rank in range(4)}) == []


def test_ranks_that_do_not_call_are_named_with_the_line_and_the_cure():
    details = {rank: called([0, 1], [0]) if rank < 2 else called([0, 1]) for rank in range(4)}
    (remark,) = calls_of_some(details)
    assert remark.path == "train.py:2"
    assert "ranks 0, 1 call new_group for rank 0, and ranks 2, 3 do not" in remark.message
    assert "use_local_synchronization=True" in remark.message


def test_groups_that_only_their_members_make_are_one_remark():
    details = {rank: called([rank - rank % 2, rank - rank % 2 + 1]) for rank in range(8)}
    (remark,) = calls_of_some(details)
    assert (
        "for ranks 0, 1; ranks 2, 3; ranks 4, 5; ranks 6, 7, each time by some ranks alone" in remark.message
    )


def test_another_order_is_a_remark():
    details = {rank: called([0, 1], [1, 2]) for rank in range(3)} | {1: called([1, 2], [0, 1])}
    (remark,) = calls_of_some(details)
    assert (remark.path, "in another order than ranks 0, 2" in remark.message) == ("train.py:1", True)


@pytest.mark.processes
def test_a_rehearsal_is_good_and_warns_at_the_line():
    done = run([sys.executable, "-m", "unicomm", "rehearse", "--nproc-per-node", 4, "--github", PROGRAM])
    assert done.returncode == 0, done.stderr
    line = PROGRAM.read_text().splitlines().index("    first = dist.new_group([0, 1, 2, 3])") + 1
    warned = run([sys.executable, "-m", "unicomm", "rehearse", "--nproc-per-node", 5, "--github", PROGRAM])
    assert warned.returncode == 0, warned.stderr
    assert "::warning" not in done.stdout
    assert f"line={line}" in warned.stdout
    assert "::warning" in warned.stdout
