"""Places in programs, and which of several frames is the user's own."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType

from .call_path import Whose, whose_of

_MOST_FRAMES = 40
_INSTALLED = re.compile(r"/(?:site|dist)-packages/")


@dataclass(frozen=True)
class Place:
    """A line of a program, and the function it is in."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def said(self) -> str:
        """ "in `load_batch`, data.py:88", for a sentence."""
        inside = "" if self.function.startswith("<") else f"in `{self.function}`, "
        return f"{inside}{self.file}:{self.line}"

    @staticmethod
    def of_traceback(trace: TracebackType | None) -> list[Place]:
        """The places of a traceback, the outermost first; of a long one, the innermost."""
        return [Place(f.f_code.co_filename, line, f.f_code.co_name) for f, line in traceback.walk_tb(trace)][
            -_MOST_FRAMES:
        ]

    @staticmethod
    def of_stack(frame: FrameType | None) -> list[Place]:
        """The places of a stack, the innermost first."""
        out: list[Place] = []
        while frame is not None and len(out) < _MOST_FRAMES:
            out.append(Place(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name))
            frame = frame.f_back
        return out


def library_folders() -> list[str]:
    """The folders of the standard library and of unicomm; `is_library` knows packages by "site-packages"."""
    own = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return [os.path.join(path, "") for path in (os.path.dirname(os.__file__), own)]


def is_library(file: str, folders: Sequence[str]) -> bool:
    """Whether a file belongs to the interpreter, to unicomm or to an installed package.

    Unlike the user's line of an operation (call_path.py), an exception may come from any package.
    """
    installed = _INSTALLED.search(file) is not None or whose_of(file) is not Whose.USER
    return installed or any(file.startswith(folder) for folder in folders if folder)


def user_place(frames: Sequence[Place], folders: Sequence[str]) -> Place | None:
    """The innermost frame in the user's own files; if there is none, the innermost frame.

    None without frames.
    """
    own = [f for f in frames if not is_library(f.file, folders)]
    return own[0] if own else frames[0] if frames else None
