"""`unicomm trace top`: a snapshot on the terminal, drawn again and again, or frame after frame in a file."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from unicomm.flight_recorder.texts import format_ranks, printable, span

from .snapshot import ABSENT, CurrentOperation, LiveJob, Rank, Snapshot

_STYLE = {
    "running": "green",
    "sleeping": "cyan",
    "stopped": "yellow bold",
    "dead": "red bold",
    "absent": "red",
}
# Columns of terminals with room for all that is known of an operation, and with room for its arguments.
_WIDE, _USUAL = 150, 100
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
    return Text(f"{age} ago", "dim")


def _place(op: CurrentOperation, short: bool = False) -> str:
    if not op.file:
        return "?"
    if short:
        return f"{op.file.rsplit('/', 1)[-1]}:{op.line}"
    return f"{'/'.join(op.file.rsplit('/', 2)[-2:])}:{op.line} {op.function}"


def _who(rank: Rank, hosts: bool) -> str:
    return f"{rank.host}:{rank.pid}" if hosts and rank.pid else str(rank.pid or "")


def _row(ranks: list[Rank], hosts: bool, wide: bool) -> dict[str, RenderableType]:
    """Returns the cells, by heading, of ranks in the same operation: those of the one longest in it."""
    rank = max(ranks, key=lambda r: (r.operation.seconds or 0.0) if r.operation else 0.0)
    op = rank.operation
    cells: dict[str, RenderableType] = {
        "rank": format_ranks([r.rank for r in ranks]),
        "pid": _who(rank, hosts) if len(ranks) == 1 else f"{len(ranks)} processes",
        "process": Text(rank.process, _STYLE.get(rank.process, "")),
        "waits for": Text(format_ranks(rank.waits_for), "magenta"),
    }
    if op is None:
        why = "has no ring on this host" if rank.process == ABSENT else "no operation yet"
        return cells | {"operation": Text(why, "dim")}
    more = f" (+{op.pending})" if op.pending else ""
    return cells | {
        "operation": Text(op.name + more, "dim" if op.over else "bold"),
        "group": Text(op.group),
        "#": str(op.seq),
        "arguments": Text(op.arguments),
        "size": _bytes(op.size) if op.size else "",
        "since": _since(rank),
        "called from": Text(_place(op, short=not wide)),
    }


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


_RIGHT = ("rank", "pid", "#", "size")
_FOLDED = ("rank", "operation", "group", "arguments", "called from", "waits for")


def _table(lines: Sequence[list[Rank]], hosts: bool, width: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    headings = ["rank", "pid", "process", "operation", "group", "#", "arguments", "since", "called from"]
    if width >= _WIDE:
        headings.insert(7, "size")
    elif width < _USUAL:
        headings.remove("arguments")
    headings.append("waits for")
    for heading in headings:
        table.add_column(
            heading,
            justify="right" if heading in _RIGHT else "left",
            overflow="fold",
            no_wrap=heading not in _FOLDED,
        )
    for ranks in lines:
        cells = _row(ranks, hosts, width >= _WIDE)
        table.add_row(*(cells.get(heading, "") for heading in headings))
    return table


def draw(snapshot: Snapshot, folder: Path | str, width: int, most: int | None = None) -> Group:
    """Returns one frame for a terminal of `width` columns: the blockers, then a line for each rank.

    `most`: the number of lines for the ranks of each job; None for all.
    """
    ranks = [rank for job in snapshot.jobs for rank in job.ranks]
    states = Counter(rank.process for rank in ranks)
    counts = ", ".join(f"{n} {state}" for state, n in states.most_common())
    head = Text(
        f"{time.strftime('%H:%M:%S')}  {printable(str(folder))}  {len(ranks)} ranks: {counts}", "bold"
    )
    parts: list[RenderableType] = [head]
    for job in snapshot.jobs:
        lines, hosts = _lines(job.ranks), len({rank.host for rank in job.ranks if rank.host}) > 1
        parts += [*_sentences(job), _table(lines[:most], hosts, width)]
        if most is not None and (hidden := sum(map(len, lines[most:]))):
            parts.append(Text(f"{hidden} more ranks do not fit; --once prints all", "dim"))
    if snapshot.older:
        parts.append(Text(f"{snapshot.older} ended jobs are not shown; --all shows them", "dim"))
    parts += [Text(f"cannot read {f.path}: {f.message}", "red") for f in snapshot.findings]
    return Group(*parts)


def fitting(snapshot: Snapshot, folder: Path | str, console: Console) -> Group:
    """Returns a frame with as many lines of ranks as fit the terminal, but at least one a job."""
    most = max((len(_lines(job.ranks)) for job in snapshot.jobs), default=0)
    frame = draw(snapshot, folder, console.width)
    while most > 1 and (over := len(console.render_lines(frame)) - console.height) > 0:
        most = max(1, most - max(1, over // (2 * len(snapshot.jobs))))
        frame = draw(snapshot, folder, console.width, most)
    return frame


def run(console: Console, take: Callable[[], Snapshot], folder: Path | str, interval: float) -> None:
    """Draws a new snapshot every `interval` seconds until the user interrupts.

    In a file or a pipe each frame is written whole, below the one before.
    """
    try:
        if not console.is_terminal:
            while True:
                console.print(draw(take(), folder, console.width))
                console.print()
                console.file.flush()
                time.sleep(interval)
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(fitting(take(), folder, console), refresh=True)
                time.sleep(interval)
    except KeyboardInterrupt:
        return
