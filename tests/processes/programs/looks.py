"""What a rank notes of its waits in meetings: when it had come, and when it looked for a fault.

A machine that is busy delays everything, but a rank that waits looks at a steady pace of its own. So its
looks tell how long it waited, and a test can hold it to seconds that no other process takes away.
"""

import time
from collections.abc import Callable
from typing import Any

from unicomm.comms.failures.store_client import StoreClient
from unicomm.comms.membership.meeting_faults import MeetingFaults
from unicomm.comms.membership.rendezvous import Rendezvous

_came: list[float] = []
_on_arrival: list[Callable[[], None]] = []
_looks: list[tuple[float, float]] = []


def begin() -> None:
    """Forgets what was noted until now."""
    _came.clear()
    _looks.clear()


def noted() -> dict[str, Any]:
    """When this rank had come to its last meeting, and its looks: when, and the seconds to the next one."""
    return {"came": _came[-1] if _came else None, "looks": list(_looks)}


def on_arrival(act: Callable[[], None]) -> None:
    """Calls `act` whenever this rank has come to a meeting: its post is in the store then."""
    _on_arrival.append(act)


def on_others_elsewhere(times: int, act: Callable[[], None]) -> None:
    """Calls `act` when this rank has found others waiting in other meetings as many times."""
    read, found = MeetingFaults._read, [0]

    def count(self: MeetingFaults, label: int) -> Any:
        call = read(self, label)
        found[0] += call is not None
        if call is not None and found[0] == times:
            act()
        return call

    MeetingFaults._read = count  # type: ignore[method-assign]


def _add(self: StoreClient, key: str, amount: int = 1, original: Any = StoreClient.add) -> int:
    count: int = original(self, key, amount)
    if key.endswith("/0/arrived") and amount == 1:
        _came.append(time.monotonic())
        for act in _on_arrival:
            act()
    return count


def _look(self: Rendezvous, header: bytes, original: Any = Rendezvous._look) -> Any:
    _looks.append((time.monotonic(), self._faults.interval))
    return original(self, header)


StoreClient.add, Rendezvous._look = _add, _look  # type: ignore[method-assign]
