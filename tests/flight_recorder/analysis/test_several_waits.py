"""A rank that waits for one process in several messages counts as one victim."""

from unicomm.flight_recorder.analysis.analyze import analyze
from unicomm.flight_recorder.analysis.verdict import Verdict
from unicomm.flight_recorder.corpus.simulated_job import Action, SimulatedJob


def test_messages_to_a_stopped_rank():
    sends = [Action("send", peer=1, line=at, waits=False) for at in range(3)]
    programs = [[Action("barrier"), *sends, Action("sync")], [Action("barrier"), Action("stop")]]
    job = SimulatedJob(2, programs, {"world": [0, 1]}, live=True).run()
    report = analyze(job.table(), stuck_after=0)
    assert (report.main.verdict, report.main.culprits) == (Verdict.PROCESS_STOPPED, [1])
    assert "Rank 1 is stopped, and rank 0 waits in send" in report.main.sentence
