"""Ranks whose store, or whose peers, do not answer while they create: store_waits.py SCENARIO ...

stopped CALL        rank 0, which holds the store, is stopped by the test; the others make the call
end                 as `stopped new_comm`; rank 0 goes on while the interpreter of the others ends
connect HOW         opens the job's store by new_comm, by init_process_group when the switch is on, or by the
                    name "unicomm" when it is off
halt WHERE SIGNAL   rank 1 signals itself in the middle of new_comm
differing CALL      rank 1 makes another call than the others
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

import unicomm
from tests.processes.programs import looks
from tests.processes.programs.common import describe, hear, leave, say
from unicomm.comms.failures.store_client import StoreClient
from unicomm.comms.membership.environment import detect_environment
from unicomm.comms.membership.job_store import open_store
from unicomm.comms.membership.rendezvous import Rendezvous
from unicomm.symm import in_torch

SCENARIO, *ARGUMENTS = sys.argv[1:]
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
SHORT, LONG = 3.0, 60.0


def turn_switch_on() -> None:
    """In this process, which has imported torch before the variable was set."""
    from torch.distributed import config

    from unicomm.c10d import switch

    config.use_torchcomms = True
    assert not switch.install()


def attempt(call: Callable[[], Any], limit: float) -> None:
    """Says "error" with what came of it, and how long that took in parts of the limit and in looks."""
    looks.begin()
    began = time.monotonic()
    try:
        call()
    except unicomm.CommError as error:
        say("error", **describe(error), share=(time.monotonic() - began) / limit, **looks.noted())
    else:
        say("done")


def stopped(what: str) -> None:
    comm = None
    call: Callable[[], Any]
    if what == "new_group":
        turn_switch_on()
        dist.init_process_group("gloo", timeout=timedelta(seconds=LONG))

        def call() -> Any:
            return dist.new_group([1, 2], timeout=timedelta(seconds=SHORT))
    elif what.startswith("reconfigure"):
        comm = unicomm.new_comm("gloo", "cpu", enable_reconfigure=True, timeout=LONG)
        say("handle", handle=comm.get_init_handle())
        handles = hear().split()
        comm.reconfigure(1, handles)

        def call() -> Any:
            return comm.reconfigure(2, handles, timeout=SHORT)
    elif what == "symm_mem.rendezvous":
        dist.init_process_group("gloo", timeout=timedelta(seconds=LONG))
        dist.distributed_c10d._get_process_group_store(dist.group.WORLD).set_timeout(timedelta(seconds=SHORT))
        name = dist.group.WORLD.group_name

        def call() -> Any:
            return in_torch._exchange(name, b"")
    else:
        comm = unicomm.new_comm("gloo", "cpu", timeout=LONG)
        calls = {
            "split": lambda: comm.split([1, 2], timeout=SHORT),
            "new_comm": lambda: unicomm.new_comm("gloo", "cpu", "second", timeout=SHORT),
        }
        call = calls[what]
    say("ready", pid=os.getpid())
    if RANK == 0 and what == "reconfigure inside":

        def stop(*_: Any) -> Any:
            os.kill(os.getpid(), signal.SIGSTOP)

        Rendezvous.exchange = stop  # type: ignore[method-assign, assignment]
        call()
    hear()
    attempt(call, SHORT)
    if comm is not None:
        comm.finalize()
    say("finalized")


class GoesOn:
    """Has the store's host go on when the interpreter ends: a request of this process is then answered."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def __del__(self) -> None:
        os.kill(self._pid, signal.SIGCONT)
        time.sleep(1.0)


def end() -> None:
    global kept
    stopped("new_comm")
    kept = GoesOn(int(hear()))


def connect(how: str) -> None:
    if how == "new_comm":
        attempt(lambda: unicomm.new_comm("gloo", "cpu", timeout=SHORT), SHORT)
        return
    if how == "init_process_group":
        turn_switch_on()
    name = "gloo" if how == "init_process_group" else how
    attempt(lambda: dist.init_process_group(name, timeout=timedelta(seconds=SHORT)), SHORT)


def halt(where: str, number: str) -> None:
    limit = LONG if number == "SIGKILL" else SHORT
    if RANK == 1:
        operation, key, after = {
            "posted": ("add", "/0/arrived", False),
            "arrived": ("put", "/0/last", False),
            "exchange": ("put_first", "/1/1", True),
        }[where]
        original, add = getattr(StoreClient, operation), StoreClient.add

        def signal_itself(self: StoreClient, name: str, *more: Any) -> Any:
            if not name.endswith(key):
                return original(self, name, *more)
            if after:
                original(self, name, *more)
            os.kill(os.getpid(), signal.Signals[number])
            return original(self, name, *more)

        def be_the_last(self: StoreClient, name: str, amount: int = 1) -> int:
            while name.endswith("/0/arrived") and add(self, name, 0) < SIZE - 1:
                time.sleep(0.01)
            return add(self, name, amount)

        if where == "arrived":
            StoreClient.add = be_the_last  # type: ignore[method-assign]
        setattr(StoreClient, operation, signal_itself)
    attempt(lambda: unicomm.new_comm("gloo", "cpu", timeout=limit), limit)


def differing(what: str) -> None:
    odd = RANK == 1
    comm = unicomm.new_comm("auto", "cpu", timeout=LONG)
    say("ready")
    hear()
    everyone = list(range(SIZE))

    def create(name: str, size: int) -> Any:
        store = open_store(detect_environment(), LONG)
        return unicomm.new_comm("gloo", "cpu", name, timeout=LONG, store=store, rank=RANK, size=size)

    calls = {
        "order": lambda: comm.split(everyone[::-1] if odd else everyone, timeout=LONG),
        "list": lambda: comm.split(everyone[:2] if odd else everyone, timeout=LONG),
        "split name": lambda: comm.split(everyone, "odd" if odd else "even", timeout=LONG),
        "name": lambda: create("odd" if odd else "even", SIZE),
        "size": lambda: create("same", SIZE + odd),
    }
    if what == "other thread":  # which makes the missing call later
        waits = threading.Thread(target=lambda: (hear(), comm.split(everyone, "a", timeout=LONG).finalize()))
        if odd:
            waits.start()
        looks.on_others_elsewhere(6, lambda: say("looked"))  # two are enough for an error
        attempt(lambda: comm.split(everyone, "b" if odd else "a", timeout=LONG).finalize(), LONG)
        if not odd:
            comm.split(everyone, "b", timeout=LONG).finalize()
        else:
            waits.join()
        say("both")
        return
    attempt(calls[what], LONG)
    say("waits again")
    comm.barrier(async_op=False)
    say("works")


say("here")
if SCENARIO != "stopped":
    hear()
{"stopped": stopped, "end": end, "connect": connect, "halt": halt, "differing": differing}[SCENARIO](
    *ARGUMENTS
)
if ARGUMENTS[:1] in (["new_group"], ["init_process_group"], ["symm_mem.rendezvous"]):
    leave()
