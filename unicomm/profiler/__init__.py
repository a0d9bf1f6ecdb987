"""The profiler: the operations of all ranks on one timeline, matched by communicator and sequence number.

While a profiler runs, comms/execution records every operation and writes a table of them into the trace. This
package reads these traces, or the flight recorder's rings, and imports torch only for `events`.

Reading:
trace_table.py        the table of operations in a trace, read and checked
chrome.py             Chrome traces of any size, read and written a piece at a time
records.py            typed records of one rank's operations, from a profiler or from its trace
operation_columns.py  the operations of all ranks as columns; arrivals compared, waiting and lateness
alignment.py          offsets between the ranks' clocks

Merging:
merging.py            one trace of all ranks, and what its two output formats have in common
merged_slices.py      the tracks, slices and flows of the operations in it
merged_json.py        output as Chrome JSON
merged_perfetto.py    output as Perfetto's packets

Reports:
figures.py            where the time of communication goes, and which ranks are late
figures_text.py       the report on a terminal
figures_html.py       the report as one HTML page, in the look of flight_recorder/pages

CUDA graphs:
annotations.py        annotations of captured operations, put onto the replayed kernels of a trace
"""

from typing import Any

_WHERE = {
    "CommEvent": "records",
    "events": "records",
    "read_events": "records",
    "TraceError": "chrome",
    "merge": "merging",
    "report": "figures",
    "graph_annotations": "annotations",
    "annotate": "annotations",
}
__all__ = sorted(_WHERE)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    # The reading half needs no torch, so each name is imported when it is first used.
    if name in _WHERE:
        from importlib import import_module

        from unicomm.flight_recorder import extras

        try:
            module = import_module(f".{_WHERE[name]}", __name__)
        except ImportError as error:
            raise (extras.explain(error, f"unicomm.profiler.{name}", "profile") or error) from None
        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
