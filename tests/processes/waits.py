"""How long ranks waited for an error, by what programs/looks.py notes."""

from tests.processes.rank_processes import Event


def seconds_waited(error: Event, known: float) -> float:
    """Seconds from the time when a fault could be known to the error, as a machine without other load counts.

    These are the pauses before the looks that a rank made after `known`, a time of `time.monotonic()`.
    """
    return sum(pause for at, pause in error["looks"] if at > known)
