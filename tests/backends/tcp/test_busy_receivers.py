"""A rank that computes for long is waited for, while a message for it fills the system's buffers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

import unicomm
from unicomm import Communicator

SILENCE = 4  # seconds, the least
BUSY = 7.0


def ranks(programs: list[Callable[[Communicator], object]]) -> list[object]:
    """What the programs return, each in a rank of its own, whose communicator is finalized at its end."""
    store = torch.distributed.HashStore()
    said: list[object] = [None] * len(programs)

    def run(rank: int) -> None:
        hints = {"host_silence": str(SILENCE)}
        comm = unicomm.new_comm(
            "tcp", "cpu", name="busy", store=store, rank=rank, size=len(programs), timeout=60, hints=hints
        )
        try:
            said[rank] = programs[rank](comm)
            comm.finalize()
        except unicomm.CommError as error:
            said[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(programs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


@pytest.mark.parametrize(
    "megabytes", [3, 32]
)  # which the system takes whole, so that its sender leaves; and not
def test_a_message_waits_for_its_receiver(megabytes):
    data = torch.arange(megabytes << 18, dtype=torch.int32)

    def send(comm: Communicator) -> bool:
        comm.send(data, 1, False)
        return True

    def receive(comm: Communicator) -> bool:
        time.sleep(BUSY)
        out = torch.zeros_like(data)
        comm.recv(out, 0, False)
        return torch.equal(out, data)

    assert ranks([send, receive]) == [True, True]
