"""The hub as the launcher sees it."""

from __future__ import annotations

from pathlib import Path

from unicomm.launch.side_process import SideProcess

START_OF_HUBS = 10.0  # seconds from the start of the ranks; on a busy host an interpreter needs some of them


class HubProcess(SideProcess):
    """A hub's process, used by one thread."""

    def __init__(self, log: Path) -> None:
        super().__init__("unicomm.launch.hub.server", log)
