"""Calls of torch.distributed's process group beside its communicator's: a message there and back, a barrier.

    python -m benchmarks.group_calls

Two processes on one host, over shared memory. All contenders are measured in turn, so that other load on the
machine affects all. Figures are medians in microseconds; the ratio is to the communicator, turn by turn.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from unicomm.c10d.process_group import UnicommProcessGroup

TURNS, TIMES = 40, 200


def contenders(group: UnicommProcessGroup, stock: dist.ProcessGroup) -> dict[str, Callable[[], object]]:
    comm, me, x = group.get_comm(), group.rank(), torch.ones(1, dtype=torch.int64)

    def there_and_back(send: Callable[[], object], receive: Callable[[], object]) -> Callable[[], object]:
        first, second = (send, receive) if me == 0 else (receive, send)

        def run() -> None:
            first()
            second()

        return run

    def waiting(of: dist.ProcessGroup) -> tuple[Callable[[], object], Callable[[], object]]:
        return (
            lambda: dist.send(x, group_dst=peer, group=of),
            lambda: dist.recv(x, group_src=peer, group=of),
        )

    peer = 1 - me
    options = dist.BarrierOptions()
    options.asyncOp = False
    return {
        "message: communicator": there_and_back(lambda: comm.send(x, peer), lambda: comm.recv(x, peer)),
        "message: communicator, async_op": there_and_back(
            lambda: comm.send(x, peer, async_op=True).wait(), lambda: comm.recv(x, peer, async_op=True).wait()
        ),
        "message: group": there_and_back(
            lambda: group.send([x], peer, 0).wait(), lambda: group.recv([x], peer, 0).wait()
        ),
        "message: dist": there_and_back(*waiting(group)),
        "message: dist.isend, irecv": there_and_back(
            lambda: dist.isend(x, group_dst=peer, group=group).wait(),
            lambda: dist.irecv(x, group_src=peer, group=group).wait(),
        ),
        "message: stock Gloo": there_and_back(*waiting(stock)),
        "barrier: communicator": comm.barrier,
        "barrier: group": lambda: group.barrier(options).wait(),
        "barrier: dist": lambda: dist.barrier(group),
        "barrier: stock Gloo": lambda: dist.barrier(stock),
    }


def rank(number: int, folder: str) -> None:
    store = dist.FileStore(str(Path(folder, "store")), 2)
    dist.init_process_group("gloo", store=store, rank=number, world_size=2)
    ours = dist.new_group(backend="unicomm")
    assert isinstance(ours, UnicommProcessGroup)
    assert dist.group.WORLD is not None
    calls = contenders(ours, dist.group.WORLD)
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(TURNS):
        for name, call in calls.items():
            call()
            ours.get_comm().barrier()
            began = time.perf_counter()
            for _ in range(TIMES):
                call()
            found[name].append((time.perf_counter() - began) / TIMES * 1e6)
    if number == 0:
        Path(folder, "figures").write_text(json.dumps(found))
    dist.destroy_process_group()


def main() -> None:
    if len(sys.argv) == 3:
        rank(int(sys.argv[1]), sys.argv[2])
        return
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "benchmarks.group_calls"]
        ranks = [subprocess.Popen([*command, str(r), folder], env=environment) for r in range(2)]
        if any(r.wait(timeout=300) for r in ranks):
            raise SystemExit("a rank has failed")
        found = json.loads(Path(folder, "figures").read_text())
    for name, figures in found.items():
        base = found[name.split(":")[0] + ": communicator"]
        ratio = statistics.median(a / b for a, b in zip(figures, base, strict=True))
        print(f"{name:>31} {statistics.median(figures):8.2f} us, {ratio:6.2f} times")


if __name__ == "__main__":
    main()
