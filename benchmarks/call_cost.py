"""The cost of a call on shared memory with one rank, where nothing is sent: nanoseconds, and their floor.

    python -m benchmarks.call_cost
    python -m benchmarks.call_cost --beside ../before    # a checkout with its core in unicomm/, in turns

Each figure is the median over the turns, without the loop around it. The floor is what no call can do
without: a call of a native function, one record with its call path (benchmarks/record_cost.py), and reading
the tensor. The last is taken from a call that the fast path refuses after it has read the tensor.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

TURNS, ROUNDS, TIMES = 5, 9, 4000


def per_call(f: Callable[[], object]) -> float:
    began = time.perf_counter_ns()
    for _ in range(TIMES):
        f()
    return (time.perf_counter_ns() - began) / TIMES


def figures() -> dict[str, float]:
    import numpy as np
    import torch

    import unicomm
    from unicomm import _core

    torch.set_num_threads(1)
    store = torch.distributed.HashStore()
    comm = unicomm.new_comm("shm", "cpu", name="cost", store=store, rank=0, size=1)
    x, y, total = torch.ones(2), torch.ones(2), unicomm.ReduceOp.SUM
    odd = torch.ones(4)[::2]  # refused when it has been read
    array = np.ones(2, np.float32)
    fast = comm._engine.fast
    recorder = comm._member.recorder
    index = comm._member.recorder_index

    def record() -> None:
        recorder.finish(recorder.begin(index, 4, 0, 0, (), ()), 3, 0)

    calls: dict[str, Callable[[], object]] = {
        "loop": lambda: None,
        "native call": lambda: _core.next_op_id(),  # noqa: PLW0108
        "two native calls and a record": record,
        "refused": lambda: fast.all_reduce(odd, total, False, None, None),
        "all_reduce": lambda: comm.all_reduce(x, total),
        "broadcast": lambda: comm.broadcast(x, 0),
        "all_gather_single": lambda: comm.all_gather_single(y, x),
        "reduce_scatter_single": lambda: comm.reduce_scatter_single(y, x, total),
        "all_to_all_single": lambda: comm.all_to_all_single(y, x),
        "barrier": lambda: comm.barrier(),  # noqa: PLW0108 (a method looked up is the one in Python)
        "all_reduce of a numpy array": lambda: comm.all_reduce(array, total),
    }
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            found[name].append(per_call(call))
    comm.finalize()
    medians = {name: statistics.median(values) for name, values in found.items()}
    loop = medians.pop("loop")
    medians = {name: value - loop for name, value in medians.items()}
    native = medians["native call"]
    record_only = medians.pop("two native calls and a record") - 2 * native
    return {"floor": native + record_only + (medians.pop("refused") - native), **medians}


def measured(root: Path | None) -> dict[str, float]:
    """The figures of this checkout, or of that in `root`, in a process of its own."""
    here = str(Path(__file__).parent)
    lines = ["import sys, json", f"sys.path.insert(0, {here!r})"]
    if root is not None:
        # An editable installation would find its own package first.
        lines += ["sys.meta_path[:] = [f for f in sys.meta_path if 'Redirecting' not in type(f).__name__]"]
        lines += [f"sys.path.insert(0, {str(root)!r})"]
    code = "; ".join([*lines, "import call_cost; print(json.dumps(call_cost.figures()))"])
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--beside", type=Path, help="another checkout, measured in turns with this one")
    options = parser.parse_args()
    turns: dict[str, list[dict[str, float]]] = {"here": []} | ({"beside": []} if options.beside else {})
    for _ in range(TURNS):
        turns["here"].append(measured(None))
        if options.beside:
            turns["beside"].append(measured(options.beside.resolve()))
    print(f"{'ns per call':>30}" + "".join(f"{name:>10}" for name in turns) + f"{'/ floor':>10}")
    for name in turns["here"][0]:
        medians = [statistics.median(t[name] for t in found) for found in turns.values()]
        floor = statistics.median(t["floor"] for t in turns["here"])
        print(
            f"{name:>30}" + "".join(f"{value:10.0f}" for value in medians) + f"{medians[0] / floor:10.2f}",
            end="",
        )
        if options.beside:
            ratios = [b[name] / a[name] for a, b in zip(turns["here"], turns["beside"], strict=True)]
            print(f"   beside / here {statistics.median(ratios):.2f}", end="")
        print()


if __name__ == "__main__":
    main()
