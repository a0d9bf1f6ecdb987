"""This process's ring: opened by the first communicator, closed when the process ends."""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import sysconfig
import threading
import warnings
from collections.abc import Mapping
from datetime import datetime, timezone
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

import unicomm
from unicomm import _core
from unicomm.flight_recorder.ring.call_path import TORCH_WRAPPERS, WRAPPERS
from unicomm.flight_recorder.ring.folder import (
    FolderError,
    OpenFolderError,
    boot_id,
    clean,
    pid_namespace,
    private_folder,
    ring_name,
    rings_folder,
)

from . import ending

_DEFAULT_RECORDS = 4096
_KEEP = ("failure", "always", "never")
_MOST_ARGUMENT = 1000  # characters


def _folder(file: str) -> str:
    return os.path.join(os.path.dirname(os.path.abspath(file)), "")


# Processes with a communicator have imported torch already; this module does not import it.
_torch = getattr(sys.modules.get("torch"), "__file__", None)
_core.set_libraries(
    own=_folder(unicomm.__file__),
    torch=_folder(_torch) if _torch else "",
    stdlib=os.path.join(sysconfig.get_path("stdlib"), ""),
    torch_wrappers=list(TORCH_WRAPPERS),
    wrappers=list(WRAPPERS),
)

_lock = threading.Lock()
_recorder: _core.Recorder | None = None
_keep = "failure"
_pid = 0


def _settings() -> tuple[str, int]:
    keep = os.environ.get("UNICOMM_TRACE_KEEP", "failure")
    if keep not in _KEEP:
        raise ValueError(f"UNICOMM_TRACE_KEEP={keep!r} is unknown; set it to one of {', '.join(_KEEP)}")
    text = os.environ.get("UNICOMM_TRACE_RECORDS", str(_DEFAULT_RECORDS))
    if not text.isdigit() or not 16 <= int(text) <= 1 << 24:
        raise ValueError(
            f"UNICOMM_TRACE_RECORDS={text!r} is not a number of records;"
            f" set it to 16 ... {1 << 24}, or unset it"
        )
    return keep, int(text)


def _meta(names: Mapping[str, Any]) -> str:
    job = {k: os.environ[k] for k in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT") if k in os.environ}
    facts = {
        "format": 1,
        **names,
        "host": socket.gethostname(),
        "boot_id": boot_id(),
        "pid_namespace": pid_namespace(),
        "argv": [text[:_MOST_ARGUMENT] for text in sys.argv[:16]],
        "python": sys.version.split()[0],
        "started": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        "job": job,
    }
    return json.dumps(facts)


def _usable_folder() -> Path:
    """The folder for this process's ring. Raises `FolderError` when none is usable."""
    try:
        return rings_folder()
    except OpenFolderError as error:
        folder = private_folder()
        warnings.warn(
            f"unicomm's flight recorder keeps its ring in {folder}: {error}", RuntimeWarning, stacklevel=4
        )
        return folder


def get_recorder(names: Mapping[str, Any], rank: int, world: int) -> _core.Recorder:
    """Returns this process's recorder; the first call creates it.

    Args:
        names: names for the numbers in records: {"ops": ..., "dtypes": ..., "reductions": ...}.
        rank, world: the process's rank in the job and the job's size; rank -1 without a job.

    Raises `ValueError` when UNICOMM_TRACE_KEEP or UNICOMM_TRACE_RECORDS is malformed. When every user may
    remove what is in UNICOMM_TRACE_DIR, the ring is in the private folder; when no file can be created, it is
    kept in memory. A warning says so.
    """
    global _recorder, _keep, _pid
    with _lock:
        if _recorder is not None:
            return _recorder
        _keep, records = _settings()
        meta = _meta(names)
        try:
            folder = _usable_folder()
            clean(folder)
            path = folder / ending.begin(folder, rank)
            if path.exists():  # of an earlier recorder of this process
                path = folder / ring_name(rank, os.getpid())
            _recorder = _core.Recorder(str(path), meta, rank, world, records)
        except (FolderError, OSError) as error:
            warnings.warn(
                f"unicomm's flight recorder has no file, so no other process can read it: {error}"
                " (set UNICOMM_TRACE_DIR to a folder with room)",
                RuntimeWarning,
                stacklevel=3,
            )
            _recorder = _core.Recorder("", meta, rank, world, records)
        _pid = os.getpid()
        # A child of multiprocessing prints its exceptions itself, and may end without running exit handlers.
        if (children := sys.modules.get("multiprocessing.util")) is not None and parent_process() is not None:
            children.Finalize(None, _child_ends, exitpriority=0)
        return _recorder


def recorder_path() -> Path | None:
    """Returns the ring's file, or None if there is no recorder yet or its ring is in memory."""
    return Path(_recorder.path) if _recorder is not None and _recorder.path else None


def ring_bytes() -> bytes:
    """Returns the ring's current bytes; empty if there is no recorder yet."""
    return b"" if _recorder is None else _recorder.snapshot()


def _after_fork() -> None:
    # The ring belongs to the parent. The child opens its own with its first communicator.
    global _recorder, _lock
    _lock = threading.Lock()
    _recorder = None


os.register_at_fork(after_in_child=_after_fork)


def _child_ends() -> None:
    ending.child_ends()
    _close()
    ending.close()


@atexit.register
def _close() -> None:
    if _recorder is None or _pid != os.getpid():
        return
    _recorder.close(_keep == "never" or (_keep == "failure" and not ending.has_failed()))
