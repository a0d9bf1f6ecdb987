"""Communicators that cannot come about: creation.py SCENARIO ...

killed before|inside VICTIM LAST TIMEOUT    a rank dies before, or in the middle of, its creation
missing LAST TIMEOUT                        ranks of a job of four come, except the last ones
differing backend|hints|name                rank 1 passes something else

Rank LAST alone, if it is not -1, has the short TIMEOUT. The test has it create when the others have said
"came": on a busy machine one of them may come later than any timeout, and would be missing, too.
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
LONG = 60.0  # seconds, which must not pass


def create(backend: str, timeout: float, hints: dict[str, str] | None = None) -> None:
    """Says "came" when this rank has come, "error" with what came of it, and "failed" with what this process
    holds then.
    """
    looks.begin()
    before, began = holdings(), time.monotonic()
    try:
        unicomm.new_comm(backend, torch.device("cpu"), name="main", timeout=timeout, hints=hints)
    except unicomm.CommError as error:
        say("error", **describe(error), began=began, **looks.noted())
    else:
        say("created")
    say("failed", before=before, after=settled(before))


def timeout_of(last: str, timeout: str) -> float:
    return float(timeout) if os.environ["RANK"] == last else LONG


def killed(moment: str, victim: str, last: str, timeout: str) -> None:
    if os.environ["RANK"] == victim and moment == "inside":
        exchange = Rendezvous.exchange

        def die_when_mapped(self: Rendezvous, tag: str, value: bytes) -> list[bytes]:
            if tag == "shm mapped":
                os.kill(os.getpid(), signal.SIGKILL)
            return exchange(self, tag, value)

        Rendezvous.exchange = die_when_mapped
    create("shm", timeout_of(last, timeout))


def missing(last: str, timeout: str) -> None:
    create("shm", timeout_of(last, timeout))


def differing(what: str) -> None:
    odd = os.environ["RANK"] == "1"
    backend = "gloo" if odd and what == "backend" else "shm"
    hints = {"slot_bytes": "64K"} if odd and what == "hints" else None
    create(backend, 20, hints)


looks.on_arrival(lambda: say("came"))
say("here")
hear()  # so that the test says when they create
{"killed": killed, "missing": missing, "differing": differing}[SCENARIO](*ARGUMENTS)
