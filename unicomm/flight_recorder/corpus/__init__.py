"""The corpus: kinds of faults, each as a simulated job with the verdict that is right for it.

A kind is a function from a size and a random generator to a case. `cases` makes every kind at several sizes,
as rings and as dumps in torch's format, where a kind can be told from those.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

# Importing these registers their kinds.
from . import (
    absent_ranks as absent,
)
from . import (
    healthy_jobs as good,
)
from . import (
    other_faults as other,
)
from . import (
    wrong_calls as calls,
)
from . import (
    wrong_messages as messages,
)
from .fault_kinds import KINDS, Case, FaultKind

__all__ = ["KINDS", "Case", "FaultKind", "absent", "calls", "cases", "good", "messages", "other"]


def cases(largest: int = 16384, seed: int = 7) -> Iterator[Case]:
    """All kinds at all their sizes, as rings and, up to 64 ranks, as dumps."""
    for number, kind in enumerate(KINDS):
        for size in kind.sizes:
            if size > largest:
                continue
            for as_dump in (False, True):
                if as_dump and (not kind.dumps or size > 64):
                    continue
                case = kind.make(size, np.random.default_rng([seed, number, size, as_dump]))
                if case.as_dump and not as_dump:
                    continue  # only torch's dumps have this fault
                case.as_dump = as_dump
                case.name = f"{kind.name}/{size}/{'dumps' if as_dump else 'rings'}"
                yield case
