"""The lines of the program that are running."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unicomm.flight_recorder.ring.call_path import Whose, whose_of

_OURS = str(Path(__file__).parent.parent) + "/"


@functools.cache
def is_users(file: str) -> bool:
    """Returns whether a file is the program's: not torch's, not Python's, not ours."""
    return not file.startswith(_OURS) and whose_of(file) is Whose.USER


def user_place() -> str:
    """Returns the innermost line of the program, "file:line", "" if there is none."""
    return next(_user_lines(), "")


def user_path() -> tuple[str, ...]:
    """Returns the lines of the program that are running, the innermost first."""
    return tuple(_user_lines())


def _user_lines() -> Iterator[str]:
    frame: Any = sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            yield f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
