"""What the programs of tests/backends/mpi share."""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable

import torch

import unicomm

torch.set_num_threads(1)
comm = unicomm.new_comm("mpi", "cpu", timeout=60)  # without a store: mpiexec is enough
me, size = comm.get_rank(), comm.get_size()


def say(event: str, rank: int, **data: object) -> None:
    """One line of JSON for the test, in one write, so that ranks do not mix."""
    os.write(1, (json.dumps({"event": event, "rank": rank, **data}) + "\n").encode())


def describe(error: BaseException) -> dict[str, object]:
    return {
        "type": type(error).__name__,
        "text": str(error),
        "culprits": list(getattr(error, "culprits", ())),
        "hint": getattr(error, "hint", ""),
    }


def raised(call: Callable[[], object]) -> unicomm.CommError:
    """The error that a call raises; fails when it raises none."""
    try:
        result = call()
    except unicomm.CommError as error:
        return error
    raise AssertionError(f"nothing was raised; the call returned {result!r}")


def run(rank: int, cases: list[Callable[[], object]]) -> None:
    """Runs the cases one after the other; the first that fails ends the job, with its name and traceback."""
    for case in cases:
        began = time.monotonic()
        try:
            case()
        except BaseException:
            say("failed", rank, case=case.__name__, traceback=traceback.format_exc())
            os._exit(1)
        say("passed", rank, case=case.__name__, seconds=round(time.monotonic() - began, 2))
    sys.stdout.flush()
