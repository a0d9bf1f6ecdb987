"""Dumps of this process's ring: when the program asks, when a communicator breaks, on a signal.

A dump appears under its name whole or not at all, however many threads write at once.

| variable | meaning |
|---|---|
| `UNICOMM_TRACE_DUMP` | folder for dumps; set, each rank writes one when a communicator breaks or it fails |
| `UNICOMM_TRACE_DUMP_FORMAT` | `pickle` (default; what torch's analyzer reads), `json` or `ring` |
| `UNICOMM_TRACE_DUMP_SIGNAL` | a signal that asks for a dump: its name, or `1` for SIGUSR2 |
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

from . import writer

FORMATS = {"pickle": "", "json": ".json", "ring": ".ucring"}  # with the ends of names
_log = logging.getLogger("unicomm")


def replace_file(path: Path, data: bytes) -> Path:
    """Writes a file that readers see whole or not at all. Its folder is made."""
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
        raise ValueError(f"format={format!r} is unknown; it is one of {', '.join(FORMATS)}")


def _encode(format: str, data: bytes, ring: Ring, comms: list[int] | None = None) -> bytes:
    if format == "ring":
        return data
    dump = formats.to_dict(ring, comms=comms)
    return pickle.dumps(dump) if format == "pickle" else json.dumps(dump).encode()


def dump(path: Path | str, format: str = "pickle") -> Path:
    """Writes all that this process has recorded to one file and returns its path.

    Args:
        format: "pickle", which torch's analyzer reads too, "json" or "ring".

    Raises `ValueError` for another format, `RuntimeError` before the first communicator, `OSError` when the
    file cannot be written.
    """
    _check_format(format)
    data, ring = _ring()
    return replace_file(Path(path), _encode(format, data, ring))


def dump_folder(folder: Path | str, format: str = "pickle") -> list[Path]:
    """Writes one file for each rank that this process is, named `rank_N`, and returns the paths.

    The names are what torch's analyzer wants of the files of one job: one prefix, then the rank. Raises like
    `dump`.
    """
    _check_format(format)
    data, ring = _ring()
    ranks = dict(owners(ring)) or {max(ring.rank, 0): []}
    if format == "ring":  # a ring is one file, whoever writes into it
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
            f"UNICOMM_TRACE_DUMP_SIGNAL={name!r} is no signal that can be caught; set it to a name like"
            " SIGUSR1, or to 1 for SIGUSR2"
        )
    if known[name] and not folder:
        raise ValueError("UNICOMM_TRACE_DUMP_SIGNAL is set, but not where dumps go: set UNICOMM_TRACE_DUMP")
    return _Settings(Path(folder), format, known[name]) if folder else None


class _Triggers:
    """Writes dumps for many threads. Who asks while one is written gets one that begins after it asked."""

    def __init__(self, settings: _Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._count = threading.Lock()
        self._asked = 0
        self._done = 0

    def write(self, _: object = None) -> None:
        """Never raises: a dump that cannot be written must not hide why it was asked for."""
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
    """Called before each communicator is made: what to do when it breaks, or None where nobody wants dumps.

    The first call reads the variables above and starts to listen for the signal. Raises `ValueError` for
    unreadable ones.
    """
    global _triggers
    with _prepare_lock:
        if _triggers is None:
            settings = _settings()
            if settings is None:
                return None
            fresh = _Triggers(settings)
            fresh.listen()
            writer.on_failure = fresh.write
            _triggers = fresh
        return _triggers.write


def _after_fork() -> None:
    global _triggers, _prepare_lock
    _prepare_lock = threading.Lock()
    _triggers = None
    _core.forget_dump_signal()


os.register_at_fork(after_in_child=_after_fork)
