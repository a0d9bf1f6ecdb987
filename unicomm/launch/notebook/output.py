"""Output of several ranks on one screen: whole lines, each after its rank."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.text import Text

_COLORS = ("cyan", "green", "magenta", "blue", "yellow", "bright_cyan", "bright_green", "bright_magenta")

Listener = Callable[[int, str, str], object]


class RankOutput:
    """Prints lines as they become complete, or passes (rank, "stdout" or "stderr", line) to `listener`."""

    def __init__(self, size: int, listener: Listener | None) -> None:
        self._width = len(str(size - 1))
        self._listener = listener or self._print
        self._begun: dict[tuple[int, str], str] = {}

    def add(self, rank: int, stream: str, text: str) -> None:
        """Adds output of a rank, and shows the lines that it completes."""
        *lines, rest = (self._begun.pop((rank, stream), "") + text).split("\n")
        for line in lines:
            self._listener(rank, stream, _last(line.removesuffix("\r")))
        if rest:
            self._begun[rank, stream] = rest

    def flush(self) -> None:
        """Shows incomplete lines."""
        begun, self._begun = self._begun, {}
        for (rank, stream), line in begun.items():
            if shown := _last(line.rstrip("\r")):
                self._listener(rank, stream, shown)

    def say(self, text: str) -> None:
        """Prints a line that comes from no rank."""
        _console(sys.stderr).print(Text(text, style="bold yellow"), soft_wrap=True)

    def _print(self, rank: int, stream: str, line: str) -> None:
        prefix = Text(f"[{rank:>{self._width}}] ", style=_COLORS[rank % len(_COLORS)])
        if stream == "stderr":
            prefix.stylize("bold")
        console = _console(sys.stdout if stream == "stdout" else sys.stderr)
        console.print(prefix + Text.from_ansi(line), soft_wrap=True)


def _last(line: str) -> str:
    """Returns the part of a line that a terminal would show last, such as a progress bar's last state."""
    return line.rpartition("\r")[2]


def _console(stream: Any) -> Console:
    # A console per line, because notebooks and tests replace the streams for each cell. In a notebook colors
    # are forced, because rich's own support of notebooks would show each line as a separate object.
    in_notebook = type(stream).__module__.partition(".")[0] == "ipykernel"
    return Console(
        file=stream, force_jupyter=False, force_terminal=True if in_notebook else None, highlight=False
    )
