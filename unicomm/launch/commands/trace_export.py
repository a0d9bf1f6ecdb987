"""`unicomm trace export`."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .terminal import (
    GOOD,
    UNUSABLE,
    Gigabytes,
    in_bytes,
    print_error,
    print_line,
    print_unreadable,
    with_extra,
)

if TYPE_CHECKING:
    from rich.console import Console

    from unicomm.flight_recorder.metrics.samples import Samples

_STDOUT = "-"
_MOST_REMARKS = 20


@with_extra("`unicomm trace export`", "metrics")
def export(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            help="folders, files or archives (tar, zip) with rings or dumps; default: this user's newest job"
        ),
    ] = None,
    openmetrics: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="write OpenMetrics text; - for stdout; *.prom: Prometheus's older format"
        ),
    ] = None,
    otlp: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|URL",
            help="write OTLP as JSON, or as protobuf into *.pb; - for stdout; http://HOST:4318 sends it",
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="seconds that a collector may take")] = 10.0,
    stuck_after: Annotated[
        float, typer.Option(min=0, help="seconds after which a running process's operation counts as stuck")
    ] = 2.0,
    memory: Gigabytes = None,
) -> None:
    """Exports metrics for Prometheus and OpenTelemetry: counters, states of ranks, lateness, the verdict.

    Reads what `unicomm trace analyze` reads. docs/trace/metrics.md lists the metrics.

        unicomm trace export --openmetrics -
        unicomm trace export /tmp/dumps --otlp metrics.json
        unicomm trace export rings/ --otlp http://localhost:4318

    Exit code 0: all is written; 2: nothing could be read, or not all could be written.
    """
    from rich.console import Console

    errors = Console(stderr=True)
    if openmetrics is None and otlp is None:
        openmetrics = _STDOUT
    if openmetrics == _STDOUT and otlp == _STDOUT:
        print_error(errors, "--openmetrics - and --otlp - would mix on stdout: write one into a file")
        raise typer.Exit(UNUSABLE)
    # Imported before the long work, so that a missing package is reported at once.
    if openmetrics is not None:
        import prometheus_client  # noqa: F401
    if otlp is not None:
        import opentelemetry.proto.metrics.v1.metrics_pb2  # noqa: F401
    raise typer.Exit(_export(paths or [], openmetrics, otlp, timeout, stuck_after, errors, in_bytes(memory)))


def _export(
    paths: list[Path],
    openmetrics: str | None,
    otlp: str | None,
    timeout: float,
    stuck_after: float,
    errors: Console,
    memory: int | None,
) -> int:
    from unicomm.flight_recorder.analysis.analyze import analyze
    from unicomm.flight_recorder.metrics.samples import of_table
    from unicomm.flight_recorder.ring.folder import FolderError, rings_folder
    from unicomm.flight_recorder.table.load import load_job

    try:
        table = load_job(paths, memory=memory)
        if table.empty:
            print_unreadable(errors, table.remarks)
            print_line(errors, f"no dump or ring in {', '.join(map(str, paths)) or rings_folder()}")
            return UNUSABLE
        for remark in table.remarks[:_MOST_REMARKS]:
            print_line(errors, f"{remark.path}: {remark.message}", "dim")
        taken = of_table(table, analyze(table, stuck_after))
        if openmetrics is not None:
            from unicomm.flight_recorder.metrics.openmetrics import text

            _write(openmetrics, text(taken.samples, openmetrics.endswith(".prom")).encode(), errors)
        if otlp is not None:
            _otlp(taken, otlp, timeout, errors)
    except (FolderError, OSError) as error:  # CollectorError is one
        print_error(errors, error)
        return UNUSABLE
    return GOOD


def _otlp(taken: Samples, where: str, timeout: float, errors: Console) -> None:
    """Writes or sends the samples. Raises `OSError`."""
    from unicomm.flight_recorder.metrics.otlp import request, send, to_json

    message = request(taken)
    if where.startswith(("http://", "https://")):
        if remark := send(message, where, timeout):
            print_line(errors, f"{where}: {remark}", "yellow")
        print_line(errors, f"sent to {where}", "dim")
    elif where.endswith(".pb"):
        _write(where, message.SerializeToString(), errors)
    else:
        _write(where, to_json(message).encode(), errors)


def _write(where: str, data: bytes, errors: Console) -> None:
    """Writes a file, complete or not at all: node_exporter may read it at any time. Raises `OSError`."""
    if where == _STDOUT:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    path = Path(where)
    if path.exists() and not path.is_file():  # a pipe, a device
        path.write_bytes(data)
        return
    handle, part = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with open(handle, "wb") as file:
            file.write(data)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(part, 0o666 & ~umask)
        os.replace(part, path)
    except BaseException:
        os.unlink(part)
        raise
    print_line(errors, f"wrote {path}", "dim")
