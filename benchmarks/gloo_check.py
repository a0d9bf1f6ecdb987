"""The cost of comparing signatures on gloo: each operation on two communicators in turn, with and without.

    python -m benchmarks.gloo_check [RANKS ...]          default: 2 4

Prints microseconds per call with and without the comparison, and their ratio. Each figure is the fastest of
the rounds, because other load on the machine only makes a round slower.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.multiprocessing
from torch.distributed import TCPStore

import unicomm

ROUNDS, CALLS = 30, 20
SIZES = (16, 4096, 1 << 20)  # elements of float32


def rank_main(rank: int, size: int, port: int) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    comms = [
        unicomm.new_comm(
            "gloo",
            "cpu",
            rank=rank,
            size=size,
            store=store,
            name=f"check-{check}",
            hints={"check_mismatch": check},
        )
        for check in ("true", "false")
    ]
    for name, elements in [("barrier", 0), *((n, e) for n in ("all_reduce", "broadcast") for e in SIZES)]:
        x = torch.ones(elements)

        def once(comm: unicomm.Communicator, name: str = name, x: torch.Tensor = x) -> None:
            if name == "barrier":
                comm.barrier()
            elif name == "all_reduce":
                comm.all_reduce(x, unicomm.ReduceOp.PRODUCT)
            else:
                comm.broadcast(x, 0)

        took: list[list[float]] = [[], []]
        calls = CALLS if elements < 1 << 20 else 5
        for _ in range(ROUNDS):
            for which, comm in enumerate(comms):
                comm.barrier()
                began = time.perf_counter()
                for _ in range(calls):
                    once(comm)
                took[which].append((time.perf_counter() - began) / calls * 1e6)
        if rank == 0:
            on, off = (min(t) for t in took)
            print(
                f"{size} ranks  {name:10} {elements * 4:8} bytes"
                f"  {on:8.0f} us  {off:8.0f} us  {on / off:.2f}",
                flush=True,
            )
    for comm in comms:
        comm.finalize()


def main() -> None:
    for size in [int(a) for a in sys.argv[1:]] or [2, 4]:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        torch.multiprocessing.spawn(rank_main, (size, store.port), size)


if __name__ == "__main__":
    main()
