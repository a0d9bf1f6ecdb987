"""Samples as OTLP: JSON or protobuf, and sent to a collector over HTTP."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from http.client import HTTPException, RemoteDisconnected
from urllib.parse import unquote, urlsplit, urlunsplit

from google.protobuf.json_format import MessageToJson, Parse, ParseError
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1 import metrics_pb2 as otlp

from unicomm import __version__

from .catalogue import METRICS, Kind, Metric
from .samples import Samples

TIMEOUT = 10.0  # seconds for sending, as in OpenTelemetry's exporters
_PATH = "/v1/metrics"
_MOST_ANSWER = 1 << 20


class CollectorError(OSError):
    """A collector cannot be reached, or refuses the metrics; the message says which and why."""


_MOST = (1 << 63) - 1  # of an integer of OTLP


class _StayHere(urllib.request.HTTPRedirectHandler):
    """Follows no redirection: urllib would go on with a GET, which carries no metrics."""

    def redirect_request(self, *_: object) -> None:
        return None


_opener = urllib.request.build_opener(_StayHere)


def request(taken: Samples) -> ExportMetricsServiceRequest:
    """Returns the message. The environment adds attributes of the resource, as for all of OpenTelemetry."""
    message = ExportMetricsServiceRequest()
    resource = message.resource_metrics.add()
    about = {"service.name": "unicomm"}
    if len(taken.hosts) == 1:
        about["host.name"] = taken.hosts[0]
    about |= _pairs(os.environ.get("OTEL_RESOURCE_ATTRIBUTES", ""))
    if name := os.environ.get("OTEL_SERVICE_NAME"):
        about["service.name"] = name
    resource.resource.attributes.extend(_attributes(about))
    scope = resource.scope_metrics.add()
    scope.scope.name, scope.scope.version = "unicomm", __version__
    present = {metric.name for metric, _, _ in taken.samples}
    families = {m.name: _family(scope.metrics.add(), m) for m in METRICS if m.name in present}
    for metric, labels, value in taken.samples:
        family = families[metric.name]
        counts = metric.kind is Kind.COUNTER
        point = (family.sum if counts else family.gauge).data_points.add()
        point.attributes.extend(_attributes(dict(zip(metric.labels, labels, strict=True))))
        point.time_unix_nano = taken.taken_ns
        if counts:
            point.start_time_unix_nano = min(taken.began_ns, taken.taken_ns)
        if metric.unit in ("s", "1") or abs(value) > _MOST:  # a damaged ring may have any number
            point.as_double = value
        else:
            point.as_int = round(value)
    return message


def to_json(message: ExportMetricsServiceRequest) -> str:
    """Returns OTLP/JSON, on one line as the file exporter of the collector writes it."""
    # The mapping of OTLP has enumerations as integers.
    text: str = MessageToJson(message, use_integers_for_enums=True, indent=None)
    return text + "\n"


def send(message: ExportMetricsServiceRequest, url: str, timeout: float = TIMEOUT) -> str:
    """Sends the message to a collector, and returns its remark, "" without one.

    A URL without a path is that of the collector itself. `OTEL_EXPORTER_OTLP_HEADERS` adds headers. Raises
    `CollectorError`.
    """
    try:
        parts = urlsplit(url)
        _ = parts.hostname, parts.port
    except ValueError as error:
        raise CollectorError(f"{url}: {error}; use http://HOST:4318") from None
    if not parts.hostname:
        raise CollectorError(f"{url} names no host: use http://HOST:4318")
    if parts.path in ("", "/"):
        parts = parts._replace(path=_PATH)
    where = urlunsplit(parts)
    headers = _pairs(os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", "")) | {
        "Content-Type": "application/x-protobuf",
        "User-Agent": f"unicomm/{__version__}",
    }
    try:
        post = urllib.request.Request(where, message.SerializeToString(), headers, method="POST")
        with _opener.open(post, timeout=timeout) as answer:
            data = answer.read(_MOST_ANSWER)
            kind = answer.headers.get("Content-Type", "")
    except urllib.error.HTTPError as error:
        with error:
            other = error.headers.get("Location")
            hint = f", a redirection to {other}: give that URL if it is the collector's" if other else ""
            raise CollectorError(f"{where} answered {error.code} {error.reason}{hint}") from None
    except RemoteDisconnected as error:
        raise CollectorError(f"{where} cannot be reached: {error}") from None
    except HTTPException as error:
        found = f"{type(error).__name__}: {error}".strip(": ")
        raise CollectorError(
            f"{where} does not speak HTTP/1.1 ({found}): is it the port of gRPC? That of HTTP is 4318"
        ) from None
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", None) or error
        raise CollectorError(f"{where} cannot be reached: {why}") from None
    return read_answer(data, where, kind)


def read_answer(data: bytes, where: str, kind: str = "application/x-protobuf") -> str:
    """Returns the remark in the answer of the collector at `where`, "" without one.

    `kind`: its Content-Type. Raises `CollectorError` when it has rejected data or is no collector's.
    """
    response = ExportMetricsServiceResponse()
    try:
        if not data:
            pass  # all was taken
        elif "protobuf" in kind:
            response.ParseFromString(data)
        elif "json" in kind:
            Parse(data, response, ignore_unknown_fields=True)
        elif "html" in kind:
            raise CollectorError(f"{where} answered with {kind}: it is no collector")
    except (DecodeError, ParseError, ValueError, RecursionError) as error:
        raise CollectorError(f"{where} gave an answer that no collector gives: {error}") from None
    partial = response.partial_success
    if partial.rejected_data_points:
        raise CollectorError(
            f"{where} rejected {partial.rejected_data_points} data points: {partial.error_message}"
        )
    return str(partial.error_message)


def _family(family: otlp.Metric, metric: Metric) -> otlp.Metric:
    family.name, family.description, family.unit = metric.name, metric.text, metric.unit
    if metric.kind is Kind.COUNTER:
        family.sum.is_monotonic = True
        family.sum.aggregation_temporality = otlp.AGGREGATION_TEMPORALITY_CUMULATIVE
    return family


def _attributes(values: Mapping[str, str]) -> Iterable[KeyValue]:
    return [KeyValue(key=k, value=AnyValue(string_value=v)) for k, v in values.items()]


def _pairs(text: str) -> dict[str, str]:
    """Reads "key=value,key=value", where values may be percent-encoded, from a variable of OpenTelemetry."""
    out = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if equals and key.strip():
            out[key.strip()] = unquote(value.strip())
    return out
