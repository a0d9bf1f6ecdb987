"""`unicomm trace top`: a snapshot on the terminal, drawn again and again."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from unicomm.flight_recorder.texts import format_ranks, span

from .snapshot import ABSENT, CurrentOperation, LiveJob, Rank, Snapshot

_STYLE = {
    "running": "green",
    "sleeping": "cyan",
    "stopped": "yellow bold",
    "dead": "red bold",
    "absent": "red",
}
_SINGLE = 32  # up to this number each rank has a line; of more, ranks in the same operation share one


def _bytes(n: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return f"{n} B"


def _since(rank: Rank) -> Text:
    op = rank.operation
    if op is None:
        return Text("")
    error = f" ({op.error})" if op.error else ""
    if op.seconds is None:
        return Text((op.state if op.over else "unfinished") + error, "" if op.state == "completed" else "red")
    age = span(op.seconds * 1e9)
    if not op.over:
        return Text(f"for {age}", "yellow")
    if op.state == "failed":
        return Text(f"failed {age} ago{error}", "red")
    return Text(f"done {age} ago", "dim")


def _place(op: CurrentOperation) -> str:
    file = "/".join(op.file.rsplit("/", 2)[-2:])
    return f"{file}:{op.line} {op.function}" if op.file else "?"


def _who(rank: Rank, hosts: bool) -> str:
    return f"{rank.host}:{rank.pid}" if hosts and rank.pid else str(rank.pid or "")


def _row(ranks: list[Rank], hosts: bool) -> list[RenderableType]:
    """Returns the cells for ranks in the same operation; those of the rank that has been there longest."""
    rank = max(ranks, key=lambda r: (r.operation.seconds or 0.0) if r.operation else 0.0)
    op = rank.operation
    cells: list[RenderableType] = [
        format_ranks([r.rank for r in ranks]),
        _who(rank, hosts) if len(ranks) == 1 else f"{len(ranks)} processes",
        Text(rank.process, _STYLE.get(rank.process, "")),
    ]
    if op is None:
        why = "has no ring on this host" if rank.process == ABSENT else "no operation yet"
        cells += ["", "", "", Text(why, "dim"), "", "", ""]
    else:
        more = f" (+{op.pending})" if op.pending else ""
        cells += [
            Text(op.name + more, "dim" if op.over else "bold"),
            op.group,
            str(op.seq),
            op.arguments,
            _bytes(op.size) if op.size else "",
            _since(rank),
            _place(op),
        ]
    cells.append(Text(format_ranks(rank.waits_for), "magenta"))
    return cells


def _lines(ranks: list[Rank]) -> list[list[Rank]]:
    if len(ranks) <= _SINGLE:
        return [[rank] for rank in ranks]
    alike: dict[object, list[Rank]] = defaultdict(list)
    for rank in ranks:
        op = rank.operation
        # Running and sleeping alternate while a rank waits, because it polls and sleeps in turn.
        place = None if op is None else (op.name, op.group, op.seq, op.state, op.file, op.line)
        alike[rank.gone and rank.process, place, tuple(rank.waits_for)].append(rank)
    return sorted(alike.values(), key=len)


def _what(rank: Rank) -> str:
    op = rank.operation
    if op is None:
        return "" if rank.process == ABSENT else ", has no operation yet"
    inside = "in" if not op.over else "failed in" if op.state == "failed" else "last did"
    return f", {inside} {op.name} #{op.seq} of '{op.group}' at {_place(op)}"


def _sentences(job: LiveJob) -> list[Text]:
    of = {rank.rank: rank for rank in job.ranks}
    out = []
    for blocker in job.blockers[:5]:
        rank = of[blocker.rank]
        held = f" ← held up: {format_ranks(blocker.holds_up)}" if blocker.holds_up else ""
        out.append(
            Text(f"rank {rank.rank} is {rank.process}{_what(rank)}{held}", "red" if rank.gone else "yellow")
        )
    if len(job.blockers) > 5:
        out.append(Text(f"and {len(job.blockers) - 5} more", "dim"))
    if job.cycle:
        steps = [f"rank {r} waits for {format_ranks(of[r].waits_for)}{_what(of[r])}" for r in job.cycle]
        out.append(Text("ranks wait for each other in a cycle:\n  " + "\n  ".join(steps), "red"))
    return out


def _table(job: LiveJob, most: int | None) -> list[RenderableType]:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in ("rank", "pid", "process", "operation", "group", "#", "arguments", "size", "since"):
        table.add_column(heading, justify="right" if heading in ("rank", "pid", "#", "size") else "left")
    table.add_column("called from", overflow="fold")
    table.add_column("waits for", overflow="fold")
    lines, hosts = _lines(job.ranks), len({rank.host for rank in job.ranks if rank.host}) > 1
    for ranks in lines[:most]:
        table.add_row(*_row(ranks, hosts))
    hidden = [rank for line in lines[most:] for rank in line] if most is not None else []
    more = [Text(f"{len(hidden)} more ranks do not fit; --once prints all", "dim")] if hidden else []
    return [table, *more]


def draw(snapshot: Snapshot, folder: Path | str, height: int | None = None) -> RenderableType:
    """Returns one frame: the blockers, then a line for each rank, within the terminal's `height`."""
    ranks = [rank for job in snapshot.jobs for rank in job.ranks]
    states = Counter(rank.process for rank in ranks)
    counts = ", ".join(f"{n} {state}" for state, n in states.most_common())
    head = Text(f"{time.strftime('%H:%M:%S')}  {folder}  {len(ranks)} ranks: {counts}", "bold")
    parts: list[RenderableType] = [head]
    for job in snapshot.jobs:
        sentences = _sentences(job)
        room = None if height is None else max(3, height // len(snapshot.jobs) - len(sentences) - 5)
        parts += [*sentences, *_table(job, room)]
    if snapshot.older:
        parts.append(Text(f"{snapshot.older} ended jobs are not shown; --all shows them", "dim"))
    parts += [Text(f"cannot read {f.path}: {f.message}", "red") for f in snapshot.findings]
    return Group(*parts)


def run(console: Console, take: Callable[[], Snapshot], folder: Path | str, interval: float) -> None:
    """Draws a new snapshot every `interval` seconds until the user interrupts."""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                live.update(draw(take(), folder, console.height), refresh=True)
                time.sleep(interval)
        except KeyboardInterrupt:
            return
