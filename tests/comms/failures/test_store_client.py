"""Requests to a store that does not answer, by ranks that hear elsewhere that others are gone."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from unicomm.comms.errors import PeerLostError
from unicomm.comms.failures import store_requests
from unicomm.comms.failures.store_client import StoreClient

pytestmark = pytest.mark.timeout(120)
_LIMIT = 60.0  # seconds of the client


class Store:
    """Answers when `answer` is set, or after some seconds."""

    def __init__(self, after: float | None = None) -> None:
        self.answer, self._after = threading.Event(), after

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        self.answer.wait(self._after)
        return b"value"


def _gone() -> None:
    raise PeerLostError("rank 0 is gone", culprits=[0])


def test_a_request_ends_when_ranks_are_gone():
    store: Any = Store()
    client = StoreClient(store, "c", 2, _LIMIT, _gone)
    began = time.monotonic()
    for _ in range(3):  # whoever reports it, and leaves, asks the store as well
        with pytest.raises(PeerLostError, match="rank 0 is gone"):
            client.peek("key")
    assert time.monotonic() - began < _LIMIT / 3
    store.answer.set()


def test_an_answer_counts_more_than_ranks_that_have_left(monkeypatch):
    """They may have left after a success, of which the answer tells."""
    monkeypatch.setattr(store_requests, "_SILENT", _LIMIT / 2)
    store: Any = Store(after=0.5)
    assert StoreClient(store, "c", 2, _LIMIT, _gone).peek("key") == b"value"
