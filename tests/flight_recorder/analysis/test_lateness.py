"""Who is late: an absolute least beside the relative ones, improbable by chance, and a confidence."""

from dataclasses import replace

import numpy as np
import pytest

from unicomm.flight_recorder.analysis import stragglers
from unicomm.flight_recorder.analysis.analyze import analyze
from unicomm.flight_recorder.analysis.verdict import Verdict
from unicomm.flight_recorder.corpus.simulated_job import Action, SimulatedJob


def job(size=4, steps=40, late_us=0.0, who=1):
    step = Action("all_reduce", red="SUM", line=20, work_us=300)
    return SimulatedJob(size, [[step] * steps] * size, late_us={who: late_us} if late_us else {})


def slow(report):
    return [f for f in report.findings if f.verdict is Verdict.SLOW]


@pytest.mark.parametrize("late_us", [0.039, 10.0, 100.0])
def test_a_little_lateness_is_nobodys_fault(late_us):
    report = analyze(job(late_us=late_us).run().table())
    assert report.main.verdict is Verdict.GOOD
    assert report.stragglers == []


def test_a_little_lateness_does_not_lead_when_all_ranks_fail():
    failed = job(late_us=100.0)
    failed.programs = [[*p, Action("barrier", line=30, fate="die")] for p in failed.programs]
    failed.errors = "timeout"
    assert not slow(analyze(failed.run().table()))


def test_confidence_grows_with_lateness_and_with_the_number_of_collectives():
    found = {}
    for late_us in (250.0, 500.0, 2000.0):
        [finding] = slow(analyze(job(late_us=late_us).run().table()))
        assert finding.culprits == [1]
        found[late_us] = finding.confidence
    assert 0.5 < found[250.0] < found[500.0] < found[2000.0] == pytest.approx(0.95)
    [short] = slow(analyze(job(late_us=2000.0, steps=20).run().table()))
    assert found[250.0] < short.confidence < 0.95
    assert "lateness counts from" in " ".join(short.evidence)


def test_the_table_of_late_ranks_has_the_confidence():
    report = analyze(job(late_us=1000.0).run().table())
    assert [(s.who, s.confidence) for s in report.stragglers] == [("rank 1", report.main.confidence)]
    assert all(s.late_ns > stragglers.LEAST_LATE_NS for s in report.stragglers)


def in_turn(seed):
    """Two ranks that each work longer at times. In nine collectives one of them often leads by chance."""
    rng = np.random.default_rng(seed)
    programs = [
        [Action("all_reduce", red="SUM", work_us=float(w)) for w in rng.choice([200, 200, 4000], 9)]
        for _ in range(2)
    ]
    return SimulatedJob(2, list(programs)).run().table()


@pytest.mark.parametrize(("chance", "some"), [(1e-6, False), (2.0, True)])
def test_ranks_that_are_late_in_turn_are_not_slow(monkeypatch, chance, some):
    """The bound of the probability alone keeps them from being called slow, even in short samples."""
    monkeypatch.setattr(stragglers, "_ENOUGH", 8)
    monkeypatch.setattr(stragglers, "_SLOW_PARTS", 0)
    monkeypatch.setattr(stragglers, "_CHANCE", chance)
    assert any(slow(analyze(in_turn(seed))) for seed in range(40)) == some


def test_a_rank_that_is_late_for_a_while_is_not_slow():
    """Another process took its core in the second half; from a quarter of the time on, it is slow."""
    for begins, expected in ((32, []), (14, [1])):
        one = job(steps=60)
        own = [replace(a, work_us=3000.0) if i >= begins else a for i, a in enumerate(one.programs[1])]
        one.programs[1] = own
        found = slow(analyze(one.run().table()))
        assert [r for f in found for r in f.culprits] == expected


def test_a_slow_rank_is_named_beside_ranks_that_are_late_at_times():
    rng = np.random.default_rng(1)
    programs = [
        [Action("all_reduce", red="SUM", work_us=float(w)) for w in rng.choice([200, 200, 200, 1500], 60)]
        for _ in range(4)
    ]
    one = SimulatedJob(4, list(programs), late_us={2: 3000.0})
    [finding] = slow(analyze(one.run().table()))
    assert finding.culprits == [2]
