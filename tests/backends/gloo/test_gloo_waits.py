"""An end to Gloo's own waits: torch's library is asked for it by names that Python does not have."""

from __future__ import annotations

import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, ProcessGroupGloo

from unicomm.backends.gloo.waits import Waits, end_wait


@pytest.fixture
def groups():
    """Two ranks' groups, in one process."""
    store, made = HashStore(), {}

    def make(rank: int) -> None:
        made[rank] = ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))

    threads = [threading.Thread(target=make, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    return [made[0], made[1]]


def begun(groups: list[Any], kind: str) -> Any:
    """A message that nobody answers."""
    return getattr(groups[0], kind)([torch.zeros(4)], 1, 7)


@pytest.mark.parametrize("kind", ["send", "recv"])
@pytest.mark.parametrize("moment", ["before", "during"])
def test_a_wait_ends(groups, kind, moment):
    work, said = begun(groups, kind), []
    waits = Waits()
    waits.add(work)
    thread = threading.Thread(target=lambda: said.append(work.wait(timedelta(days=1))), daemon=True)
    if moment == "before":
        waits.end()
        thread.start()
    else:
        thread.start()
        thread.join(timeout=0.1)
        assert thread.is_alive()  # so that its end means something
        waits.end()
    thread.join(timeout=30)
    assert said == [False]


def test_ended_messages_are_not_kept(groups):
    waits = Waits()
    waits.add(begun(groups, "send"))
    assert not list(waits._works)
    waits.end()


def test_only_messages_of_gloo_are_touched(groups):
    """Objects of other classes have something else where these have the address of a C++ object."""
    assert not end_wait(SimpleNamespace())
    assert not end_wait(17)
    works = [group.barrier() for group in groups]
    assert [end_wait(work) for work in works] == [False, False]
    for work in works:
        work.wait()
