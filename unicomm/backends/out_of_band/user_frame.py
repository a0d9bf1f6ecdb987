"""The user frame of a thread of this process: its innermost line in the user's own code."""

from __future__ import annotations

import os
import sysconfig
import threading

import torch

import unicomm
from unicomm.flight_recorder.recording.thread_frames import frames_of_threads
from unicomm.flight_recorder.ring.call_path import Whose, whose_of

_OURS = os.path.join(os.path.dirname(os.path.abspath(unicomm.__file__)), "")
_LIBRARY = os.path.join(sysconfig.get_path("stdlib"), "")
_TORCH = os.path.join(os.path.dirname(os.path.abspath(torch.__file__)), "")
_OTHERS = os.path.join(_LIBRARY, "site-packages", "")


def where_is(thread: int) -> str:
    """Returns "file:line in function", or "" if the thread has no user frame. An unknown `thread` means the
    main thread."""
    frames = frames_of_threads()
    frame = frames.get(thread) or frames.get(threading.main_thread().ident or 0)
    while frame is not None and _is_machinery(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _is_machinery(file: str) -> bool:
    if file.startswith((_OURS, _TORCH, "<frozen")):
        return True
    if file.startswith(_LIBRARY) and not file.startswith(_OTHERS):
        return True
    return whose_of(file) is Whose.WRAPPER
