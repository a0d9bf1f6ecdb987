"""What the rank programs share: talking with the test, and looking at themselves.

A program writes one JSON object a line ({"event": ..., "at": seconds of CLOCK_MONOTONIC, ...}) and reads
lines that tell it to go on.
"""

import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, TypeVar, cast

import unicomm

T = TypeVar("T")


def say(event: str, **data: object) -> None:
    # One write: a line is never mixed with another thread's.
    line = json.dumps({"event": event, "at": time.monotonic(), **data}) + "\n"
    os.write(1, line.encode())


def hear() -> str:
    """The next line from the test; ends the process when the test is gone."""
    line = sys.stdin.readline()
    if not line:
        os._exit(99)
    return line.strip()


def leave() -> NoReturn:
    """For the end of a program on torch's own Gloo: a thread of it that still lets go of a tensor when Python
    ends would end the process by SIGABRT (pytorch/pytorch#179291)."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def describe(error: BaseException) -> dict[str, object]:
    fields = {name: getattr(error, name, None) for name in ("op", "comm", "seq", "rank", "culprits", "hint")}
    return {"type": type(error).__name__, "text": str(error), **fields}


@contextmanager
def reporting() -> Iterator[None]:
    """Says "error" when the block raises a `CommError`, and "done" when it does not."""
    try:
        yield
    except unicomm.CommError as error:
        say("error", **describe(error))
    else:
        say("done")


def settled(before: T, look: Callable[[], T] | None = None) -> T:
    """`look()`, by default `holdings()`, once it is as `before`, or as it is after five seconds.

    A thread that was joined has returned, but the kernel may be about to end it. Idle threads end within a
    second.
    """
    deadline = time.monotonic() + 5
    look = look or cast("Callable[[], T]", holdings)
    while (now := look()) != before and time.monotonic() < deadline:
        os.sched_yield()
    return now


def limit_memory(more: int) -> None:
    """From now on this process may map `more` bytes on top of what it has; `lift_limit` ends that."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))


def lift_limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def threads() -> tuple[list[str], list[str]]:
    """Of `holdings()` the threads."""
    now = holdings()
    return now["threads"], now["tasks"]


def holdings() -> dict[str, list[str]]:
    """What this process holds that a communicator could have left behind."""
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:  # the one that listed the folder
            continue
    maps = [
        line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line
    ]
    files = links + maps
    return {
        "memfd": sorted({name for name in files if name.startswith("/memfd:unicomm")}),
        "dev_shm": sorted({name for name in files if name.startswith("/dev/shm/")}),
        "pidfd": [name for name in links if "pidfd" in name],
        "threads": sorted(t.name for t in threading.enumerate() if t.name.startswith("unicomm")),
        "tasks": [str(len(os.listdir("/proc/self/task")))],
    }
