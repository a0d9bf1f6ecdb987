"""A rank in a batch waits only for what has not come of it, and so others hear that ask where it is.

With all of its messages a rank seemed to wait for one that had long sent what it had to, and went on to a
collective, for which that one waited in turn: a circle that was none hid the rank that was stopped.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from unicomm import Communicator
from unicomm.testing import run_ranks

RANKS = 3


@pytest.mark.parametrize("options", [{}, {"timeout": 60}], ids=["in one native call", "on the general path"])
def test_what_has_come_is_not_awaited(backend, options: dict[str, Any], eventually):
    channels: dict[int, Any] = {}
    seen = threading.Event()

    def waits_for() -> set[int]:
        operation = channels[2]._operation if 2 in channels else None
        return set() if operation is None else {message.peer for message in operation.awaits}

    def program(comm: Communicator) -> None:
        me = comm.get_rank()
        channels[me] = comm.unsafe_backend.channel
        x, got = torch.ones(5), {peer: torch.zeros(5) for peer in range(RANKS) if peer != me}
        if me == 1:  # which rank 2 waits for, after it has got and sent everything else
            eventually(lambda: waits_for() == {1})
            seen.set()
        batch = comm.batch_op_create()
        for peer, y in got.items():
            batch.send(x, peer).recv(y, peer)
        batch.issue(False, **options)
        assert all(y.tolist() == [1.0] * 5 for y in got.values())

    run_ranks(program, RANKS, backend=backend, timeout=60)
    assert seen.is_set()
