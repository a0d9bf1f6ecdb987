"""The verdict on a comparison, and the tables of docs/frameworks.md that are made of it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path

from tests.compat import frameworks, torch_runner
from tests.compat.outcomes import Log

Backends = dict[str, list[str]]

EXCEPTIONS = Path(__file__).parent / "exceptions.json"


@dataclass
class Verdict:
    """`unlisted`: what fails without an entry in exceptions.json; `stale`: entries whose test passes.

    All are backends by test, `listed` by reason before.
    """

    unlisted: Backends = field(default_factory=lambda: defaultdict(list))
    stale: Backends = field(default_factory=lambda: defaultdict(list))
    listed: dict[str, Backends] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))


def exceptions() -> dict[tuple[str, str], str]:
    """(test, backend) to reason."""
    entries = json.loads(EXCEPTIONS.read_text())
    return {
        (test, place): one["reason"] for one in entries for test in one["tests"] for place in one["backends"]
    }


def judge(torch_tests: Log, programs: Log) -> Verdict:
    """Compares the outcomes with the switch with stock's."""
    verdict, reasons = Verdict(), exceptions()
    for log in (torch_tests, programs):
        for (place, ranks, test), one in log.found.items():
            if place == "stock" or log.found.get(("stock", ranks, test), {}).get("outcome") != "passed":
                continue
            reason = reasons.get((test, place))
            if one["outcome"] == "passed":
                if reason:
                    verdict.stale[test].append(place)
            elif reason:
                verdict.listed[reason][test].append(place)
            else:
                verdict.unlisted[test].append(place)
    return verdict


def torch_table(log: Log, verdict: Verdict) -> Iterator[str]:
    """Lines of markdown: how many of torch's tests pass where, and those that do not."""
    yield f"torch {version('torch')}, {date.today().isoformat()}."
    yield ""
    yield "| ranks | tests | passed on stock | skipped on stock | switch, shm | switch, gloo |"
    yield "|---|---|---|---|---|---|"
    for ranks in (torch_runner.RANKS, *torch_runner.MORE_RANKS):
        counts = {o: len(log.tests("stock", ranks, o)) for o in ("passed", "skipped", "failed")}
        ours = [
            f"{len(log.tests(p, ranks, 'passed'))} of {counts['passed']}" for p in torch_runner.PLACES[1:]
        ]
        cells = [ranks, sum(counts.values()), counts["passed"], counts["skipped"], *ours]
        yield f"| {' | '.join(map(str, cells))} |"
    if verdict.listed:
        yield ""
        yield "Tests that fail with the switch, because they test Gloo itself:"
        yield ""
        yield "| test | reason |"
        yield "|---|---|"
        for reason, tests in verdict.listed.items():
            yield f"| {named(tests)} | {reason} |"
    if unlisted := {test: where for test, where in verdict.unlisted.items() if test.startswith("test_")}:
        yield ""
        yield f"**{len(unlisted)} more fail with the switch and are to be repaired:** {named(unlisted)}."


def named(tests: Backends) -> str:
    """A list of tests with the backends over which they fail."""
    by_backends: dict[str, list[str]] = defaultdict(list)
    for test, where in tests.items():
        by_backends[" and ".join(where)].append(f"`{test}`")
    return "; ".join(f"{', '.join(some)} ({where})" for where, some in by_backends.items())


def frameworks_table(log: Log) -> Iterator[str]:
    """Lines of markdown: each framework's version and outcomes."""
    yield "| framework | version | stock | switch, auto | switch, gloo | difference |"
    yield "|---|---|---|---|---|---|"
    for program in frameworks.PROGRAMS:
        found = [log.found.get((place, frameworks.RANKS, program.name)) for place in frameworks.PLACES]
        if not any(found):
            continue
        cells = ["not run" if one is None else one["outcome"] for one in found]
        errors = [one["error"].splitlines()[0] for one in found if one and one["error"]]
        said = "; ".join(dict.fromkeys(errors)) or "none"
        yield f"| {program.name} | {version(program.package)} | {' | '.join(cells)} | {said} |"


def write(page: Path, blocks: dict[str, Iterator[str]]) -> None:
    """Replaces what stands between `<!-- NAME -->` and `<!-- end of NAME -->` on a page."""
    text = page.read_text()
    for name, lines in blocks.items():
        first, last = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, rest = text.split(first)
        _, after = rest.split(last)
        text = before + first + "\n".join(lines) + "\n" + last + after
    page.write_text(text)
