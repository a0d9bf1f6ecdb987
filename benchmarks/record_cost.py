"""The cost of the flight recorder: one record with its call path, made from Python, in nanoseconds.

    python -m benchmarks.record_cost
    python -m benchmarks.record_cost --beside before/_core.cpython-311-x86_64-linux-gnu.so

A record is begun and finished. Two empty calls into the native core are subtracted, because a record that is
made in the core, as the operations of the shared-memory backend make it, does not need them.

"In N calls": the loop that makes the records is inside N nested calls of the user. "No user": all files are
ours. Each figure is the minimum of many rounds. `--beside` measures another core in turns with this one.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROUNDS, TIMES = 12, 20_000
TURNS = 5
ALL_REDUCE = 4
IN_CALLS = (1, 8, 24, 64, 200)


def least(once: Callable[[range], None]) -> float:
    """Nanoseconds of one step of `once`, which makes as many as its range is long."""
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter_ns()
        once(range(TIMES))
        best = min(best, (time.perf_counter_ns() - start) / TIMES)
    return best


def nested(depth: int, inner: Callable[..., Any]) -> Callable[..., Any]:
    """`inner` inside `depth` calls, each of a function with a line of its own."""
    for level in range(depth):
        names: dict[str, Any] = {"inner": inner}
        text = "\n" * level + "def call(given):\n return inner(given)"
        exec(compile(text, f"level{level}.py", "exec"), names)
        inner = names["call"]
    return inner


def times(core: Any, folder: Path) -> dict[str, float]:
    """Nanoseconds of one step of each loop."""
    recorder = core.Recorder(str(folder / "a.ucring"), "{}", 0, 1, 4096)
    comm = recorder.add_comm("main", "shm", "u", "0", 0, 1)
    begin, finish, count = recorder.begin, recorder.finish, core.next_op_id

    def loop(steps: range) -> None:
        for _ in steps:
            pass

    def call(steps: range) -> None:
        for _ in steps:
            count()

    def record(steps: range) -> None:
        for seq in steps:
            finish(begin(comm, ALL_REDUCE, seq, 0, (), ()))

    found = {"loop": least(loop), "call": least(call)}
    found |= {f"in {n} calls": nested(n, least)(record) for n in IN_CALLS}
    # The same, with all files in the package's folder: no user's frame is found.
    ours = str(Path(sys.argv[0]).resolve().parent)
    core.set_libraries(own=ours) if hasattr(core, "set_libraries") else core.set_folders(own=ours, library="")
    recorder = core.Recorder(str(folder / "b.ucring"), "{}", 0, 1, 4096)
    comm = recorder.add_comm("main", "shm", "u", "0", 0, 1)
    begin, finish = recorder.begin, recorder.finish
    return found | {"no user": least(record)}


def core_at(path: str) -> Any:
    loader = importlib.machinery.ExtensionFileLoader("_core", path)
    spec = importlib.util.spec_from_file_location("_core", path, loader=loader)
    assert spec is not None
    core = importlib.util.module_from_spec(spec)
    loader.exec_module(core)
    return core


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--beside", help="another core, which is measured in turns with this one")
    options.add_argument("--core", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.core:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(times(core_at(given.core), Path(folder))))
        return
    here = importlib.util.find_spec("unicomm._core")
    assert here is not None
    assert here.origin is not None
    cores = {"this core": here.origin} | ({"the other": given.beside} if given.beside else {})
    best: dict[str, dict[str, float]] = {name: {} for name in cores}
    for _ in range(TURNS):
        for name, path in cores.items():
            command = [sys.executable, "-m", "benchmarks.record_cost", "--core", path]
            found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            best[name] = {key: min(ns, best[name].get(key, ns)) for key, ns in found.items()}
    rows = {}
    for name, found in best.items():
        loop, call = found.pop("loop"), found.pop("call")
        rows[name] = {key: round(ns - loop - 2 * (call - loop), 1) for key, ns in found.items()}
    print(f"{'ns per record':>16}" + "".join(f"{name:>12}" for name in cores))
    for key in rows["this core"]:
        print(f"{key:>16}" + "".join(f"{rows[name][key]:12}" for name in cores))
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
