"""Output of several ranks on one screen: whole lines, each with its rank in front."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.text import Text

_COLORS = ("cyan", "green", "magenta", "blue", "yellow", "bright_cyan", "bright_green", "bright_magenta")

Listener = Callable[[int, str, str], object]


class RankOutput:
    """Shows lines as they become complete. `listener` gets (rank, "stdout" or "stderr", line) instead."""

    def __init__(self, size: int, listener: Listener | None) -> None:
        self._width = len(str(size - 1))
        self._listener = listener or self._print
        self._begun: dict[tuple[int, str], str] = {}

    def add(self, rank: int, stream: str, text: str) -> None:
        """Takes some output of a rank."""
        *lines, rest = (self._begun.pop((rank, stream), "") + text).split("\n")
        for line in lines:
            self._listener(rank, stream, _last(line.removesuffix("\r")))
        if rest:
            self._begun[rank, stream] = rest

    def flush(self) -> None:
        """Shows lines that have no end yet."""
        begun, self._begun = self._begun, {}
        for (rank, stream), line in begun.items():
            if shown := _last(line.rstrip("\r")):
                self._listener(rank, stream, shown)

    def say(self, text: str) -> None:
        """A line that is no rank's."""
        _console(sys.stderr).print(Text(text, style="bold yellow"), soft_wrap=True)

    def _print(self, rank: int, stream: str, line: str) -> None:
        prefix = Text(f"[{rank:>{self._width}}] ", style=_COLORS[rank % len(_COLORS)])
        if stream == "stderr":
            prefix.stylize("bold")
        console = _console(sys.stdout if stream == "stdout" else sys.stderr)
        console.print(prefix + Text.from_ansi(line), soft_wrap=True)


def _last(line: str) -> str:
    """What a terminal would show of a line that was written over: a progress bar's last state."""
    return line.rpartition("\r")[2]


def _console(stream: Any) -> Console:
    # For each line: a notebook and a test have another stream for each cell. A notebook shows colors, and
    # rich's own way there would make each line an object of its own.
    in_notebook = type(stream).__module__.partition(".")[0] == "ipykernel"
    return Console(
        file=stream, force_jupyter=False, force_terminal=True if in_notebook else None, highlight=False
    )
