"""One rank of a job whose network fails: random operations with known results, until rank 0 is told to end.

    python -m tests.chaos.network_rank BACKEND BETWEEN TIMEOUT SEED

It says "ready", and at its end what became of it, each as a line of JSON.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import threading
import time

import torch

import unicomm
from tests.chaos.operations import Steps
from tests.chaos.spec import WrongDataError
from unicomm import CommError, ReduceOp

TOLD = os.dup(1)  # UCX writes its warnings to the standard output


def say(value: object) -> None:
    os.write(TOLD, f"{json.dumps(value)}\n".encode())


def main(backend: str, between: str, timeout: float, seed: str) -> None:
    os.dup2(2, 1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    hints = {"between": between} if between else {"interface": "eth0"} if backend == "gloo" else None
    comm = unicomm.new_comm(backend, torch.device("cpu"), name="main", timeout=timeout, hints=hints)
    steps = Steps(comm, list(range(size)), rank)
    end = threading.Event()
    if rank == 0:
        threading.Thread(target=lambda: (sys.stdin.readline(), end.set()), daemon=True).start()
    say("ready")
    ended, longest, step, outcome, culprits, text = torch.zeros(1), 0.0, 0, "right", [], ""
    try:
        for step in itertools.count():
            began = time.monotonic()
            steps.run(step, random.Random(f"{seed} {step}"))
            ended[0] = end.is_set()
            comm.all_reduce(ended, ReduceOp.MAX, async_op=False)
            longest = max(longest, time.monotonic() - began)
            if ended:
                break
    except (CommError, WrongDataError) as error:
        outcome, culprits, text = type(error).__name__, sorted(getattr(error, "culprits", ())), str(error)
    when = time.monotonic()
    if outcome == "right":
        comm.finalize()
    else:
        comm.abort()
        comm.finalize()
    say(
        {
            "outcome": outcome,
            "culprits": culprits,
            "text": text,
            "when": when,
            "closed": time.monotonic() - when,
            "steps": step,
            "longest": longest,
        }
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4])
