"""What ran where with which outcome: the environments that are compared, and the log of a comparison."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.commands import clean_environment

SWITCH = "TORCH_DISTRIBUTED_USE_TORCHCOMMS"

Outcome = dict[str, Any]  # place, ranks, test, seconds, outcome, error
Note = Callable[[str, int], Callable[[Outcome], None]]  # what begins, of how many; called with each outcome


def environment(place: str) -> dict[str, str]:
    """The variables of a place: "stock", or the unicomm backend that the switch puts behind "gloo"."""
    if place == "stock":
        return clean_environment() | {SWITCH: "0"}
    return clean_environment() | {SWITCH: "1", "UNICOMM_BACKEND": place}


class Log:
    """Outcomes by place, ranks and test, in a file with a line of JSON each; a test's last line counts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.found: dict[tuple[str, int, str], Outcome] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                self._take(json.loads(line))

    def _take(self, one: Outcome) -> None:
        self.found[one["place"], one["ranks"], one["test"]] = one

    def add(self, one: Outcome) -> None:
        self._take(one)
        with self.path.open("a") as file:
            file.write(json.dumps(one) + "\n")

    def tests(self, place: str, ranks: int, outcome: str) -> list[str]:
        """The tests that have this outcome."""
        here = [one for (p, r, _), one in self.found.items() if (p, r) == (place, ranks)]
        return [one["test"] for one in here if one["outcome"] == outcome]
