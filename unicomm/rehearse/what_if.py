"""What if: changes of a job whose forecasts are compared with that of the job itself."""

from __future__ import annotations

from dataclasses import dataclass

from .forecast.forecast import Forecast
from .forecast.forecast_text import comparison
from .rehearsal import Rehearsal

#: What can be changed, and as what it is read.
CHANGES = {"nnodes": int, "nproc_per_node": int, "topology": str, "bucket_cap_mb": float}


@dataclass(frozen=True)
class WhatIf:
    """A change: `name` is a key of `CHANGES`."""

    name: str
    value: int | float | str

    @classmethod
    def parse(cls, text: str) -> WhatIf:
        """Returns the change of a text as "nnodes=8". Raises `ValueError` for another one."""
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        known = ", ".join(CHANGES)
        if not equals or name not in CHANGES:
            raise ValueError(f"--what-if {text}: give one of {known} with a value, as in nnodes=8")
        try:
            read = CHANGES[name](value)
        except ValueError:
            raise ValueError(f"--what-if {text}: {value!r} is no number") from None
        if not isinstance(read, str) and read <= 0:
            raise ValueError(f"--what-if {text}: the value has to be positive")
        return cls(name, read)

    def __str__(self) -> str:
        return f"{self.name}={self.value:g}" if isinstance(self.value, float) else f"{self.name}={self.value}"


def compare(job: Rehearsal, others: list[tuple[WhatIf, Rehearsal]]) -> str:
    """Returns the forecasts as lines of text: of the job, and with each change."""
    rows = [("as it is", job), *((str(change), done) for change, done in others)]
    return comparison([(name, forecast_of(done)) for name, done in rows])


def forecast_of(done: Rehearsal) -> Forecast | None:
    """Returns the forecast of a rehearsal; None if its operations do not fit together."""
    return done.forecast if done.good else None
