"""Samples as text: OpenMetrics 1.0, or the older text format of Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import exposition
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import (
    Metric as Family,
)
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector, CollectorRegistry

from .catalogue import METRICS, Kind, Metric
from .totals import Sample


class SampleCollector(Collector):
    """Gives samples to prometheus-client; `take` returns those of now."""

    def __init__(self, take: Callable[[], Iterable[Sample]]) -> None:
        self._take = take

    def describe(self) -> Iterable[Family]:
        return [_family(metric) for metric in METRICS]

    def collect(self) -> Iterable[Family]:
        families: dict[Metric, Family] = {}
        for metric, labels, value in self._take():
            if metric not in families:
                families[metric] = _family(metric)
            families[metric].add_sample(metric.sample, dict(zip(metric.labels, labels, strict=True)), value)
        return [families[metric] for metric in METRICS if metric in families]


def registry(take: Callable[[], Iterable[Sample]]) -> CollectorRegistry:
    """Returns a registry of prometheus-client with these samples alone."""
    made = CollectorRegistry(auto_describe=False)
    made.register(SampleCollector(take))
    return made


def text(samples: Iterable[Sample], prometheus: bool = False) -> str:
    """Returns the samples as OpenMetrics; with `prometheus` in the older format."""
    found = registry(lambda: samples)
    write = exposition.generate_latest if prometheus else openmetrics.generate_latest
    return write(found).decode()


def _family(metric: Metric) -> Family:
    if metric.kind is Kind.INFO:
        return InfoMetricFamily(metric.family, metric.text, labels=metric.labels)
    make = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    return make(metric.family, metric.text, labels=metric.labels, unit=metric.prometheus_unit)
