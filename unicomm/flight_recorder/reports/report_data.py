"""A report as JSON (described by report.schema.json), as Markdown, and without names of hosts and folders."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from unicomm.flight_recorder.analysis.verdict import Finding, PathLine, Report
from unicomm.flight_recorder.table.table import Table
from unicomm.flight_recorder.texts import ranks_text, span

SCHEMA_VERSION = 1
_PATH = re.compile(r"(?<![\w.])(?:[A-Za-z]:)?(?:[\w.@+~-]*[\\/])+([^\s\\/:,;'\")]+)")
_MOST_SHOWN = 8


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


def to_markdown(report: Report, verbose: bool = False) -> str:
    """Returns the report as Markdown, for an issue tracker; `verbose`: with call paths."""
    lines = []
    for i, found in enumerate(report.findings):
        lines += [f"{'##' if i == 0 else '###'} {found.verdict.value}", "", found.sentence, ""]
        rows = [
            ("culprits", ranks_text(found.culprits) if found.culprits else ""),
            ("victims", ranks_text(found.victims) if found.victims else ""),
            ("group", found.group),
            ("operation", f"{found.operation} #{found.seq_num}" if found.operation else ""),
            ("confidence", f"{found.confidence:.0%}"),
        ]
        lines += ["| | |", "|---|---|", *(f"| {k} | {_cell(v)} |" for k, v in rows if v), ""]
        if found.sides:
            lines += ["| ranks | called | at |", "|---|---|---|"]
            lines += [
                f"| {ranks_text(s.ranks)} | `{_cell(s.what)}` | {_code(s.where)} |"
                for s in found.sides[:_MOST_SHOWN]
            ]
            lines.append("")
        if found.evidence:
            lines += ["Evidence:", "", *(f"- {e}" for e in found.evidence), ""]
        if found.edges:
            lines += ["Who waits for whom:", ""]
            for e in found.edges:
                at = f" at {_code(e.where)}" if e.where else ""
                lines.append(
                    f"- rank {e.rank} -> {ranks_text(e.waits_for)}: {e.operation} #{e.seq_num} of"
                    f" '{e.group}'{at}"
                )
            lines.append("")
        for called in found.call_paths if verbose else ():
            lines += [f"Call path of {ranks_text(called.ranks)} to {called.operation}:", ""]
            lines += [f"{n}. {_path_line(line)}" for n, line in enumerate(called.path, 1)]
            lines.append("")
        if found.next_steps:
            lines += ["Next:", "", *(f"{n}. {s}" for n, s in enumerate(found.next_steps, 1)), ""]
    if report.stragglers:
        lines += ["### Who is late", ""]
        lines += ["| who | lost by others | late by | came last | waiting | transfer | gap before | sure |"]
        lines += ["|---|---|---|---|---|---|---|---|"]
        for s in report.stragglers[:_MOST_SHOWN]:
            lines.append(
                f"| {s.who} | {s.score:.1%} | {span(s.late_ns)} | {s.last:.0%} | {span(s.waiting_ns)}"
                f" | {span(s.transfer_ns)} | {span(s.gap_ns)} | {s.confidence:.0%} |"
            )
        lines.append("")
    lines.append(
        f"{report.entries} operations of {report.present} of {report.ranks} ranks,"
        f" {report.groups} communicators."
    )
    lines += [f"- {f.path + ': ' if f.path else ''}{f.message}" for f in report.remarks[:20]]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _path_line(line: PathLine) -> str:
    library = f" ({line.library})" if line.library else ""
    return f"`{line.file}:{line.line}` {line.function}{library}"


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def shared(report: Report, table: Table) -> Report:
    """Returns a copy of the report without folders, host names and pids, to give to others."""
    out = copy.deepcopy(report)
    hosts = sorted({s.host for s in table.sources if s.host}, key=len, reverse=True)
    names = {host: f"host{i}" for i, host in enumerate(sorted(hosts))}

    def clean(text: str) -> str:
        for host in hosts:
            text = re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w-])", names[host], text)
        text = re.sub(r"(\bpid|--pid|-CONT) \d+(, \d+)*", r"\1 N", text)
        return _PATH.sub(r"\1", text)

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
