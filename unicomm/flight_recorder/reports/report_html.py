"""A report as one HTML file without external resources: verdict, evidence, timeline, wait-for graph.

page.html has the layout, the colours and the script that draws the timeline; this file fills it. All texts
may come from dumps of unknown origin, so each text is escaped where it enters the page.
"""

from __future__ import annotations

import json
from collections import Counter
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from unicomm.flight_recorder.analysis.verdict import Edge, Finding, Report, Side, Straggler, Verdict
from unicomm.flight_recorder.ring.call_path import user_frame
from unicomm.flight_recorder.ring.reader import State
from unicomm.flight_recorder.table.table import Table
from unicomm.flight_recorder.texts import capital, ranks_text, span

from . import timeline
from .wait_graph_svg import draw

MOST_RANKS = 64  # the maximum number of ranks in the timeline
_MOST_SLICES = 40_000
_MOST_SIDES, _MOST_EDGES, _MOST_OTHERS, _MOST_INPUT = 12, 40, 30, 50
_TONE = {Verdict.GOOD: "good", Verdict.SLOW: "warn", Verdict.WRAPPED: "warn"}
_STATES = {State.CREATED: "waits to start", State.STARTED: "in progress", State.FAILED: "failed"}


def write(report: Report, table: Table, path: Path | str) -> Path:
    """Writes the page. Raises `OSError` when the file cannot be written."""
    target = Path(path)
    target.write_text(page(report, table), encoding="utf-8")
    return target


def page(report: Report, table: Table) -> str:
    """Returns the text of the page."""
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    main = report.main
    cards = _sides(main.sides)
    cards += _card("What to do now", _list(main.next_steps, "ol")) if main.next_steps else ""
    cards += _card("Evidence", _list(main.evidence, "ul")) if main.evidence else ""
    parts = [
        _verdict(main),
        f'<div class="cards">{cards}</div>' if cards else "",
        _timeline_section(report, table),
        _waits(main),
        _stragglers(report.stragglers),
        _others(report.findings[1:]),
        _input(report),
    ]
    data = json.dumps(_timeline(report, table), separators=(",", ":"))
    # In a script element only "</" and "<!--" could end the data: escape their characters.
    data = data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    fill = {
        "{{title}}": escape(
            f"{main.verdict.value}: {ranks_text(main.culprits)}" if main.culprits else main.verdict.value
        ),
        "{{facts}}": _facts(report),
        "{{body}}": "\n".join(part for part in parts if part),
        "{{data}}": data,
    }
    out = []
    rest = template
    for mark, text in fill.items():  # in one pass, so that inserted text is not searched for marks
        before, _, rest = rest.partition(mark)
        out += [before, text]
    return "".join([*out, rest])


def _facts(report: Report) -> str:
    formats = ", ".join(f"{n} x {name}" for name, n in report.formats.items())
    facts = [
        f"{report.present} of {report.ranks} ranks" if report.missing else f"{report.ranks} ranks",
        f"{report.entries:,} operations",
        f"{report.groups} communicator{'' if report.groups == 1 else 's'}",
        formats,
    ]
    return "".join(f"<li>{escape(fact)}</li>" for fact in facts if fact)


def _verdict(found: Finding) -> str:
    tone = _TONE.get(found.verdict, "bad")
    facts = []
    if found.culprits:
        facts.append(("culprit" if len(found.culprits) == 1 else "culprits", _chips(found.culprits, "bad")))
    if found.victims:
        facts.append(("victim" if len(found.victims) == 1 else "victims", _chips(found.victims, "warn")))
    if found.operation:
        number = f" #{found.seq_num}" if found.seq_num >= 0 else ""
        facts.append(("operation", f"<code>{escape(found.operation)}</code>{number}"))
    if found.group:
        facts.append(("communicator", f"<code>{escape(found.group)}</code>"))
    listed = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts)
    share = f"{max(0.0, min(1.0, found.confidence)):.0%}"
    return f"""<section class="verdict {tone}">
<p class="kind">{escape(found.verdict.value.replace("-", " "))}</p>
<h1>{escape(found.sentence)}</h1>
<dl>{listed}</dl>
<div class="confidence" title="how sure the analyzer is"><span>confidence {share}</span>
<i><b style="width:{share}"></b></i></div>
</section>"""


def _chips(ranks: list[int], tone: str) -> str:
    if len(ranks) > 12:
        return f'<span class="chip {tone}">{escape(ranks_text(ranks, 40).split(" ", 1)[1])}</span>'
    return "".join(f'<span class="chip {tone}">{rank}</span>' for rank in ranks)


def _card(title: str, content: str, more: str = "") -> str:
    return f'<section class="card {more}"><h2>{escape(title)}</h2>{content}</section>'


def _sides(sides: list[Side]) -> str:
    if not sides:
        return ""
    rows = []
    for i, side in enumerate(sides[:_MOST_SIDES]):
        who = "majority" if i == 0 and len(sides) > 1 else "differs" if len(sides) > 1 else ""
        rows.append(
            f'<tr class="{"" if i == 0 else "bad"}"><th>{escape(capital(ranks_text(side.ranks, 40)))}'
            f"<small>{who}</small></th><td><code>{escape(side.what)}</code>"
            f"<small>{escape(side.where)}</small></td></tr>"
        )
    more = f"<p>and {len(sides) - _MOST_SIDES} more</p>" if len(sides) > _MOST_SIDES else ""
    return _card("Who did what", f'<table class="sides">{"".join(rows)}</table>{more}', "wide")


def _list(items: list[str], kind: str) -> str:
    return f"<{kind}>{''.join(f'<li>{escape(item)}</li>' for item in items)}</{kind}>"


def _waits(found: Finding) -> str:
    if not found.edges:
        return ""
    cycle = found.verdict is Verdict.WAIT_CYCLE
    title = "The wait cycle" if cycle else "Who waits for whom"
    rows = "".join(_edge(edge) for edge in found.edges[:_MOST_EDGES])
    more = len(found.edges) - _MOST_EDGES
    table = f'<table class="edges"><tbody>{rows}</tbody></table>'
    table += f"<p>and {more} more; --json has all</p>" if more > 0 else ""
    return _card(title, f'<div class="graph">{draw(found)}{table}</div>', "wide")


def _edge(edge: Edge) -> str:
    number = f" #{edge.seq_num}" if edge.seq_num >= 0 else ""
    return (
        f'<tr><th>rank {edge.rank}</th><td class="arrow">→</td>'
        f"<th>{escape(ranks_text(edge.waits_for, 30))}</th>"
        f"<td><code>{escape(edge.operation)}</code>{number} of <code>{escape(edge.group)}</code>"
        f"<small>{escape(edge.where)}</small></td></tr>"
    )


def _stragglers(stragglers: list[Straggler]) -> str:
    if not stragglers:
        return ""
    rows = []
    longest = max(s.waiting_ns + s.transfer_ns + s.gap_ns for s in stragglers) or 1.0
    for s in stragglers[:12]:
        bars = "".join(
            f'<b class="{kind}" style="width:{max(0.0, ns) / longest:.1%}" title="{kind} {span(ns)}"></b>'
            for kind, ns in (("gap", s.gap_ns), ("waiting", s.waiting_ns), ("transfer", s.transfer_ns))
        )
        rows.append(
            f'<tr class="{"warn" if s.score > 0.05 else ""}"><th>{escape(s.who)}</th><td>{s.score:.1%}</td>'
            f'<td>{span(s.late_ns)}</td><td>{s.last:.0%}</td><td class="bars">{bars}</td></tr>'
        )
    key = "".join(
        f'<span class="key"><b class="{n}"></b>{t}</span>'
        for n, t in (
            ("gap", "between operations"),
            ("waiting", "waiting for the last rank"),
            ("transfer", "transfer"),
        )
    )
    head = "<tr><th>who</th><th>lost by others</th><th>late by</th><th>came last</th><th>time spent</th></tr>"
    return _card("Who is late", f'<table class="late">{head}{"".join(rows)}</table><p>{key}</p>', "wide")


def _others(found: list[Finding]) -> str:
    if not found:
        return ""
    out = []
    for one in found[:_MOST_OTHERS]:
        details = "".join(
            [
                f"<p>culprits: {escape(ranks_text(one.culprits))}</p>" if one.culprits else "",
                f"<p>victims: {escape(ranks_text(one.victims))}</p>" if one.victims else "",
                _list(one.evidence, "ul") if one.evidence else "",
                _list(one.next_steps, "ol") if one.next_steps else "",
            ]
        )
        tone = _TONE.get(one.verdict, "bad")
        out.append(
            f'<details><summary><span class="chip {tone}">{escape(one.verdict.value)}</span> '
            f"{escape(one.sentence)}</summary>{details}</details>"
        )
    more = f"<p>and {len(found) - _MOST_OTHERS} more; --json has all</p>" if len(found) > _MOST_OTHERS else ""
    return _card(f"Also found ({len(found)})", "".join(out) + more, "wide")


def _input(report: Report) -> str:
    if not report.remarks:
        return ""
    lines = [f"{f.path}: {f.message}" if f.path else f.message for f in report.remarks[:_MOST_INPUT]]
    if len(report.remarks) > _MOST_INPUT:
        lines.append(f"and {len(report.remarks) - _MOST_INPUT} more; --json has all")
    return _card("Remarks on the input", _list(lines, "ul"), "wide")


# --- the timeline -------------------------------------------------------------------------------------


def chosen_ranks(report: Report, table: Table) -> list[int]:
    """Returns the ranks in the timeline: all, or those named by findings and an even sample of the rest."""
    every = [int(rank) for rank in table.ranks]
    if len(every) <= MOST_RANKS:
        return every
    known = set(every)
    wanted: dict[int, None] = {}
    for found in report.findings[:8]:
        wanted |= dict.fromkeys(found.culprits[:16])
        for edge in found.edges[:16]:
            wanted |= dict.fromkeys([edge.rank, *edge.waits_for[:4]])
    wanted |= dict.fromkeys(s.rank for s in report.stragglers[:4])
    wanted |= dict.fromkeys(report.main.victims[:8])
    chosen = [rank for rank in wanted if rank in known][: MOST_RANKS * 3 // 4]
    rest = [rank for rank in every if rank not in set(chosen)]
    even = np.linspace(0, len(rest) - 1, MOST_RANKS - len(chosen)).astype(int)
    return sorted({*chosen, *(rest[i] for i in even)})


def _timeline_section(report: Report, table: Table) -> str:
    if not len(table):
        return ""
    ranks = chosen_ranks(report, table)
    notes = []
    if len(ranks) < len(table.ranks):
        notes.append(
            f"{len(ranks)} of {len(table.ranks):,} ranks are drawn: those that the findings name, and an even"
            " sample of the others. The verdict covers all ranks."
        )
    most = _most_per_rank(ranks)
    if any(source.end - source.begin > most for source in table.sources):
        notes.append(f"The last {most:,} operations of each rank are drawn; --perfetto has more.")
    note = f"<p class=note>{escape(' '.join(notes))}</p>" if notes else ""
    return _card(
        "Timeline",
        f"""{note}<div class="tools"><button data-view="fault">around the fault</button>
<button data-view="all">everything</button><span id="legend"></span></div>
<div id="timeline"><canvas tabindex="0" aria-label="timeline: ranks down, time across"></canvas>
<div id="tip" hidden></div></div>
<p class="hint">drag or arrow keys to move, wheel or + and - to zoom; hover for details.
Pale: waiting for the last rank. Full: all ranks have joined. Striped: unfinished.</p>""",
        "wide",
    )


def _most_per_rank(ranks: list[int]) -> int:
    return max(50, _MOST_SLICES // max(len(ranks), 1))


def _timeline(report: Report, table: Table) -> dict[str, Any]:
    """Returns the data for the page's script, with times in microseconds after the first drawn operation."""
    ranks = chosen_ranks(report, table)
    line = timeline.build(report, table, ranks, _most_per_rank(ranks))
    rows, main = line.rows, report.main
    calls, call = np.unique(table.call[rows], return_inverse=True)
    frames, frame = np.unique(table.frame[rows], return_inverse=True)
    groups, group = np.unique(table.group[rows], return_inverse=True)
    op = table.calls.op[calls] if len(calls) else calls
    common = [int(o) for o, _ in Counter(table.calls.op[table.call[rows]].tolist()).most_common()]
    rank = table.rank[rows]
    named = np.asarray([i for i, g in enumerate(table.groups) if g.name == main.group], np.int64)
    marked = np.isin(table.group[rows], named) & (table.seq[rows] == main.seq_num) & (main.seq_num >= 0)
    times = {
        "b": line.begin_ns - line.first_ns,
        "w": line.ready_ns - line.begin_ns,
        "d": line.end_ns - line.begin_ns,
    }
    numbers = {
        "c": call,
        "g": group,
        "q": table.seq[rows],
        "f": frame,
        "s": table.state[rows],
        "m": marked,
        "p": table.peer[rows],
    }
    lists = {name: np.round(values / 1e3, 1).tolist() for name, values in times.items()}
    lists |= {name: values.astype(np.int64).tolist() for name, values in numbers.items()}
    places = [_place(table, int(f)) for f in frames]
    ends = np.searchsorted(rank, ranks, "right") if len(rows) else np.zeros(len(ranks), np.int64)
    begins = np.searchsorted(rank, ranks, "left") if len(rows) else ends
    culprits, victims = set(main.culprits), set(main.victims)
    busy = marked | line.open
    absent = f"not in {main.operation} #{main.seq_num}" if main.operation and main.seq_num >= 0 else ""
    process = {source.rank: source.process for source in table.sources}
    return {
        "ranks": [
            {
                "rank": r,
                "tone": "bad" if r in culprits else "warn" if r in victims else "",
                "note": process.get(r, "no file"),
                "absent": absent if r in culprits and not busy[begins[i] : ends[i]].any() else "",
                "from": int(begins[i]),
                "to": int(ends[i]),
            }
            for i, r in enumerate(ranks)
        ],
        "slices": lists,
        "calls": [table.describe_call(int(c)) for c in calls],
        "colours": [common.index(int(o)) for o in op],
        "ops": [table.ops[o] for o in common],
        "groups": [table.groups[int(g)].name if g >= 0 else "?" for g in groups],
        "places": places,
        "states": {int(state): text for state, text in _STATES.items()},
        "span": (line.last_ns - line.first_ns) / 1e3,
        "since": (main.since_ns - line.first_ns) / 1e3 if main.since_ns > line.first_ns else None,
    }


def _place(table: Table, stack: int) -> str:
    """Returns file name, line and function; without the folder, because the page may be given to others."""
    frame = user_frame(table.stacks[stack])
    return f"{frame.file.rsplit('/', 1)[-1]}:{frame.line} {frame.function}" if frame else ""
