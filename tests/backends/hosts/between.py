"""What carries `auto`'s messages between hosts on this machine."""

import pytest

from unicomm.backends import auto
from unicomm.backends.gloo.backend import GlooBackend

BETWEEN = "tcp"


def use(between: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has `auto` in this process use "gloo" between hosts where it would take TCP, or "tcp"."""
    if between == "gloo":
        monkeypatch.setattr(auto, "TcpBackend", GlooBackend)
