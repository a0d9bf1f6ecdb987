"""How long ranks waited for an error, and how much longer that may be on a busy machine."""

import os
from pathlib import Path

from tests.processes.rank_processes import Event


def seconds_waited(error: Event, known: float) -> float:
    """Seconds from the time when a fault could be known to the error, as a machine without other load counts.

    By what programs/looks.py notes.

    These are the pauses before the looks that a rank made after `known`, a time of `time.monotonic()`.
    """
    return sum(pause for at, pause in error["looks"] if at > known)


def slowdown() -> float:
    """How many times longer than on an idle machine a wait may take: the threads per core, at least 1.

    The average of a minute is too low where the load has just begun, so those that run now count, too.
    """
    running = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
    return max(1.0, max(os.getloadavg()[0], running) / (os.cpu_count() or 1))
