"""The corpus: simulated jobs with known faults and the expected findings, which measure the analyzer.

A fault kind is a function from a number of ranks and a random generator to a case. `cases` makes every kind
at several sizes, as rings, and as dumps in torch's format if they contain enough to recognize it.

simulated_job.py   SimulatedJob: programs of many ranks run on a simulated clock; the result as rings or dumps
fault_kinds.py     Case, FaultKind, and programs without a fault
healthy_jobs.py    kinds without a fault
absent_ranks.py    kinds with ranks that do not join, and with dead or stopped processes
ended_ranks.py     kinds with ranks that raise, exit, crash or are killed, or that hang at a known place
wrong_calls.py     kinds with collectives whose calls differ
wrong_messages.py  kinds with wait cycles, and with wrong sends and receives
coalesced_calls.py kinds with uneven and coalesced collectives and batches, as dumps of NCCL
nccl_dump.py       nccl_dump: a simulated rank as the dump that torch's NCCL group would have written
other_faults.py    kinds with faults of transport, time, membership and records, and with two faults
selftest.py        `unicomm trace selftest`: precision and recall of the analyzer on the corpus
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

# Importing these files registers their kinds.
from . import (  # noqa: F401
    absent_ranks,
    coalesced_calls,
    ended_ranks,
    healthy_jobs,
    other_faults,
    wrong_calls,
    wrong_messages,
)
from .fault_kinds import KINDS, Case, FaultKind

__all__ = ["KINDS", "Case", "FaultKind", "cases"]


def cases(largest: int = 16384, seed: int = 7) -> Iterator[Case]:
    """Yields all kinds at all their sizes up to `largest` ranks, as rings, and up to 64 ranks as dumps."""
    for number, kind in enumerate(KINDS):
        for size in kind.sizes:
            if size > largest:
                continue
            for as_dump in (False, True):
                if as_dump and (not kind.dumps or size > 64):
                    continue
                case = kind.make(size, np.random.default_rng([seed, number, size, as_dump]))
                if case.as_dump and not as_dump:
                    continue  # a kind for dumps only
                case.as_dump = as_dump
                form = "nccl" if case.nccl else "dumps" if as_dump else "rings"
                case.name = f"{kind.name}/{size}/{form}"
                yield case
