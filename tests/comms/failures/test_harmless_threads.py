"""Threads of other libraries that UNICOMM_HARMLESS_THREADS names, by the value in docs/failures.md."""

from __future__ import annotations

import multiprocessing
import os
import re
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data._utils.pin_memory import _pin_memory_loop

from tests import ROOT
from unicomm.comms.failures import store_requests
from unicomm.comms.failures.thread_quiescence import VARIABLE, threads_that_stay

WITHIN = 30.0  # a hang, not a slow machine


@pytest.fixture
def pinning(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Thread]:
    """A data loader's thread that waits for batches of its workers."""
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda _: None)  # there may be none
    batches, done = multiprocessing.get_context("spawn").Queue(), threading.Event()
    arguments = (batches, None, 0, done, None)
    thread = threading.Thread(target=_pin_memory_loop, args=arguments, daemon=True)
    thread.start()
    yield thread
    done.set()
    batches.put((0, None))  # which ends the wait
    thread.join(WITHIN)
    assert not thread.is_alive()


def stays(within: float) -> bool:
    """Whether this thread, if it waited in a communicator, would wait for ever, as seen in this time."""
    end = time.monotonic() + within
    while threads_that_stay([threading.get_ident()], {}, 0, 0) is None:
        if time.monotonic() > end:
            return False
    return True


def test_a_data_loaders_thread(pinning: threading.Thread, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not stays(1.0)
    found = re.search(rf"^    {VARIABLE}=(\S+)$", (ROOT / "docs/failures.md").read_text(), re.MULTILINE)
    assert found
    monkeypatch.setenv(VARIABLE, f"{os.environ[VARIABLE]}:{found[1]}")
    assert stays(WITHIN)


def test_a_thread_for_requests_to_a_store_may_be_awake() -> None:
    """On a busy machine it is after each answer, also to the rank that looks."""
    ended = threading.Event()

    def computes() -> None:
        while not ended.is_set():
            pass

    store_requests._pool.run(computes)
    try:
        assert stays(WITHIN)
    finally:
        ended.set()
