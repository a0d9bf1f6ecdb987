"""The programs of tests/rehearse/corpus: what their headers expect, and whether a rehearsal says so.

A header is the docstring of the program: a sentence, then a field on each line.

kind        what the program uses
verdict     the verdict of the main finding; alternatives are separated by " | "
line        a part of the line that an annotation has to name; alternatives as above
culprits    the culprits, where they matter: ranks ("3", "0-3"), "last", or "others": all but rank 0
values      "real" if the program's control flow depends on data that it receives
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from unicomm.flight_recorder.analysis.verdict import Verdict
from unicomm.rehearse.github import place_of
from unicomm.rehearse.rehearsal import Rehearsal, rehearse

FOLDER = Path(__file__).parent / "corpus"
_HELPERS = {"small_models"}
PATIENCE = 120.0


@dataclass(frozen=True)
class Expected:
    """What a program's header says.

    Attributes:
        lines: the numbers of the lines of which one has to be named. culprits: "" if they do not matter.
    """

    path: Path
    sentence: str
    kind: str
    verdicts: tuple[str, ...]
    lines: tuple[int, ...]
    culprits: str
    values: str

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def good(self) -> bool:
        return self.verdicts == (Verdict.GOOD.value,)


def programs() -> list[Expected]:
    """Returns all programs, by name."""
    return [_read(path) for path in sorted(FOLDER.glob("*.py")) if path.stem not in _HELPERS]


def _read(path: Path) -> Expected:
    text = path.read_text()
    header = ast.get_docstring(ast.parse(text)) or ""
    fields = dict(re.findall(r"^(kind|verdict|line|culprits|values): (.*)$", header, re.M))
    end = text.index('"""', 3)
    wanted = fields["line"].split(" | ") if "line" in fields else []
    lines = [
        [
            number
            for number, line in enumerate(text.splitlines(), 1)
            if part in line and number > text[:end].count("\n") + 1
        ]
        for part in wanted
    ]
    assert all(lines), f"{path}: a line of the header is not in the program: {wanted}"
    return Expected(
        path,
        header.splitlines()[0],
        fields["kind"],
        tuple(fields["verdict"].split(" | ")),
        tuple(number for found in lines for number in found),
        fields.get("culprits", ""),
        fields.get("values", "made-up"),
    )


def rehearsed(program: Expected, ranks: int) -> Rehearsal:
    return rehearse(program.path, ranks, patience=PATIENCE, real_values=program.values == "real")


def wrong(program: Expected, done: Rehearsal, ranks: int) -> str:
    """Returns in which way the rehearsal differs from the header, "" if it does not."""
    if done.unusable:
        return f"unusable: {done.unusable}"
    finding = done.report.main
    if finding.verdict.value not in program.verdicts:
        return f"{finding.verdict.value}: {finding.sentence}"
    if program.good:
        return ""
    file, _, line = place_of(finding).rpartition(":")
    if Path(file).name != program.path.name or not line.isdigit() or int(line) not in program.lines:
        return f"the line is {file}:{line}: {finding.sentence}"
    if program.culprits and finding.culprits != _culprits(program.culprits, ranks):
        return f"the culprits are {finding.culprits}: {finding.sentence}"
    return ""


def _culprits(text: str, ranks: int) -> list[int]:
    if text == "last":
        return [ranks - 1]
    if text == "others":
        return list(range(1, ranks))
    first, _, last = text.partition("-")
    return list(range(int(first), int(last or first) + 1))
