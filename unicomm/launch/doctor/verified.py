"""What ran where, as verified.json has it: for doctor, and for the table of the docs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True)
class Verified:
    """That a backend did `what`, and `more`. `when`: last, as a date. `where`: the hardware, or a double."""

    backend: str
    what: str
    where: str
    when: str
    more: tuple[str, ...] = ()


@dataclass(frozen=True)
class Record:
    """`on_hardware` and `on_doubles`, and the names of backends that never ran on hardware."""

    on_hardware: list[Verified]
    on_doubles: list[Verified]
    never: list[str]


def load() -> Record:
    data = json.loads(resources.files("unicomm.launch.doctor").joinpath("verified.json").read_text())
    places = [
        Verified(
            row["backend"],
            row["what"],
            f"{row['platform']}, {row['hardware']}, torch {row['torch']}",
            row["when"],
        )
        for row in data["verified"]
    ]
    doubles = [
        Verified(name, row["what"], "ABI double only", row["when"], tuple(row["more"]))
        for name, row in data["doubles"].items()
    ]
    return Record(places, doubles, data["never"])
