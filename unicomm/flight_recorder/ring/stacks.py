"""Stacks of processes: asked for from outside, and read from the text that `faulthandler` writes.

`faulthandler` writes from the signal handler itself: it needs neither Python's lock nor the main thread, so a
rank that hangs in native code answers, too. A stopped process does not; py-spy reads its memory, if it is
installed.

A stacks file has a line "Process state" and a dump if the process was asked, a dump without such a line if it
was ended by SIGTERM, and "Fatal Python error" before a dump if it crashed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unicomm.flight_recorder.texts import printable

from .files import MOST_SIDE_BYTES, read_file, rewrite_own
from .folder import pid_namespace, process_code, process_start_ticks
from .places import Place

_ANSWER, _PAUSE = 2.0, 0.01  # seconds that processes have to write their stacks; between two looks
_OUTSIDE = 5.0  # seconds that py-spy has for a process
_AGAIN = 5.0  # seconds in which a process is not asked twice
_ACTIVITY = {"R": "running", "S": "sleeping", "D": "waiting in the kernel", "T": "stopped", "t": "stopped"}
_STATE = re.compile(r"^Process state: (.*)$", re.MULTILINE)
_HEAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):")
_LINE = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
_FATAL = re.compile(r"^Fatal Python error: (.*)$", re.MULTILINE)
_CRASHES = {
    "Segmentation fault": "SIGSEGV",
    "Bus error": "SIGBUS",
    "Aborted": "SIGABRT",
    "Floating point exception": "SIGFPE",
    "Floating-point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
}


@dataclass(frozen=True)
class Thread:
    """The stack of a thread, the innermost call first. `current`: it handled the signal."""

    frames: tuple[Place, ...]
    current: bool = False


@dataclass(frozen=True)
class Stacks:
    """What a stacks file says.

    Attributes:
        threads: the main thread is the last one.
        crash: the name of the signal of which the process crashed, "" if it did not.
        activity: what the process did when it was asked: "running", "sleeping", ...; "" if unknown.
        terminated: whether SIGTERM has ended the process.
        at_ns: the wall-clock time of the last dump, 0 if unknown.
    """

    threads: tuple[Thread, ...] = ()
    crash: str = ""
    activity: str = ""
    terminated: bool = False
    at_ns: int = 0

    @property
    def main(self) -> tuple[Place, ...]:
        """The stack of the thread that crashed, else of the main thread, the innermost call first."""
        if self.crash and (current := [t.frames for t in self.threads if t.current]):
            return current[0]
        return self.threads[-1].frames if self.threads else ()


def parse_stacks(text: str, at_ns: int = 0) -> Stacks:
    """Reads the text of a stacks file, which was last written at `at_ns`. Other lines are passed over."""
    crash = ""
    if fatal := list(_FATAL.finditer(text)):
        said = printable(fatal[-1][1].strip())
        crash, text = _CRASHES.get(said, said), text[fatal[-1].start() :]
    state = _STATE.search(text)
    threads: list[tuple[bool, list[Place]]] = []
    dumps, in_frames = 0, False
    for line in text.splitlines():
        if head := _HEAD.match(line):
            if in_frames or not threads:  # an empty line stands between the threads of a dump
                threads, dumps = [], dumps + 1
            threads.append((head[1] == "Current thread", []))
            in_frames = False
        elif (found := _LINE.match(line)) and threads:
            threads[-1][1].append(_place(*found.groups()))
            in_frames = True
        else:
            in_frames = False
    last = tuple(Thread(tuple(frames), current) for current, frames in threads)
    terminated = not crash and dumps > (state is not None)
    return Stacks(last, crash, printable(state[1]) if state else "", terminated, at_ns)


def _place(file: str, line: str, function: str) -> Place:
    number = int(line) if len(line) < 10 and line.isdecimal() else 0
    return Place(printable(file), number, printable(function))


# --- asking ----------------------------------------------------------------------------------------------


def ask_for_stacks(folder: Path, seconds: float = _ANSWER) -> int:
    """Lets the running processes of a folder for rings write their stacks; returns how many have done so.

    They must be of this user and on this host. Waits `seconds` at most for those that were asked; those that
    were asked a moment ago are not asked again. Never raises: stacks are a help, not a need.
    """
    waiting = [stacks for path in sorted(folder.glob("*.ending")) if (stacks := _ask(path)) is not None]
    asked, until = len(waiting), time.monotonic() + seconds
    sizes = dict.fromkeys(waiting, 0)
    while waiting and time.monotonic() < until:
        time.sleep(_PAUSE)
        for stacks in list(waiting):
            before, sizes[stacks] = sizes[stacks], _size(stacks)
            if before == sizes[stacks] and _HEAD.search(_text(stacks).partition("\n")[2]):
                waiting.remove(stacks)
    return asked - len(waiting)


def _ask(path: Path) -> Path | None:
    """Asks the process of an ending file for its stacks.

    Returns the file that it writes them to; None if it does not write them.
    """
    stacks = path.with_suffix(".stacks")
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        # Only files of this user: what others write must not say whom a superuser's process signals.
        facts = json.loads(read_file(path, (os.geteuid(),), MOST_SIDE_BYTES))
        pid, info = int(facts["pid"]), stacks.lstat()
        if pid == os.getpid() or facts["pid_namespace"] != pid_namespace():
            return None
        fresh = info.st_size and time.time() - info.st_mtime < _AGAIN
        if fresh or _FATAL.search(_text(stacks)):
            return None
        handle = os.pidfd_open(pid)
        try:
            if process_start_ticks(pid) != facts["ticks"]:
                return None
            activity = _ACTIVITY.get(process_code(pid), "")
            rewrite_own(stacks, f"Process state: {activity}\n")  # its writer appends
            if activity == "stopped":
                _look_from_outside(pid, stacks)
            elif _is_caught(pid, int(facts["stack_signal"])):
                signal.pidfd_send_signal(handle, int(facts["stack_signal"]))
                return stacks
        finally:
            os.close(handle)
    return None


def _is_caught(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal. The program may have removed ours, and would be ended."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return number > 0 and bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _text(path: Path) -> str:
    try:
        return read_file(path, (os.geteuid(),), MOST_SIDE_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def _look_from_outside(pid: int, stacks: Path) -> None:
    """Lets py-spy read the stacks of a process that cannot run, and appends them as `faulthandler` does."""
    tool = shutil.which("py-spy")
    if tool is None:
        return
    command = [tool, "dump", "--pid", str(pid), "--nonblocking", "--json"]
    with contextlib.suppress(subprocess.SubprocessError, ValueError, KeyError, TypeError, OSError):
        done = subprocess.run(command, capture_output=True, timeout=_OUTSIDE, check=True)
        found: list[dict[str, Any]] = json.loads(done.stdout)
        lines = []
        for thread in sorted(found, key=lambda t: bool(t.get("os_thread_id") == pid)):
            lines.append(f"Thread {hex(int(thread['thread_id']))} (most recent call first):")
            lines += [f'  File "{f["filename"]}", line {f["line"]} in {f["name"]}' for f in thread["frames"]]
        rewrite_own(stacks, "\n".join([*lines, ""]), append=True)
