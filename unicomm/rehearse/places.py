"""The line of the program that is running."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from unicomm.flight_recorder.ring.call_path import Whose, whose_of

_OURS = str(Path(__file__).parent.parent) + "/"


def is_users(file: str) -> bool:
    """Returns whether a file is the program's: not torch's, not Python's, not ours."""
    return not file.startswith(_OURS) and whose_of(file) is Whose.USER


def user_place() -> str:
    """Returns the innermost line of the program, "file:line", "" if there is none."""
    frame: Any = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
