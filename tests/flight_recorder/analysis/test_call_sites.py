"""The lines of calls tell where ranks part ways: in rehearsals, whose rest is known, and in hung jobs."""

from dataclasses import replace

import pytest

from tests.rehearse.test_plays import recorded
from unicomm.flight_recorder.analysis.analyze import analyze
from unicomm.flight_recorder.analysis.verdict import Verdict
from unicomm.flight_recorder.corpus.simulated_job import Action, SimulatedJob
from unicomm.rehearse.judge import judge
from unicomm.rehearse.play import Rules

REDUCE = Action("all_reduce", red="SUM", line=5)
METRIC = replace(REDUCE, line=9)
LAST = Action("barrier", line=30)


def rehearsed(first, others, ranks=4):
    report = judge(recorded([first] + [others] * (ranks - 1)), Rules()).report
    return report.main


def hung(first, others, ranks=4):
    job = SimulatedJob(ranks, [first] + [others] * (ranks - 1), {})
    job.run()
    return analyze(job.table(), stuck_after=0.0).main


def lines(finding):
    return [int(side.where.rpartition(":")[2]) for side in finding.sides]


@pytest.mark.parametrize("judged", [rehearsed, hung])
def test_a_call_that_fits_is_named_where_it_was_made_alone(judged):
    found = judged([REDUCE, METRIC, *[REDUCE] * 3, LAST], [*[REDUCE] * 4, LAST])
    assert (found.verdict, found.culprits, found.seq_num) == (Verdict.WRONG_OPERATION, [0], 2)
    assert lines(found) == [5, 9]
    assert "nothing failed there" in found.sentence
    assert any("it shows later" in line for line in found.evidence)
    assert found.victims == [1, 2, 3]


@pytest.mark.parametrize("judged", [rehearsed, hung])
def test_branches_whose_calls_fit_are_not_blamed_for_a_later_fault(judged):
    send, receive = (Action("broadcast", root=0, line=line) for line in (20, 22))
    steps = [send, REDUCE] * 3, [receive, REDUCE] * 3
    found = judged([*steps[0], METRIC, LAST], [*steps[1], LAST])
    assert (found.verdict, found.culprits, found.seq_num) == (Verdict.WRONG_OPERATION, [0], 7)
    assert lines(found) == [30, 9]


def test_a_call_left_out_is_named_where_it_was_left_out():
    step = [REDUCE, METRIC]
    found = rehearsed([*step, REDUCE, *step * 2, LAST], [*step * 4, LAST])
    assert (found.verdict, found.culprits, found.seq_num) == (Verdict.WRONG_OPERATION, [0], 4)
    assert lines(found) == [9, 5]
    assert any("1 fewer call here than by ranks 1-3" in line for line in found.evidence)


def test_ranks_that_are_in_step_again_are_not_blamed():
    metric_first, metric_last = [METRIC, REDUCE], [REDUCE, METRIC]
    good = rehearsed([*metric_first, LAST], [*metric_last, LAST])
    assert good.verdict is Verdict.GOOD
    wide = replace(REDUCE, line=12, numel=7)
    found = rehearsed([*metric_first, wide, LAST], [*metric_last, replace(wide, numel=8), LAST])
    assert (found.verdict, found.culprits, found.seq_num) == (Verdict.SIZE_MISMATCH, [0], 3)


@pytest.mark.parametrize(
    ("first", "verdict"),
    [
        ([REDUCE, replace(METRIC, dtype="int64"), REDUCE, LAST], Verdict.WRONG_OPERATION),
        ([REDUCE, replace(METRIC, dtype="int64"), LAST], Verdict.DTYPE_MISMATCH),
        ([REDUCE, replace(REDUCE, dtype="int64"), LAST], Verdict.DTYPE_MISMATCH),
    ],
)
def test_another_type_is_another_call_if_the_rank_makes_it_alone(first, verdict):
    found = rehearsed(first, [REDUCE, REDUCE, LAST])
    assert (found.verdict, found.culprits, found.seq_num) == (verdict, [0], 2)


def test_the_majority_decides_and_halves_do_not():
    longer, shorter = [REDUCE, METRIC, REDUCE, LAST], [REDUCE, REDUCE, LAST]
    programs = recorded([longer] * 3 + [shorter])
    assert judge(programs, Rules())[0].main.culprits == [3]
    report = judge(recorded([longer] * 2 + [shorter] * 2), Rules()).report
    assert report.main.culprits == [0, 1, 2, 3]
    assert "no majority" in report.main.sentence


@pytest.mark.parametrize(("more", "fewer"), [("send", "recv"), ("recv", "send")])
def test_a_message_from_a_line_of_its_own_is_named(more, fewer):
    many, few = Action(more, peer=1, line=5), Action(fewer, peer=0, line=6)
    alone = replace(many, line=9)
    report = judge(recorded([[many, alone, *[many] * 3], [few] * 4]), Rules()).report
    assert (report.main.verdict, report.main.culprits) == (Verdict.UNMATCHED_P2P, [0])
    assert report.main.edges[0].where.endswith(":9")
    assert any("it shows later" in line for line in report.main.evidence)


def test_a_line_with_as_many_messages_on_the_other_side_is_not_blamed():
    """The receiver leaves out a receive of the loop, and has one for the message at the end."""
    many, few = Action("send", peer=1, line=5), Action("recv", peer=0, line=6)
    last = replace(many, line=9), replace(few, line=10)
    report = judge(recorded([[*[many] * 4, last[0]], [*[few] * 3, last[1]]]), Rules()).report
    assert report.main.verdict is Verdict.UNMATCHED_P2P
    assert "of that line" not in report.main.sentence


def test_a_call_without_a_branch_of_its_own_on_the_other_ranks_is_named():
    """The calls at line 40 are the second and third on all ranks, whatever they did before."""
    fixed = Action("broadcast", root=0, line=40)
    found = rehearsed([METRIC, fixed, fixed, REDUCE, REDUCE], [REDUCE, fixed, fixed, REDUCE])
    assert (found.verdict, found.culprits, found.seq_num) == (Verdict.WRONG_OPERATION, [0], 1)
    assert lines(found) == [5, 9]
