"""When operations ran on a device, by the host's clock, without waiting for the device.

Events tell how much time lies between them, and nothing of the host's clock. But an operation cannot begin
before it was issued, and has ended when somebody sees that it has; between the two its place follows from
that of the operation before. So times are better than "seen within 20 ms", and never impossible.
"""

from __future__ import annotations

from typing import Any

from unicomm.comms.streams import Streams

_FAR = 1_000_000_000  # nanoseconds: what is further apart is placed anew


class DeviceClock:
    """That of one communicator."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._event: Any = None  # the end of the last operation ...
        self._at = 0  # ... by the host's monotonic clock

    def place(self, before: Any, after: Any, issued_ns: int, seen_ns: int) -> tuple[int, int]:
        """(start, end) of an operation between two events that are over, in monotonic nanoseconds."""
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
