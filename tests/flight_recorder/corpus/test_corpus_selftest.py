"""The corpus and the analyzer's marks on it."""

import json
import sys

import numpy as np
import pytest

from tests.commands import run
from unicomm.flight_recorder import corpus
from unicomm.flight_recorder.analysis.analyze import analyze
from unicomm.flight_recorder.analysis.verdict import Finding, Report, Verdict
from unicomm.flight_recorder.corpus import selftest

CASES = {case.name: case for case in corpus.cases(16)}


@pytest.mark.parametrize("name", CASES)
def test_case(name):
    case = CASES[name]
    report = analyze(case.table())
    found = selftest.named((f.verdict, f.culprits) for f in report.findings)
    assert found == selftest.named(iter(case.expected or [(Verdict.GOOD, [])]))
    assert (report.main.verdict, report.main.culprits) in (case.expected or [(Verdict.GOOD, [])])
    for finding in report.findings:
        assert not set(finding.culprits) & set(finding.victims)
        assert 0 < finding.confidence <= 1
        assert finding.sentence.endswith(".") or finding.sentence.endswith("?")
        assert finding.verdict is Verdict.GOOD or finding.next_steps


def test_the_corpus_covers_the_verdicts():
    assert len(corpus.KINDS) >= 30
    kinds = {kind.name: kind for kind in corpus.KINDS}
    assert max(max(kind.sizes) for kind in kinds.values()) == 16384
    verdicts = {}
    for case in CASES.values():
        for verdict, _ in case.expected or [(Verdict.GOOD, [])]:
            verdicts.setdefault(verdict, set()).add(case.name)
    assert set(verdicts) == set(Verdict)
    assert all(len(names) >= 2 for names in verdicts.values())


def test_many_ranks():
    for name, size in (("leaves-out-a-collective", 1024), ("killed-inside-an-operation", 1024)):
        kind = next(k for k in corpus.KINDS if k.name == name)
        case = kind.make(size, np.random.default_rng(3))
        report = analyze(case.table())
        assert [(report.main.verdict, report.main.culprits)] == case.expected
        assert len(report.main.victims) == size - 1


def test_marks():
    """The scores themselves: a wrong culprit costs precision and recall, a wrong verdict both verdicts'."""
    result = selftest.Result()
    case = next(iter(CASES.values()))
    case = corpus.Case(case.job, [(Verdict.NEVER_JOINED, [1, 2])], name="x")
    selftest.score_case(case, Report([Finding(Verdict.NEVER_JOINED, [1, 3])]), result)
    score = result.verdicts[Verdict.NEVER_JOINED]
    assert (score.precision, score.recall) == (0.5, 0.5)
    selftest.score_case(case, Report([Finding(Verdict.GOOD)]), result)
    assert result.verdicts[Verdict.GOOD].precision == 0
    assert score.recall == 0.25
    assert not result.good
    assert [f["case"] for f in result.failures] == ["x", "x"]


def test_the_command():
    command = [sys.executable, "-m", "unicomm", "trace", "selftest", "--largest", "4"]
    done = run(command)
    assert done.returncode == 0, done.stdout
    assert "never-joined" in done.stdout
    data = json.loads(run([*command, "--json"]).stdout)
    assert data["precision"] >= 0.99
    assert data["recall"] >= 0.99
    assert data["kinds"] >= 30
