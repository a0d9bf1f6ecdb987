"""The flight recorder: always on, and readable by other processes, also after the recorded process ended.

A recorded process uses `recording`. All other rooms read: they import neither torch nor the native core,
except formats/pickles.py. Each room imports only the rooms above it in this list, and `recording` is imported
by no other room:

texts.py    short texts: lists of ranks, durations, names of groups
memory.py   the memory that readers may need: what is allowed, and what JSON needs once decoded
extras.py   which packages of an extra are missing, and the sentence that says so
pages/      the look of HTML pages, also of the profiler's: frame, tables, bars, charts, style
ring/       the ring file: where rings are stored, how a ring is read and copied
formats/    torch's dump format: written from rings, read from pickles and JSON; names of operations and types
recording/  what runs in the recorded process: its ring, its dumps, FlightRecorderHook
table/      the operations of all ranks in one table of columns, loaded from rings and dumps
analysis/   what went wrong: matching, wait-for graph, findings with culprits, stragglers, two runs compared
reports/    rings, reports and differences as text, JSON, Markdown, an HTML page and a Perfetto trace
live/       what the ranks of running jobs do now
metrics/    counters, states, lateness and the verdict for Prometheus and OpenTelemetry
corpus/     simulated jobs with known faults, which measure the analyzer
"""

from typing import Any


def __getattr__(name: str) -> Any:
    # Readers need neither the native core nor this process's ring: importing the
    # package loads neither.
    if name in ("dump", "dump_folder"):
        from .recording import dumps

        return getattr(dumps, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
