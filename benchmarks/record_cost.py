"""The cost of the flight recorder: one record, made from Python, in nanoseconds.

    python -m benchmarks.record_cost

A record is begun and finished. "call" is an empty call into the native core. Two of them are subtracted,
because a record that is made in the core, as the operations of the shared-memory backend make it, does not
need them. The frame is the user's call site directly above, one that was seen before, or none. Each figure
is the minimum of many rounds.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from unicomm import _core

ROUNDS, TIMES = 30, 20_000
ALL_REDUCE = 4


def least(once: Callable[[range], None]) -> float:
    """Nanoseconds of one step of `once`, which makes as many as its range is long."""
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter_ns()
        once(range(TIMES))
        best = min(best, (time.perf_counter_ns() - start) / TIMES)
    return best


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        recorder = _core.Recorder(str(Path(folder, "a.ucring")), "{}", 0, 1, 4096)
        comm = recorder.add_comm("main", "shm", "u", "0", 0, 1)
        begin, finish, count = recorder.begin, recorder.finish, _core.next_op_id

        def loop(steps: range) -> None:
            for _ in steps:
                pass

        def call(steps: range) -> None:
            for _ in steps:
                count()

        def record(steps: range) -> None:
            for seq in steps:
                finish(begin(comm, ALL_REDUCE, seq, 0, (), ()))

        empty = least(loop)
        one_call = least(call) - empty
        with_frame = least(record) - empty
        # The same, in a file that lies in the package's folder: no frame outside is found.
        _core.set_folders(own=str(Path(sys.argv[0]).resolve().parent), library="")
        other = _core.Recorder(str(Path(folder, "b.ucring")), "{}", 0, 1, 4096)
        comm = other.add_comm("main", "shm", "u", "0", 0, 1)
        begin, finish = other.begin, other.finish
        without_frame = least(record) - empty
    figures = {
        "call": one_call,
        "all frames ours": without_frame - 2 * one_call,
        "user's frame": with_frame - 2 * one_call,
    }
    for name, ns in figures.items():
        print(f"{name:>22} {ns:7.1f} ns")
    print(json.dumps({name: round(ns, 1) for name, ns in figures.items()}))


if __name__ == "__main__":
    main()
