"""Findings as workflow commands of GitHub Actions, which shows them at their lines in a pull request."""

from __future__ import annotations

import os

from unicomm.flight_recorder.analysis.verdict import Finding, Report, Verdict


def to_annotations(report: Report) -> str:
    """Returns a line for each finding but a good one, and for each remark about a line of the program.

    Findings are `::error file=...,line=...,title=...::sentence`, remarks `::warning ...`.
    """
    out = [
        _annotation("error", place_of(finding), finding.verdict.value, finding.sentence + _callers(finding))
        for finding in report.findings
        if finding.verdict is not Verdict.GOOD
    ]
    remarks = [remark for remark in report.remarks if remark.path.rpartition(":")[2].isdigit()]
    out += [_annotation("warning", remark.path, "remark", remark.message) for remark in remarks]
    return "".join(f"{line}\n" for line in out)


def _annotation(level: str, place: str, title: str, sentence: str) -> str:
    properties = {"title": f"unicomm rehearse: {title}"}
    file, _, line = place.rpartition(":")
    if file and line.isdigit():
        properties = {"file": _relative(file), "line": line, **properties}
    text = ",".join(f"{name}={_property(value)}" for name, value in properties.items())
    return f"::{level} {text}::{_data(sentence)}"


def _callers(finding: Finding) -> str:
    text = next((called.callers_text for called in finding.call_paths), "")
    return f" Called from {text}." if text else ""


def place_of(finding: Finding) -> str:
    """Returns the line of the culprit, else one of the others; "" if none is known."""
    if finding.cause is not None and finding.cause.file:
        return f"{finding.cause.file}:{finding.cause.line}"
    culprits = set(finding.culprits)
    for side in finding.sides:
        if side.where and culprits & set(side.ranks):
            return side.where
    places = [edge.where for edge in finding.edges] + [side.where for side in finding.sides]
    return next((where for where in places if where), "")


def _relative(file: str) -> str:
    path = os.path.relpath(file)
    return file if path.startswith("..") else path


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
