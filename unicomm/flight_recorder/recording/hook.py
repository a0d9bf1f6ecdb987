"""FlightRecorderHook: torchcomms' interface to the recorder. The ring records with and without it."""

from __future__ import annotations

import json
import os
import pickle
import weakref
from pathlib import Path
from typing import Any, Protocol

from unicomm.flight_recorder.formats import torch_dump as formats
from unicomm.flight_recorder.ring.reader import Ring, read_ring

from . import writer
from .dumps import replace_file


class _Recorded(Protocol):
    @property
    def _recorder_indexes(self) -> set[int]: ...


class FlightRecorderHook:
    """Dumps the process's ring in torch's format.

    Args:
        max_entries: the maximum number of operations in a dump, the newest ones; None for all in the ring.
        isolated: whether dumps contain only operations issued after this object was created.

    Raises `ValueError` when `max_entries` is less than 1.
    """

    def __init__(self, max_entries: int | None = None, isolated: bool = False) -> None:
        if max_entries is not None and max_entries < 1:
            raise ValueError(f"max_entries={max_entries} must be at least 1, or None for all")
        self._max_entries = max_entries
        self._registered: list[weakref.ref[_Recorded]] = []
        self._comms: set[int] = set()
        self._after = self._now() if isolated else 0

    def register_with_comm(self, comm: _Recorded) -> None:
        """Restricts dumps to `comm` and the other registered communicators."""
        self._registered.append(weakref.ref(comm))
        self._note_epochs()

    def is_enabled(self) -> bool:
        """Returns True: the recorder cannot be switched off."""
        return True

    def reset(self) -> None:
        """Restricts dumps to operations issued from now on. The ring keeps all records."""
        self._after = self._now()

    def size(self) -> int:
        """Returns the number of operations that a dump would contain."""
        return len(self._dump(True)["entries"])

    def dump_json(self, include_completed: bool = True) -> str:
        """Returns the operations as JSON in torch's format; `include_completed=False`: only unfinished."""
        return json.dumps(self._dump(include_completed))

    def dump_file(self, rank: int, include_completed: bool = True) -> Path:
        """Writes the pickle that `torchfrtrace` reads, and returns its path.

        `include_completed` is that of `dump_json`.

        The path is a prefix followed by the rank. The prefix is TORCHCOMM_FR_DUMP_TEMP_FILE, else
        `torch/comm_lib_trace_rank_` in the user's cache folder. Raises `OSError` when the file cannot be
        written.
        """
        prefix = os.environ.get("TORCHCOMM_FR_DUMP_TEMP_FILE")
        if not prefix:
            cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
            prefix = str(Path(cache, "torch", "comm_lib_trace_rank_"))
        path = Path(f"{prefix}{rank}")
        return replace_file(path, pickle.dumps(self._dump(include_completed)))

    def _ring(self) -> Ring | None:
        data = writer.ring_bytes()
        return read_ring(data) if data else None

    def _now(self) -> int:
        ring = self._ring()
        return 0 if ring is None else ring.total

    def _note_epochs(self) -> None:
        """Adds the indexes by which communicators record: reconfigure gives them new ones."""
        for comm in filter(None, (known() for known in self._registered)):
            self._comms |= comm._recorder_indexes

    def _dump(self, include_completed: bool) -> dict[str, Any]:
        ring = self._ring()
        if ring is None:
            return {
                "version": formats.VERSION,
                "comm_lib_version": "",
                "pg_config": {},
                "pg_status": {},
                "entries": [],
            }
        self._note_epochs()
        comms = self._comms or None
        return formats.to_dict(ring, include_completed, comms, self._after, self._max_entries)
