"""A report as Markdown, for an issue tracker. Names in dumps cannot leave their line, cell or code span."""

from __future__ import annotations

import re

from unicomm.flight_recorder.analysis.verdict import PathLine, Report
from unicomm.flight_recorder.texts import printable, ranks_text, span

_MOST_SHOWN = 8
_SPAN = re.compile(r"(?<!`)`[^`]+`(?!`)")
# What begins HTML, entities, emphasis, formulas and cells, and the end of a link's text.
_SPECIAL = re.compile(r"[\\`*<|~$]|&(?=[#A-Za-z])|\](?=[(\[:])|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
_BLOCK = re.compile(r"^(?:(\d{1,9})([.)])|([#>+=-]))")  # what begins a list, a heading or a quotation


def to_markdown(report: Report, verbose: bool = False) -> str:
    """Returns the report as Markdown, for an issue tracker; `verbose`: with call paths."""
    lines = []
    for i, found in enumerate(report.findings):
        lines += [f"{'##' if i == 0 else '###'} {found.verdict.value}", "", _prose(found.sentence), ""]
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
                f"| {ranks_text(s.ranks)} | {_code_cell(s.what)} | {_code_cell(s.where)} |"
                for s in found.sides[:_MOST_SHOWN]
            ]
            lines.append("")
            if (more := len(found.sides) - _MOST_SHOWN) > 0:
                lines += [f"and {more} more; --json has all", ""]
        if found.evidence:
            lines += ["Evidence:", "", *(f"- {_prose(e)}" for e in found.evidence), ""]
        if found.edges:
            lines += ["Who waits for whom:", ""]
            for e in found.edges:
                at = f" at {_code(e.where)}" if e.where else ""
                what = _prose(f"{e.operation} #{e.seq_num} of '{e.group}'")
                lines.append(f"- rank {e.rank} -> {ranks_text(e.waits_for)}: {what}{at}")
            lines.append("")
        if called_from := [one for one in found.call_paths if one.callers]:
            lines += ["Called from:", ""]
            lines += [f"- {ranks_text(one.ranks)}: {_code(one.callers_text)}" for one in called_from]
            lines.append("")
        for called in found.call_paths if verbose else ():
            lines += [f"Call path of {ranks_text(called.ranks)} to {_prose(called.operation)}:", ""]
            lines += [f"{n}. {_path_line(line)}" for n, line in enumerate(called.path, 1)]
            lines.append("")
        if found.next_steps:
            lines += ["Next:", "", *(f"{n}. {_prose(s)}" for n, s in enumerate(found.next_steps, 1)), ""]
    if report.stragglers:
        lines += ["### Who is late", ""]
        lines += ["| who | lost by others | late by | came last | waiting | transfer | gap before | sure |"]
        lines += ["|---|---|---|---|---|---|---|---|"]
        for s in report.stragglers[:_MOST_SHOWN]:
            lines.append(
                f"| {_cell(s.who)} | {s.score:.1%} | {span(s.late_ns)} | {s.last:.0%} | {span(s.waiting_ns)}"
                f" | {span(s.transfer_ns)} | {span(s.gap_ns)} | {s.confidence:.0%} |"
            )
        lines.append("")
    lines.append(
        f"{report.entries} operations of {report.present} of {report.ranks} ranks,"
        f" {report.groups} communicators."
    )
    lines += [f"- {_prose(f'{f.path}: ' if f.path else '')}{_prose(f.message)}" for f in report.remarks[:20]]
    return "\n".join(lines) + "\n"


def _prose(text: str) -> str:
    """Returns a text with names as Markdown that shows it. Code spans of our sentences stay."""
    text = printable(text).lstrip()
    out, at = [], 0
    for code in _SPAN.finditer(text):
        out += [_escaped(text[at : code.start()]), code[0]]
        at = code.end()
    joined = "".join([*out, _escaped(text[at:])])
    return _BLOCK.sub(lambda found: f"{found[1] or ''}\\{found[2] or found[3]}", joined)


def _escaped(text: str) -> str:
    return _SPECIAL.sub(r"\\\g<0>", text)


def _cell(text: str) -> str:
    """Returns a text for a cell, without code spans: in a cell, a backslash before a bar cannot be shown."""
    return _escaped(printable(text))


def _code_cell(text: str) -> str:
    return _cell(text) if "|" in text else _code(text)


def _code(text: str) -> str:
    """Returns a code span, whose fence is longer than any row of backticks in the text."""
    text = printable(text)
    if not text:
        return ""
    if "`" not in text:
        return f"`{text}`"
    fence = "`" * (max(map(len, re.findall("`+", text))) + 1)
    return f"{fence} {text} {fence}"


def _path_line(line: PathLine) -> str:
    library = f" ({line.library})" if line.library else ""
    return f"{_code(f'{line.file}:{line.line}')} {_prose(line.function)}{library}"
