"""`finalize` while operations run on the native path of shared memory."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
import torch

import unicomm
from tests.comms.execution.finalizing import finalize_in_a_signal_handler, until_on_fast_path
from tests.threads import outcomes
from unicomm import CommError, Communicator, ReduceOp, symm
from unicomm.c10d.compat import HashStore

SUM = ReduceOp.SUM


def ranks(n: int, memory: bool = False, **options: object) -> list[Communicator]:
    store = HashStore()

    def make(rank: int) -> Communicator:
        comm = unicomm.new_comm("shm", "cpu", name="n", store=store, rank=rank, size=n, timeout=30, **options)
        if memory:
            symm.init(comm, heap_bytes=1 << 20)
        return comm

    return outcomes([lambda r=r: make(r) for r in range(n)])


def test_the_operation_ends_first():
    """The other rank comes while finalize waits: both get the sum."""
    comms = ranks(2)
    tensors = [torch.ones(5), torch.ones(5)]

    def ends() -> None:
        until_on_fast_path(comms[0])
        comms[0].finalize(20)

    def other() -> None:
        until_on_fast_path(comms[0])
        time.sleep(0.2)
        comms[1].all_reduce(tensors[1], SUM)

    got = outcomes([lambda: comms[0].all_reduce(tensors[0], SUM) and None, ends, other])
    assert got == [None] * 3
    assert all(bool((t == 2).all()) for t in tensors)
    comms[1].finalize()


@pytest.mark.parametrize("what", ["collective", "message", "signal"])
def test_an_operation_that_cannot_end_is_aborted(what):
    comms = ranks(2, memory=what == "signal")
    window = None
    if what == "signal":
        (window, _) = outcomes([lambda c=c: c.new_window() for c in comms])

    def run() -> None:
        if what == "collective":
            comms[0].barrier()
        elif what == "message":
            comms[0].recv(torch.ones(3), 1)
        else:
            window.wait_signal(1)

    def ends() -> None:
        until_on_fast_path(comms[0])
        comms[0].finalize(0.2)

    runs, ended = outcomes([run, ends])
    assert isinstance(runs, CommError), repr(runs)
    assert isinstance(ended, unicomm.CommTimeoutError), repr(ended)
    name = {"collective": "barrier #1", "message": "recv #1", "signal": "wait_signal"}[what]
    assert name in str(ended)
    comms[1].finalize()


def test_from_a_signal_handler():
    """In the midst of an operation of the main thread: refused at once, and abort is what helps."""
    comms = ranks(2)
    assert "all_reduce #1" in finalize_in_a_signal_handler(comms[0], until_on_fast_path)
    for comm in comms:
        comm.finalize()


def test_reconfigure_meanwhile():
    """The operation of another thread ends with the error that names reconfigure, not by an assertion."""
    comms = ranks(2, enable_reconfigure=True)

    def reconfigures() -> object:
        until_on_fast_path(comms[0])
        return comms[0].reconfigure(2, [comms[0].get_init_handle()], timeout=20)

    runs, again = outcomes([comms[0].barrier, reconfigures])
    assert isinstance(runs, CommError), repr(runs)
    assert isinstance(again, unicomm.Work), repr(again)
    assert comms[0].get_size() == 1
    for comm in comms:
        comm.finalize()


def forever(steps: list[Callable[[], object]], chance: random.Random) -> None:
    """Runs random steps until one raises; a `CommError` is how it has to end."""
    try:
        for _ in range(100_000):
            chance.choice(steps)()
    except CommError:
        return
    raise AssertionError("the communicator was never finalized")


@pytest.mark.parametrize("seed", range(30))
def test_random_operations_of_several_threads(seed):
    """Threads issue operations while others finalize, some twice: whatever ends, ends with a `CommError`."""
    chance = random.Random(seed)
    n = chance.choice([1, 2, 3])
    comms = ranks(n, memory=True)
    windows = outcomes([lambda c=c: c.new_window(symm.empty(64, comm=c)) for c in comms])

    def collectives(rank: int) -> None:
        comm, x = comms[rank], torch.ones(chance.choice([1, 100, 300_000]))
        forever([lambda: comm.all_reduce(x, SUM)], random.Random(seed))

    def messages(rank: int) -> None:
        comm, window, peer = comms[rank], windows[rank], (rank + 1) % n
        steps: list[Callable[[], object]] = [
            lambda: window.put(torch.ones(8), peer, 0),
            lambda: window.signal(peer),
        ]
        if n > 1:
            steps.append(lambda: comm.send(torch.ones(4), peer))
        forever(steps, random.Random(seed + rank))

    def ends(rank: int) -> None:
        time.sleep(random.Random(seed * 7 + rank).random() * 0.02)
        try:
            comms[rank].finalize(random.Random(seed).choice([0.0, 0.05]))
        except CommError:
            comms[rank].finalize()

    jobs: list[Callable[[], object]] = []
    for rank in range(n):
        jobs += [lambda r=rank: collectives(r), lambda r=rank: messages(r)]
        jobs += [lambda r=rank: ends(r)] * 2
    got = outcomes(jobs)
    assert [error for error in got if error is not None] == []
