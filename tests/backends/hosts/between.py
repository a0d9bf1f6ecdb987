"""What carries `auto`'s messages between hosts on this machine."""

import pytest

from unicomm.backends import auto
from unicomm.backends.ucx.library import why_not

BETWEEN = "gloo" if why_not() else "ucx"


def use(between: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has `auto` in this process use "gloo", as where there is no UCX, or "ucx"; skips without that."""
    if between == "gloo":
        monkeypatch.setattr(auto, "why_not", lambda path: "this test does without")
    elif reason := why_not():
        pytest.skip(f"no UCX: {reason}")
