"""Requests to a store that does not answer, by ranks that hear elsewhere that others are gone."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from unicomm._core import FaultCode
from unicomm.comms.errors import CommTimeoutError, PeerLostError
from unicomm.comms.failures import store_requests
from unicomm.comms.failures.faults import FINALIZED, Fault, error_of, in_global_ranks
from unicomm.comms.failures.store_client import StoreClient
from unicomm.comms.failures.store_requests import StoreHost, set_host

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


@pytest.mark.parametrize("labels", [(0, 1, 2), (4, 5, 6)])
def test_a_rank_that_has_finalized_explains_only_the_silence_of_its_own_store(labels, monkeypatch):
    """It has had its answers, perhaps, and the store has stopped since."""
    monkeypatch.setattr(store_requests, "_SILENT", 0.0)

    def check() -> None:
        raise in_global_ranks(error_of(Fault(FaultCode.PEER_LOST, dead=(1,), detail=FINALIZED)), labels)

    store: Any = Store()
    set_host(store, StoreHost("rank 2", labels[2]))
    with pytest.raises(CommTimeoutError, match="the store did not answer") as raised:
        StoreClient(store, "c", 3, 0.3, check).peek("key")
    assert raised.value.absent == (labels[2],)
    set_host(store, StoreHost("rank 1", labels[1]), replace=True)
    with pytest.raises(PeerLostError, match="finalized"):
        StoreClient(store, "c", 3, _LIMIT, check).peek("key")
    store.answer.set()


def test_an_answer_counts_more_than_ranks_that_have_left(monkeypatch):
    """They may have left after a success, of which the answer tells."""
    monkeypatch.setattr(store_requests, "_SILENT", _LIMIT / 2)
    store: Any = Store(after=0.5)
    assert StoreClient(store, "c", 2, _LIMIT, _gone).peek("key") == b"value"
