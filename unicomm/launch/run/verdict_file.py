"""The verdict as JSON, for schedulers: `--verdict-file`. docs/run.md describes the keys."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from unicomm.flight_recorder.analysis.verdict import Report
from unicomm.flight_recorder.reports.report_data import as_data
from unicomm.flight_recorder.ring.endings import signal_name

from .job import Attempt, Evidence
from .outcome import Outcome, exit_code
from .stop_signals import Received

SCHEMA_VERSION = 1


def verdict(
    outcome: Outcome,
    attempt: Attempt,
    signals: list[Received],
    started: float,
    ended: float,
    evidence: Evidence | None,
    report: Report | None,
) -> dict[str, Any]:
    """Returns what the file says. `started` and `ended` are by `time.time()`."""
    return {
        "schema": SCHEMA_VERSION,
        "exit_code": outcome.exit_code,
        "ended": outcome.ended.value,
        "why": outcome.why,
        "host": socket.gethostname(),
        "started": datetime.fromtimestamp(started, timezone.utc).isoformat(timespec="milliseconds"),
        "seconds": round(ended - started, 3),
        "attempts": attempt.number + 1,
        "signals": [{"signal": s.signal.name, "seconds": round(s.at - started, 3)} for s in signals],
        "failed_ranks": [
            {"rank": rank, "exit_code": exit_code(code), "signal": signal_name(code)}
            for rank, code in sorted(attempt.ended.items())
        ],
        "rings": None if evidence is None else _rings(evidence),
        "report": None if report is None else as_data(report),
    }


def _rings(evidence: Evidence) -> dict[str, Any]:
    return {
        "folder": str(evidence.folder),
        "host": evidence.elsewhere or socket.gethostname(),
        "hosts": evidence.hosts,
        "sentence": evidence.sentence,
        "remarks": list(evidence.remarks),
    }


def prepare(path: Path) -> None:
    """Removes what an earlier job has left there. Raises `OSError` if the file could not be written."""
    handle, part = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    os.close(handle)
    os.unlink(part)
    if path.is_dir():
        raise IsADirectoryError(f"--verdict-file {path} is a folder")
    path.unlink(missing_ok=True)


def write(path: Path, data: dict[str, Any]) -> None:
    """Writes the file: complete or not at all. Raises `OSError`."""
    handle, part = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with open(handle, "w") as file:
            json.dump(data, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(part, 0o666 & ~umask)  # as any other file that the user writes
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise
