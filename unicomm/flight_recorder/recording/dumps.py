"""Dumps of this process's ring: on request, when a communicator breaks, and on a signal.

A dump file appears complete or not at all, also when several threads write at once.

| variable | meaning |
|---|---|
| `UNICOMM_TRACE_DUMP` | folder for dumps, written when a communicator breaks or the program fails |
| `UNICOMM_TRACE_DUMP_FORMAT` | `pickle` (default; what torch's analyzer reads), `json` or `ring` |
| `UNICOMM_TRACE_DUMP_SIGNAL` | name of the signal that requests a dump, or `1` for SIGUSR2 |
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from unicomm import _core
from unicomm.flight_recorder.formats import torch_dump as formats
from unicomm.flight_recorder.ring.reader import Ring, owners, read_ring

from . import ending, writer

FORMATS = {"pickle": "", "json": ".json", "ring": ".ucring"}  # with the suffixes of their files
_log = logging.getLogger("unicomm")


def replace_file(path: Path, data: bytes) -> Path:
    """Writes a file that appears complete or not at all, creates its folder, and returns `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(part, path)
    except BaseException:
        os.unlink(part)
        raise
    return path


def _ring() -> tuple[bytes, Ring]:
    data = writer.ring_bytes()
    if not data:
        raise RuntimeError("nothing is recorded yet: create a communicator before asking for a dump")
    return data, read_ring(data)


def _check_format(format: str) -> None:
    if format not in FORMATS:
        raise ValueError(f"format={format!r} is unknown; use one of {', '.join(FORMATS)}")


def _encode(format: str, data: bytes, ring: Ring, comms: list[int] | None = None) -> bytes:
    if format == "ring":
        return data
    dump = formats.to_dict(ring, comms=comms)
    return pickle.dumps(dump) if format == "pickle" else json.dumps(dump).encode()


def dump(path: Path | str, format: str = "pickle") -> Path:
    """Writes all records of this process to one file and returns its path.

    Args:
        format: "pickle" (which torch's analyzer also reads), "json" or "ring".

    Raises `ValueError` for another format, `RuntimeError` before the first communicator, and `OSError` when
    the file cannot be written.
    """
    _check_format(format)
    data, ring = _ring()
    return replace_file(Path(path), _encode(format, data, ring))


def dump_folder(folder: Path | str, format: str = "pickle") -> list[Path]:
    """Writes one file `rank_N` for each rank of this process, and returns the paths.

    Torch's analyzer requires such names: the same prefix for all files of a job, then the rank. `format` is
    that of `dump`; raises what `dump` raises.
    """
    _check_format(format)
    data, ring = _ring()
    ranks = dict(owners(ring)) or {max(ring.rank, 0): []}
    if format == "ring":  # ranks that are threads share one ring
        ranks = {min(ranks): []}
    return [
        replace_file(
            Path(folder, f"rank_{max(rank, 0)}{FORMATS[format]}"),
            _encode(format, data, ring, [comm.index for comm in comms]),
        )
        for rank, comms in ranks.items()
    ]


@dataclass(frozen=True)
class _Settings:
    folder: Path
    format: str
    signal: int


def _settings() -> _Settings | None:
    folder = os.environ.get("UNICOMM_TRACE_DUMP", "")
    format = os.environ.get("UNICOMM_TRACE_DUMP_FORMAT", "pickle")
    name = os.environ.get("UNICOMM_TRACE_DUMP_SIGNAL", "")
    if format not in FORMATS:
        raise ValueError(
            f"UNICOMM_TRACE_DUMP_FORMAT={format!r} is unknown; set it to one of {', '.join(FORMATS)}"
        )
    known = {s.name: int(s) for s in signal.Signals} | {"": 0, "0": 0, "1": int(signal.SIGUSR2)}
    if name not in known or known[name] in (signal.SIGKILL, signal.SIGSTOP):
        raise ValueError(
            f"UNICOMM_TRACE_DUMP_SIGNAL={name!r} is not a signal that can be caught; set it to a name like"
            " SIGUSR1, or to 1 for SIGUSR2"
        )
    if known[name] and not folder:
        raise ValueError(
            "UNICOMM_TRACE_DUMP_SIGNAL is set without a folder for dumps: set UNICOMM_TRACE_DUMP"
        )
    return _Settings(Path(folder), format, known[name]) if folder else None


class _Triggers:
    """Writes dumps for many threads. Every request gets a dump that begins after the request."""

    def __init__(self, settings: _Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._count = threading.Lock()
        self._asked = 0
        self._done = 0

    def write(self, _: object = None) -> None:
        """Writes a dump. Never raises: a failing dump must not hide the error that led to it."""
        with self._count:
            self._asked += 1
            mine = self._asked
        with self._lock:
            if self._done >= mine:
                return
            begun = self._asked
            try:
                dump_folder(self._settings.folder, self._settings.format)
            except Exception as error:
                _log.warning("no dump in UNICOMM_TRACE_DUMP=%s: %s", self._settings.folder, error)
            self._done = begun

    def listen(self) -> None:
        if not self._settings.signal:
            return
        try:
            descriptor = _core.listen_for_dump_signal(self._settings.signal)
        except OSError as error:
            raise ValueError(f"UNICOMM_TRACE_DUMP_SIGNAL: {error}; name another one") from None

        def follow() -> None:
            while os.read(descriptor, 64):
                self.write()

        threading.Thread(target=follow, name="unicomm-dumps", daemon=True).start()


_triggers: _Triggers | None = None
_prepare_lock = threading.Lock()


def prepare() -> Callable[[BaseException], None] | None:
    """Returns the function to call when a communicator breaks, or None if no dumps are wanted.

    Called before each communicator is created. The first call reads the environment variables and starts to
    listen for the signal. Raises `ValueError` when a variable is malformed.
    """
    global _triggers
    with _prepare_lock:
        if _triggers is None:
            settings = _settings()
            if settings is None:
                return None
            fresh = _Triggers(settings)
            fresh.listen()
            ending.on_failure = fresh.write
            _triggers = fresh
        return _triggers.write


def _after_fork() -> None:
    global _triggers, _prepare_lock
    _prepare_lock = threading.Lock()
    _triggers = None
    _core.forget_dump_signal()


os.register_at_fork(after_in_child=_after_fork)
