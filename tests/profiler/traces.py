"""Ready-made traces of many ranks, from the benchmark's generator."""

import gzip
import importlib.util
import json
from pathlib import Path

_PATH = Path(__file__).parents[2] / "benchmarks" / "profile_merge.py"
_SPEC = importlib.util.spec_from_file_location("profile_merge_benchmark", _PATH)
generator = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(generator)


def load(path):
    """A trace, and the checks that every viewer relies on: slices of a thread nest."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    trace = json.loads(text)
    by_thread = {}
    for e in trace["traceEvents"]:
        if e["ph"] == "X":
            by_thread.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"], e["name"]))
    for slices in by_thread.values():
        slices.sort(key=lambda s: (s[0], -s[1]))
        open_ = []
        for begin, end, name in slices:
            while open_ and open_[-1] <= begin + 0.002:
                open_.pop()
            assert not open_ or end <= open_[-1] + 0.002, f"{name} overlaps"
            open_.append(end)
    return trace


def processes(trace):
    """pid -> name."""
    return {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}


def operations(trace, name="unicomm::all_reduce"):
    return [
        e for e in trace["traceEvents"] if e["ph"] == "X" and e.get("cat") == "unicomm" and e["name"] == name
    ]
