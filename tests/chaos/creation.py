"""The scene `creation`: communicators that are created and finalized, one after the other.

The ranks meet as env:// does: rank 0 holds the store, at MASTER_ADDR and MASTER_PORT.
"""

from __future__ import annotations

import contextlib
import os
import random

import unicomm
from tests.chaos.operations import Steps
from tests.chaos.spec import CLOSING, Say, Spec, open_store
from tests.ports import free_port
from unicomm.comms.membership import job_store


def play(spec: Spec, say: Say, closing: contextlib.ExitStack) -> None:
    _agree_on_an_address(spec)
    closing.callback(job_store._slots.clear)  # which ends the connection to the store, and the store
    rng = random.Random(spec.seed)
    everyone = list(range(spec.size))
    for step in range(spec.steps):
        say("step", step)
        comm = unicomm.new_comm(
            spec.backend, "cpu", name=f"comm{step}", timeout=spec.timeout, hints=spec.hints
        )
        closing.callback(comm.finalize, CLOSING)
        Steps(comm, everyone, spec.rank).run(step, rng)
        comm.barrier(False)  # rank 0 ends the store at its end
        if step < spec.steps - 1:
            comm.finalize()


def _agree_on_an_address(spec: Spec) -> None:
    host = spec.store.rsplit(":", 1)[0]  # of rank 0's host
    store = open_store(spec)
    if spec.rank == 0:
        store.set("port", str(free_port(host)))
    os.environ["MASTER_ADDR"] = host
    os.environ["MASTER_PORT"] = store.get("port").decode()
