"""Creation asks little of the store, however many ranks there are (docs/design/scale.md)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

import unicomm
from benchmarks import counting_store as counting
from benchmarks import creation_scale as creation
from tests.comms.membership.rendezvous_helpers import LONG
from tests.threads import outcomes
from unicomm.comms.failures.store_client import CHUNK
from unicomm.comms.membership import meeting_faults
from unicomm.comms.membership.rendezvous import meet

SIZES = (2, 3, 8, 33, 128, 256)


@pytest.fixture(scope="module", autouse=True)
def no_rank_is_late() -> Iterator[None]:
    """On a busy machine ranks are, and the others then look for them, which the counts do not hold."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meeting_faults, "PAUSE", LONG)
        yield


@pytest.fixture(scope="module", params=SIZES)
def counted(request: pytest.FixtureRequest) -> tuple[int, Any]:
    """The store after all ranks have met, exchanged one value and left."""
    size = request.param
    store = counting.CountingStore(size)

    def one(rank: int) -> None:
        with meet(store.view(rank), "main", rank, size, timeout=LONG, hello={"backend": "shm"}) as met:
            values = met.exchange("place", json.dumps({"host": rank // 8}).encode())
            assert [json.loads(value)["host"] for value in values] == [r // 8 for r in range(size)]

    results = outcomes([partial(one, rank) for rank in range(size)])
    assert results == [None] * size
    return size, store


def test_a_rank_makes_a_constant_number_of_requests(counted: tuple[int, Any]) -> None:
    size, store = counted
    requests = sorted(c.requests for c in store.counts)
    # Those who are the last to come in a step, or to leave, do more; the same at every size.
    assert all(count <= creation.REQUESTS for count in requests[:-3])
    assert requests[-1] <= creation.REQUESTS + creation.MOST_MORE
    assert size <= CHUNK  # beyond, the last to come makes two more requests for each so many ranks


def test_keys_are_constant_for_a_rank(counted: tuple[int, Any]) -> None:
    size, store = counted
    assert max(c.written for c in store.counts) <= 8
    assert sum(c.written for c in store.counts) <= 2 * size + 12
    assert store.most_keys <= 2 * size + 8  # at any time: posts of the meeting stay for one exchange
    assert store.num_keys() == 1  # the number of the next meeting
    # Only the last to come reads all posts, one in each of the two steps.
    readers = [c for c in store.counts if c.read > 20]
    assert len(readers) <= 2


def test_the_model_makes_the_same_requests(counted: tuple[int, Any]) -> None:
    size, store = counted
    model = creation.simulate(size, creation.Costs(), exchanges=1, value=40)
    requests = sum(c.requests for c in store.counts)
    # A rank that finds the outcome at its first look makes one request less, in each of the two steps.
    assert model.requests - 2 * (size - 1) <= requests <= model.requests


@pytest.mark.parametrize(
    ("backend", "exchanges"), [("shm", 2), ("gloo", 4), ("tcp", 4), ("ucx", 5), ("auto", 3)]
)
def test_communicators_ask_as_little(backend: str, exchanges: int) -> None:
    """Also Gloo's own bootstrap, in which every rank would read the keys of all others."""
    for size in (4, 12):
        store = counting.CountingStore(size)

        def one(rank: int, store: Any = store, size: int = size) -> None:
            comm = unicomm.new_comm(
                backend, torch.device("cpu"), store=store.view(rank), rank=rank, size=size, timeout=LONG
            )
            comm.barrier(False)
            comm.finalize()

        assert outcomes([partial(one, rank) for rank in range(size)]) == [None] * size
        requests = sorted(c.requests for c in store.counts)
        # All but those who are the last in one of the steps.
        constant = creation.REQUESTS + 5 * (exchanges - 1)
        assert all(count <= constant for count in requests[: -(exchanges + 2)])
        assert requests[-1] <= constant + 4 + 8 * (exchanges + 1)
        assert store.num_keys() == 1
