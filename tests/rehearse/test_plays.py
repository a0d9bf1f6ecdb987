"""The blocking rules, on simulated jobs: what hangs, and that the analyzer names it."""

from dataclasses import replace

import pytest

from unicomm.flight_recorder.analysis.verdict import Verdict
from unicomm.flight_recorder.corpus.simulated_job import Action, Event, SimulatedJob
from unicomm.flight_recorder.ring.reader import InputRemark
from unicomm.rehearse.details import Details
from unicomm.rehearse.judge import judge
from unicomm.rehearse.play import Plays, Rules, hanging_schedule


def recorded(programs, groups=None):
    """The table of a rehearsal: each operation completes where its rank waits for it, which is at once."""
    job = SimulatedJob(len(programs), programs, groups or {})
    job.run()
    for rank, program in enumerate(programs):
        clock, seqs = 1000, {}
        job.events[rank] = []
        for action in program:
            clock += 1000
            key = (action.group, action.op, action.peer) if action.op in ("send", "recv") else action.group
            seqs[key] = seqs.get(key, 0) + 1
            job.events[rank].append(_event(action, seqs[key], clock))
    return job.table()


def _event(action, seq, clock):
    return Event(action, seq, clock, clock + 500 if action.waits else 0)


def send(peer, **more):
    return Action("send", peer=peer, **more)


def recv(peer, **more):
    return Action("recv", peer=peer, **more)


def verdicts(programs, rules=None, groups=None):
    report = judge(recorded(programs, groups), rules or Rules()).report
    return [finding.verdict for finding in report.findings]


def test_matching_programs_are_good():
    program = [Action("all_reduce", red="SUM"), Action("barrier")]
    report, table, _ = judge(recorded([program] * 4), Rules())
    assert report.good
    assert len(table) == 8
    assert any("none hangs" in remark.message for remark in report.remarks)


def test_sends_that_meet_hang_unless_they_are_buffered():
    programs = [[send(1), recv(1)], [send(0), recv(0)]]
    assert verdicts(programs) == [Verdict.WAIT_CYCLE]
    assert verdicts(programs, Rules(buffered=True)) == [Verdict.GOOD]


def test_messages_in_order_hang_where_messages_side_by_side_do_not():
    programs = [
        [send(1, waits=False), recv(1, waits=False), Action("barrier")],
        [send(0, waits=False), recv(0, waits=False), Action("barrier")],
    ]
    assert verdicts(programs) == [Verdict.GOOD]
    assert verdicts(programs, Rules(messages_in_order=True)) == [Verdict.WAIT_CYCLE]


def test_groups_used_in_different_orders_hang():
    groups = {"a": [0, 1], "b": [0, 1]}
    first, second = Action("all_reduce", "a", red="SUM"), Action("all_reduce", "b", red="SUM")
    assert verdicts([[first, second], [second, first]], groups=groups) == [Verdict.WAIT_CYCLE]


def test_started_operations_of_two_groups_do_not_hang():
    groups = {"a": [0, 1], "b": [0, 1]}
    first = Action("all_reduce", "a", red="SUM", waits=False)
    second = Action("all_reduce", "b", red="SUM", waits=False)
    assert verdicts([[first, second], [second, first]], groups=groups) == [Verdict.GOOD]


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({"numel": 7}, Verdict.SIZE_MISMATCH),
        ({"dtype": "float64"}, Verdict.DTYPE_MISMATCH),
        ({"red": "MAX"}, Verdict.REDUCTION_MISMATCH),
        ({"op": "barrier", "red": "", "numel": 0}, Verdict.WRONG_OPERATION),
    ],
)
def test_a_call_that_does_not_fit_stops_its_group(change, verdict):
    good = Action("all_reduce", red="SUM", line=5)
    programs = [[good, good] for _ in range(4)]
    programs[2] = [replace(good, line=9, **change), good]
    report = judge(recorded(programs), Rules()).report
    assert report.findings[0].verdict is verdict
    assert report.findings[0].culprits == [2]


def test_a_rank_that_does_not_come():
    step = Action("all_reduce", red="SUM")
    report = judge(recorded([[step] * 3, [step] * 3, [step] * 2]), Rules()).report
    assert [(f.verdict, f.culprits) for f in report.findings] == [(Verdict.NEVER_JOINED, [2])]


@pytest.mark.parametrize("buffered", [False, True])
def test_a_send_without_a_receive(buffered):
    report = judge(recorded([[send(1)], []]), Rules(buffered=buffered)).report
    assert [f.verdict for f in report.findings] == [Verdict.UNMATCHED_P2P]


def test_the_choice_of_a_receive_from_any_rank_that_hangs_is_found():
    # Rank 0 takes one message of any rank, then one of rank 1: if rank 1's came first, nothing follows.
    programs = [[recv(2), recv(1)], [send(0)], [send(0)]]
    table = recorded(programs)
    table.peer[0], table.seq[0], table.seq[1] = -1, 0, 1
    plays = Plays(table, Rules())
    search = hanging_schedule(plays)
    assert search.played.hangs
    assert search.exhausted
    assert [plays.rank[send] for _, send in search.played.chosen] == [1]
    report = judge(table, Rules()).report
    assert not report.good


def test_all_choices_of_a_receive_from_any_rank_may_be_good():
    table = recorded([[recv(1), recv(2)], [send(0)], [send(0)]])
    table.peer[:2], table.seq[:2] = -1, 0
    search = hanging_schedule(Plays(table, Rules()))
    assert not search.played.hangs
    assert search.exhausted
    assert search.plays > 1
    report = judge(table, Rules()).report
    assert report.good


def test_more_choices_than_are_played_end_in_one_play():
    messages = 600
    table = recorded([[recv(1), recv(2)] * messages, [send(0)] * messages, [send(0)] * messages])
    table.peer[: 2 * messages], table.seq[: 2 * messages] = -1, 0
    search = hanging_schedule(Plays(table, Rules()))
    assert not search.played.hangs
    assert not search.exhausted
    assert search.plays == 513
    assert len(search.played.chosen) == 2 * messages
    assert len(search.played.partners) == 4 * messages


def tags(*by_rank):
    return {rank: Details(tags=dict(enumerate(of_rank))) for rank, of_rank in enumerate(by_rank)}


def test_messages_meet_by_their_tags():
    table = recorded(
        [
            [send(1, numel=8, waits=False), send(1, numel=3, waits=False), Action("barrier")],
            [recv(0, numel=3, waits=False), recv(0, numel=8, waits=False), Action("barrier")],
        ]
    )
    assert judge(table, Rules(), tags([1, 2], [2, 1]))[0].good
    assert list(table.seq[table.peer >= 0]) == [1, 2, 2, 1]


def test_messages_whose_tags_cross_hang_if_their_calls_block():
    table = recorded([[send(1, numel=8), send(1, numel=3)], [recv(0, numel=3), recv(0, numel=8)]])
    report = judge(table, Rules(), tags([1, 2], [2, 1])).report
    assert [finding.verdict for finding in report.findings] == [Verdict.WAIT_CYCLE]


def test_messages_with_different_tags_are_no_pair():
    report = judge(recorded([[send(1)], [recv(0)]]), Rules(), tags([1], [2])).report
    assert [finding.verdict for finding in report.findings] == [Verdict.UNMATCHED_P2P]
    assert "do not fit" in report.findings[0].sentence


def test_sends_that_meet_in_the_midst_of_a_schedule_are_a_deadlock():
    # Rank 0 has sent before, rank 1 has not; the receives stand behind the sends that hang.
    programs = [[send(1), send(1), recv(1)], [recv(0), send(0), recv(0)]]
    assert verdicts(programs) == [Verdict.WAIT_CYCLE]


def parts(*by_rank):
    return {rank: Details(parts={0: of_rank}) for rank, of_rank in enumerate(by_rank)}


def test_parts_of_an_exchange_are_compared_one_by_one():
    program = [Action("all_to_all_v_single", numel=4)]
    fitting = parts(([1, 3], [1, 3]), ([3, 1], [3, 1]))
    assert judge(recorded([program] * 2), Rules(), fitting)[0].good
    report = judge(recorded([program] * 2), Rules(), parts(([1, 3], [2, 2]), ([3, 1], [2, 2]))).report
    assert [finding.verdict for finding in report.findings] == [Verdict.SPLIT_MISMATCH]
    assert report.findings[0].evidence == ["elements from rank 0 to rank 0: 1 sent, 2 expected"]


def test_parts_are_not_compared_if_the_program_reads_received_data():
    table = recorded([[Action("all_to_all_v_single", numel=4)]] * 2)
    table.remarks.append(InputRemark("x.py:1", "a number depends on received data"))
    report = judge(table, Rules(), parts(([1, 3], [2, 2]), ([3, 1], [2, 2]))).report
    assert report.good
    assert any("were not compared" in remark.message for remark in report.remarks)
