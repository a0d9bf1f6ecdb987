"""DeviceClock: when operations ran on a device, by the host's clock, without waiting for the device.

Events give the time between them, but no time of the host's clock. An operation cannot begin before it was
issued, and has ended when the watchdog sees its last event; between the two, its place follows from that of
the operation before. So times are more exact than "seen within 20 ms", and never impossible.
"""

from __future__ import annotations

from typing import Any

from unicomm.comms.streams import Streams

_FAR = 1_000_000_000  # nanoseconds: an operation further from the last one is placed on its own


class DeviceClock:
    """The clock of one communicator."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._event: Any = None  # the end of the last operation
        self._at = 0  # its time by the host's monotonic clock

    def place(self, before: Any, after: Any, issued_ns: int, seen_ns: int) -> tuple[int, int]:
        """Returns (start, end) of an operation between two past events, in monotonic nanoseconds."""
        length = self._between(before, after)
        end = seen_ns
        if self._event is not None:
            placed = self._at + self._between(self._event, after)
            if seen_ns - _FAR < placed < seen_ns:
                end = placed
        end = min(max(end, issued_ns + length), seen_ns)
        self._event, self._at = after, end
        return end - length, end

    def _between(self, first: Any, second: Any) -> int:
        return round(self._streams.elapsed(first, second) * 1e9)
