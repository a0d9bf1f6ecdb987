"""The closed list of metrics, with the names of OpenTelemetry; those of Prometheus follow from them.

docs/trace/metrics.md has the same list; a test compares them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

#: States of a rank; `unicomm_rank_state` has a sample for each.
STATES = ("running", "waiting", "stopped", "dead", "ended", "unknown")
#: The value of a label with which further values than are allowed share their samples.
OTHER = "other"

_UNITS = {"s": "seconds", "By": "bytes", "1": "ratio"}


class Kind(enum.Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    INFO = "info"  # always 1: the labels are what it says


@dataclass(frozen=True)
class Metric:
    """A metric. `unit` is a code of UCUM, in braces if it counts things."""

    name: str
    kind: Kind
    unit: str
    labels: tuple[str, ...]
    text: str

    @property
    def family(self) -> str:
        """The name of the metric family in OpenMetrics."""
        name = self.name.removesuffix(".info").replace(".", "_")
        return f"{name}_{self.prometheus_unit}" if self.prometheus_unit else name

    @property
    def prometheus_unit(self) -> str:
        """The unit in OpenMetrics, "" for one that counts things."""
        return _UNITS.get(self.unit, "")

    @property
    def sample(self) -> str:
        """The name of its samples, which queries use."""
        return self.family + {Kind.COUNTER: "_total", Kind.INFO: "_info"}.get(self.kind, "")


_OPERATION = ("rank", "communicator", "operation")


def _counter(name: str, unit: str, labels: tuple[str, ...], text: str) -> Metric:
    return Metric(f"unicomm.{name}", Kind.COUNTER, unit, labels, text)


def _gauge(name: str, unit: str, labels: tuple[str, ...], text: str) -> Metric:
    return Metric(f"unicomm.{name}", Kind.GAUGE, unit, labels, text)


def _info(name: str, labels: tuple[str, ...], text: str) -> Metric:
    return Metric(f"unicomm.{name}.info", Kind.INFO, "", labels, text)


OPERATIONS = _counter("operations", "{operation}", _OPERATION, "Operations that have ended.")
FAILURES = _counter("operation.failures", "{operation}", _OPERATION, "Operations that have failed.")
IO = _counter(
    "operation.io",
    "By",
    _OPERATION,
    "Bytes of the inputs of operations; of the outputs if there are no inputs.",
)
TIME = _counter("operation.time", "s", _OPERATION, "Time from the start of operations to their end.")
WAITING = _counter(
    "operation.waiting", "s", _OPERATION, "The part of it before the last rank that was read had joined."
)
COLLECTIVES = _counter(
    "collectives",
    "{collective}",
    ("rank", "communicator"),
    "Collectives that were called, also those whose records were overwritten.",
)
LOST = _counter(
    "records.lost", "{record}", ("rank",), "Records that were overwritten before they could be counted."
)
STATE = _gauge("rank.state", "", ("rank", "state"), "1 for the state of the rank, 0 for the other states.")
STARTED = _gauge(
    "rank.operation.start_time",
    "s",
    _OPERATION,
    "When the rank called the operation in which it is, in seconds since 1970.",
)
NUMBER = _gauge(
    "rank.operation.number",
    "",
    _OPERATION,
    "The number of that operation in its communicator, or pair of ranks.",
)
LATENESS = _gauge(
    "rank.lateness", "s", ("rank",), "Median arrival in the newest collectives after the typical rank."
)
LAST = _gauge("rank.last", "1", ("rank",), "Share of these collectives in which the rank came last.")
LOST_TIME = _gauge("rank.lost_time", "1", ("rank",), "Share of their time that others waited for the rank.")
RANK = _info("rank", ("rank", "host"), "The host of the rank.")
VERDICT = _info(
    "verdict", ("verdict", "communicator", "operation"), "The main finding of the analysis, and where it is."
)
CONFIDENCE = _gauge("verdict.confidence", "1", ("verdict",), "How sure the main finding is.")
CULPRIT = _gauge("verdict.culprit", "", ("verdict", "rank"), "1 for each rank that the main finding blames.")

METRICS = (
    *(OPERATIONS, FAILURES, IO, TIME, WAITING, COLLECTIVES, LOST),
    *(STATE, STARTED, NUMBER, LATENESS, LAST, LOST_TIME, RANK),
    *(VERDICT, CONFIDENCE, CULPRIT),
)
