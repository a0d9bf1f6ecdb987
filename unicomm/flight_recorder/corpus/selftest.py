"""`unicomm trace selftest`: precision and recall of the analyzer's culprits on the corpus, by verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from unicomm.flight_recorder.analysis.analyze import analyze
from unicomm.flight_recorder.analysis.verdict import Report, Verdict

from . import Case, cases

TARGET = 0.99


@dataclass
class Score:
    """Counts of one verdict: culprits named rightly (`right`), wrongly (`wrong`), and not named (`missed`).

    A fault without a nameable culprit counts as one culprit.
    """

    cases: int = 0
    right: int = 0
    wrong: int = 0
    missed: int = 0

    @property
    def precision(self) -> float:
        return self.right / (self.right + self.wrong) if self.right + self.wrong else 1.0

    @property
    def recall(self) -> float:
        return self.right / (self.right + self.missed) if self.right + self.missed else 1.0


@dataclass
class Result:
    """The result of a run: scores by verdict and in total, and the cases with a difference."""

    verdicts: dict[Verdict, Score] = field(default_factory=dict)
    total: Score = field(default_factory=Score)
    failures: list[dict[str, Any]] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)
    main_right: int = 0

    @property
    def good(self) -> bool:
        return self.total.precision >= TARGET and self.total.recall >= TARGET


def named(pairs: Iterator[tuple[Verdict, list[int]]]) -> set[tuple[Verdict, int]]:
    """Returns (verdict, culprit) for each culprit, and (verdict, -1) for a fault without one."""
    return {(kind, rank) for kind, ranks in pairs for rank in (ranks or [-1])}


def score_case(case: Case, report: Report, result: Result) -> None:
    """Adds the scores of one case to `result`."""
    expected = case.expected or [(Verdict.GOOD, [])]
    truth = named(iter(expected))
    found = named((f.verdict, f.culprits) for f in report.findings)
    for kind in {k for k, _ in truth | found}:
        score = result.verdicts.setdefault(kind, Score())
        mine, theirs = {p for p in truth if p[0] is kind}, {p for p in found if p[0] is kind}
        score.cases += kind in {k for k, _ in expected}
        for one in (score, result.total):
            one.right += len(mine & theirs)
            one.wrong += len(theirs - mine)
            one.missed += len(mine - theirs)
    result.total.cases += 1
    main = (report.main.verdict, report.main.culprits)
    result.main_right += main in expected
    if truth != found or main not in expected:
        result.failures.append(
            {
                "case": case.name,
                "expected": [(k.value, r) for k, r in expected],
                "found": [(f.verdict.value, f.culprits[:16]) for f in report.findings],
            }
        )


def run(largest: int = 16384, progress: Callable[[str], None] | None = None) -> Result:
    """Analyzes and scores all cases of up to `largest` ranks."""
    result = Result()
    for case in cases(largest):
        if progress is not None:
            progress(case.name)
        result.kinds.add(case.name.split("/")[0])
        score_case(case, analyze(case.table()), result)
    return result
