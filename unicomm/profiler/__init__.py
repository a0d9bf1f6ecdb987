"""The profiler: every operation of every rank on one timeline, joined by its sequence number.

trace_table.py  the table of operations that comms/execution/profiling/events.py leaves in a trace
chrome.py       Chrome traces read and written a piece at a time
records.py      typed records of one rank's operations, from a profiler or from a trace
operations.py   the operations of all ranks as columns: waiting, lateness
alignment.py    the ranks' clocks put onto one
merging.py      one trace of all ranks                     timeline.py     tracks, slices and flows in it
merged_json.py  as Chrome JSON      pftrace.py, wire.py    as Perfetto's packets
stencil.py      many records that differ in a few numbers, as bytes
figures.py      where the time goes and who is late        figures_text.py  figures_html.py
graphs.py       operations captured in CUDA graphs, put onto the replayed kernels
"""

from typing import Any

_WHERE = {
    "CommEvent": "records",
    "events": "records",
    "read_events": "records",
    "TraceError": "chrome",
    "merge": "merging",
    "report": "figures",
    "graph_annotations": "graphs",
    "annotate": "graphs",
}
__all__ = sorted(_WHERE)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    # The reading half needs no torch, so nothing is imported before it is asked for.
    if name in _WHERE:
        from importlib import import_module

        return getattr(import_module(f".{_WHERE[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
