"""FlightRecorderHook with torchcomms' parameters. The recorder is always on, with and without it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from unicomm.comms.errors import InvalidArgumentError
from unicomm.flight_recorder.recording.hook import FlightRecorderHook as OurHook

if TYPE_CHECKING:
    from unicomm.torchcomms.communicator import TorchComm

_SIZE = "TORCHCOMM_FR_BUFFER_SIZE"


def _shared_size(most: int) -> int:
    text = os.environ.get(_SIZE, "")
    if not text:
        return most
    if not text.isdecimal():
        raise InvalidArgumentError(f"{_SIZE}={text!r} is no number of operations", hint="such as 2000")
    return int(text)


class FlightRecorderHook(OurHook):
    """Dumps what the registered communicators and their splits have done, in torch's format.

    Args:
        max_entries: the maximum number of operations in a dump, the newest ones; 0 for all in the ring.
            TORCHCOMM_FR_BUFFER_SIZE replaces it, except with `isolated`.
        isolated: whether dumps contain only operations that were issued after this object was created.
    """

    def __init__(self, max_entries: int = 2048, isolated: bool = False) -> None:
        most = max_entries if isolated else _shared_size(max_entries)
        super().__init__(most or None, isolated)

    def register_with_comm(self, comm: TorchComm) -> None:  # type: ignore[override]
        """Adds `comm` and its later splits to the dumps. Doing it again changes nothing."""
        super().register_with_comm(comm)
        if self not in comm._followers:
            comm._followers.append(self)

    def is_enabled(self) -> bool:
        """Whether a communicator is registered."""
        return bool(self._comms)

    def __len__(self) -> int:
        return self.size()

    def __bool__(self) -> bool:
        return True

    def _dump(self, include_completed: bool) -> dict[str, Any]:
        dump = super()._dump(include_completed)
        if not self._comms:
            dump |= {"pg_config": {}, "entries": []}
        return dump
