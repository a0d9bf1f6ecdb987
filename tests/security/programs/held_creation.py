"""Holds the creation of a communicator in its middle, so that a test can look at what listens there.

In a rank whose environment has HELD_CREATION, a folder, `install` writes the addresses at which it listens
for connections about failures into files there. The rank that is the first to call another one writes `held`,
and waits for `go on`.
"""

import json
import os
import secrets
import time
from pathlib import Path
from typing import Any


def install() -> None:
    if not (place := os.environ.get("HELD_CREATION")):
        return
    from unicomm.backends.out_of_band import sockets  # here, as other jobs need not import it

    folder, call, listen = Path(place), sockets._call, sockets.listen

    def noted(*arguments: Any, **more: Any) -> Any:
        listener = listen(*arguments, **more)
        new = folder / f".{secrets.token_hex(4)}"
        new.write_text(json.dumps(listener.getsockname()[:2]))
        new.rename(folder / f"listens{new.name}")
        return listener

    def held(*arguments: Any, **more: Any) -> Any:
        (folder / "held").touch()
        end = time.monotonic() + 240
        while not (folder / "go on").exists():
            assert time.monotonic() < end, "nobody lets this rank go on"
            time.sleep(0.02)
        return call(*arguments, **more)

    sockets.listen, sockets._call = noted, held
