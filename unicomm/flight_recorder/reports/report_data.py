"""A report as JSON (described by report.schema.json), and without names of hosts and folders."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from unicomm.flight_recorder.analysis.verdict import Finding, Report
from unicomm.flight_recorder.table.table import Table

SCHEMA_VERSION = 1
_PATH = re.compile(r"(?<![\w.])(?:[A-Za-z]:)?(?:[\w.@+~-]*[\\/])+([^\s\\/:,;'\")]+)")


def as_data(report: Report) -> dict[str, Any]:
    """Returns the report as plain data: the main finding's keys at the top, all findings in `findings`."""
    main = report.main
    return {
        "schema": SCHEMA_VERSION,
        **_finding(main),
        "findings": [_finding(f) for f in report.findings],
        "stragglers": [asdict(s) for s in report.stragglers],
        "input": {
            "ranks": report.ranks,
            "present": report.present,
            "missing": report.missing,
            "not_read": report.not_read,
            "entries": report.entries,
            "groups": report.groups,
            "formats": report.formats,
            "findings": [asdict(f) for f in report.remarks],
        },
        "clock_offsets_ns": {str(rank): offset for rank, offset in report.clock_offsets_ns.items()},
    }


def _finding(found: Finding) -> dict[str, Any]:
    data = asdict(found)
    data["verdict"] = found.verdict.value
    return data


def to_json(report: Report) -> str:
    """Returns the report as JSON."""
    return json.dumps(as_data(report), indent=1)


def schema() -> dict[str, Any]:
    """Returns the JSON schema of `to_json`."""
    data: dict[str, Any] = json.loads(Path(__file__).with_name("report.schema.json").read_text())
    return data


def shared(report: Report, table: Table) -> Report:
    """Returns a copy of the report without folders, host names and pids, to give to others."""
    out = copy.deepcopy(report)
    hosts = sorted({s.host for s in table.sources if s.host})
    names = {host: f"host{i}" for i, host in enumerate(hosts)}
    longest_first = sorted(map(re.escape, hosts), key=len, reverse=True)
    # One pass over all hosts: the new name of one may be the name of another.
    of_host = re.compile(rf"(?<![\w.-])(?:{'|'.join(longest_first)})(?![\w-])")
    # What looks like a path, but is in the name of a group.
    kept = {found[0] for group in table.groups for found in _PATH.finditer(group.name)}

    def clean(text: str) -> str:
        if hosts:
            text = of_host.sub(lambda found: names[found[0]], text)
        text = re.sub(r"(\bpid|--pid|-CONT) \d+(, \d+)*", r"\1 N", text)
        return _PATH.sub(lambda found: found[0] if found[0] in kept else found[1], text)

    for found in out.findings:
        found.sentence = clean(found.sentence)
        found.evidence = [clean(e) for e in found.evidence]
        found.next_steps = [clean(s) for s in found.next_steps]
        for side in found.sides:
            side.where = clean(side.where)
        for edge in found.edges:
            edge.where = clean(edge.where)
        if found.cause is not None:
            found.cause.file = clean(found.cause.file)
            found.cause.message = clean(found.cause.message)
            found.cause.call_path = [clean(f) for f in found.cause.call_path]
        for called in found.call_paths:
            for line in called.path:
                line.file = clean(line.file)
    for straggler in out.stragglers:
        straggler.who = clean(straggler.who)
    out.remarks = [type(f)(clean(f.path.rsplit("/", 1)[-1]), clean(f.message)) for f in out.remarks]
    return out
