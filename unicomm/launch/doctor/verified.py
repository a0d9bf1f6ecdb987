"""Where each backend has run, read from verified.json, for `unicomm doctor` and docs/capabilities.md."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True)
class Verified:
    """One run of a backend: `what` ran (and `more`), `where` (hardware or a mock library), and `when`."""

    backend: str
    what: str
    where: str
    when: str
    more: tuple[str, ...] = ()


@dataclass(frozen=True)
class Record:
    """All runs. `never` names the backends that have never run on hardware."""

    on_hardware: list[Verified]
    on_mocks: list[Verified]
    never: list[str]


def load() -> Record:
    data = json.loads(resources.files("unicomm.launch.doctor").joinpath("verified.json").read_text())
    on_hardware = [
        Verified(
            row["backend"],
            row["what"],
            f"{row['platform']}, {row['hardware']}, torch {row['torch']}",
            row["when"],
        )
        for row in data["verified"]
    ]
    on_mocks = [
        Verified(name, row["what"], "mock library only", row["when"], tuple(row["more"]))
        for name, row in data["mocks"].items()
    ]
    return Record(on_hardware, on_mocks, data["never"])
