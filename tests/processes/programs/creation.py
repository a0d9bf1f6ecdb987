"""Communicators that cannot come about: creation.py SCENARIO ...

killed before|inside VICTIM TIMEOUT     a rank dies before, or in the middle of, its creation
missing                                 ranks of a job of four come, except the last
differing backend|hints|name            rank 1 passes something else
"""

import os
import signal
import sys
import time

import torch

import unicomm
from tests.processes.programs import looks
from tests.processes.programs.common import describe, hear, holdings, say, settled
from unicomm.comms.membership.rendezvous import Rendezvous

SCENARIO, *ARGUMENTS = sys.argv[1:]


def create(backend: str, timeout: float, hints: dict[str, str] | None = None) -> None:
    """Says "error" with what came of it, and "failed" with what this process holds then."""
    looks.begin()
    before, began = holdings(), time.monotonic()
    try:
        unicomm.new_comm(backend, torch.device("cpu"), name="main", timeout=timeout, hints=hints)
    except unicomm.CommError as error:
        say("error", **describe(error), began=began, **looks.noted())
    else:
        say("created")
    say("failed", before=before, after=settled(before))


def killed(moment: str, victim: str, timeout: str) -> None:
    if os.environ["RANK"] == victim and moment == "inside":
        exchange = Rendezvous.exchange

        def die_when_mapped(self: Rendezvous, tag: str, value: bytes) -> list[bytes]:
            if tag == "shm mapped":
                os.kill(os.getpid(), signal.SIGKILL)
            return exchange(self, tag, value)

        Rendezvous.exchange = die_when_mapped
    create("shm", float(timeout))


def missing() -> None:
    create("shm", 2)


def differing(what: str) -> None:
    odd = os.environ["RANK"] == "1"
    backend = "gloo" if odd and what == "backend" else "shm"
    hints = {"slot_bytes": "64K"} if odd and what == "hints" else None
    create(backend, 20, hints)


say("here")
hear()  # so that all of them create at the same time
{"killed": killed, "missing": missing, "differing": differing}[SCENARIO](*ARGUMENTS)
