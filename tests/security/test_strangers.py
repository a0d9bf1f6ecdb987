"""Strangers at the sockets of a job: what they write into its stores is not run, and most do not reach one."""

from __future__ import annotations

import base64
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.commands import clean_environment
from tests.security import listeners

pytestmark = pytest.mark.processes

WITHIN = 100.0  # seconds that a job may take
WAITS = Path(__file__).parent / "programs/waits.py"


class Evil:
    """Its pickle makes a folder when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


def attack(store: Any, payload: bytes) -> list[str]:
    """Replaces all that looks like the state of a rendezvous, and returns its keys."""
    keys = [key for key in store.list_keys() if "torch.rendezvous." in key and key.count("/") <= 1]
    for key in keys:
        store.set(key.removeprefix("/"), base64.b64encode(payload))
    return keys


@pytest.mark.parametrize("options", [(), ("--standalone",), ("--rdzv-backend=c10d",)], ids=repr)
def test_a_stranger_on_the_host_of_a_launcher(options, tmp_path, eventually):
    """Whoever gets at the launcher's stores replaces the state of its rendezvous by a pickle of his own.

    torch's agent reads the state at the latest when the job ends, so the file would be there then.
    """
    trap = tmp_path / "made by the pickle"
    command = [sys.executable, "-m", "unicomm", "run", "--nproc-per-node=2", "--no-hub", *options]
    with subprocess.Popen([*command, WAITS, tmp_path], env=clean_environment()) as launcher:
        try:
            eventually(lambda: {"0", "1"} <= {path.name for path in tmp_path.iterdir()}, WITHIN)
            found = listeners.listeners(listeners.family(launcher.pid))
            assert {one.bound for one in found} <= {"loopback"}, found
            replaced = []
            for one in found:
                store = listeners.store_at("127.0.0.1", one.port)
                if store is not None:
                    replaced += attack(store, pickle.dumps(Evil(trap)))
            (tmp_path / "go").touch()
            assert launcher.wait(WITHIN) == 0
        finally:
            (tmp_path / "go").touch()
            launcher.terminate()
            launcher.wait(WITHIN)
    assert not trap.exists(), f"the launcher has run it, from {replaced}"
    assert not replaced
    pickle.loads(pickle.dumps(Evil(trap)))
    assert trap.is_dir(), "the pickle is harmless: this test would prove nothing"
