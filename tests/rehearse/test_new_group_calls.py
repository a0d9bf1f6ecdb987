"""Calls of `new_group` that some ranks do not make: a finding with the line."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from unicomm.flight_recorder.analysis.verdict import Verdict
from unicomm.rehearse.details import Details
from unicomm.rehearse.groups import calls_of_some
from unicomm.rehearse.rehearsal import rehearse

PROGRAM = Path(__file__).parent / "corpus" / "groups_of_members_only.py"


def called(*lists):
    """The details of a rank that calls `new_group` at line 1, 2, ... of train.py, in a function."""
    details = Details()
    details.new_groups = [
        (",".join(map(str, ranks)), ("groups.py:7", f"train.py:{at}", "train.py:9"))
        for at, ranks in enumerate(lists, 1)
    ]
    return details


def test_calls_of_all_ranks_in_one_order_are_no_finding():
    assert calls_of_some({rank: called([0, 1], [2, 3]) for rank in range(4)}) == []


def test_ranks_that_do_not_call_are_named_with_the_line_and_the_cure():
    """The finding names the line of the missing call, not the line in the helper that creates every group."""
    details = {rank: called([0, 1], [0]) if rank < 2 else called([0, 1]) for rank in range(5)}
    (found,) = calls_of_some(details)
    assert found.verdict is Verdict.MEMBERSHIP
    assert (found.culprits, found.victims) == ([0, 1], [2, 3, 4])
    assert found.sides[0].where == "train.py:2"
    assert "Ranks 0, 1 call new_group for rank 0 at train.py:2, and ranks 2-4 do not" in found.sentence
    assert "use_local_synchronization=True" in found.next_steps[0]


def test_the_few_that_do_not_call_are_the_culprits():
    details = {rank: called([0, 1], [0]) if rank < 3 else called([0, 1]) for rank in range(4)}
    (found,) = calls_of_some(details)
    assert (found.culprits, found.victims) == ([3], [0, 1, 2])


def test_groups_that_only_their_members_make_are_one_finding():
    details = {rank: called([rank - rank % 2, rank - rank % 2 + 1]) for rank in range(8)}
    (found,) = calls_of_some(details)
    said = "for ranks 0, 1; ranks 2, 3; ranks 4, 5; ranks 6, 7, each time by some ranks alone"
    assert said in found.sentence


def test_group_of_no_rank_that_some_ask_for():
    (found,) = calls_of_some({0: called([]), 1: called()})
    assert "Rank 0 calls new_group for no rank at groups.py:7" in found.sentence


@pytest.mark.processes
def test_iterators_of_ranks_reach_torch():
    def program():
        dist.init_process_group("gloo")
        group = dist.new_group(rank for rank in range(0, 4, 2))
        if dist.get_rank() in (0, 2):
            dist.all_reduce(torch.ones(3), group=group)

    done = rehearse(program, 4)
    assert done.good, (done.report.findings, done.output)
    assert len(done.table) == 2
    assert sorted(group.size for group in done.table.groups if group.size == 2) == [2]


def test_a_call_without_a_line_of_the_program():
    details = {0: called([0]), 1: called()}
    details[0].new_groups = [("0", ())]
    (found,) = calls_of_some(details)
    assert found.sides[0].where == ""


def test_another_order_is_a_finding():
    details = {rank: called([0, 1], [1, 2]) for rank in range(3)} | {1: called([1, 2], [0, 1])}
    (found,) = calls_of_some(details)
    assert found.culprits == [1]
    assert [side.where for side in found.sides] == ["groups.py:7", "groups.py:7"]
    assert "Rank 1 calls new_group in another order" in found.sentence


@pytest.mark.processes
def test_a_rehearsal_finds_it_only_where_it_happens():
    assert rehearse(PROGRAM, 4).report.good
    report = rehearse(PROGRAM, 5).report
    line = PROGRAM.read_text().splitlines().index("    first = dist.new_group([0, 1, 2, 3])") + 1
    assert report.main.verdict is Verdict.MEMBERSHIP
    assert (report.main.culprits, report.main.sides[0].where) == ([4], f"{PROGRAM}:{line}")
