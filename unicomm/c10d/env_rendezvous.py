"""Under the switch, `init_process_group` with env:// works below mpiexec and srun as it does below torchrun.

torch wants RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which those launchers do not set. The first two are
facts that the detector knows, and are put into the environment, with LOCAL_RANK and LOCAL_WORLD_SIZE where
the launcher tells them: programs read them as well. An address is not needed: where MASTER_ADDR is absent
the ranks meet as those of `new_comm` do. What is set stays as it is.
"""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Iterator, MutableMapping
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from unicomm.comms.errors import InvalidArgumentError
from unicomm.comms.execution.member import Environment
from unicomm.comms.membership.environment import TORCHRUN, detect_environment

from .switch import CHOICE

# What was filled in, for processes that this one starts: another launcher below this one tells other numbers.
FILLED = "UNICOMM_FILLED_IN"
_PROGRAMS = ("single process", "RANK/WORLD_SIZE", TORCHRUN.name)  # sources that torch reads as well as we do

_times = itertools.count()


def fill_in(environ: MutableMapping[str, str] = os.environ) -> None:
    """Sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE to what the launcher says, where they are absent.

    Nothing is set when those that are there say something else, and when no launcher is recognised. Errors in
    the launcher's variables are raised by what makes the group.
    """
    if TORCHRUN.applies(environ):
        return
    parents = dict(part.split("=", 1) for part in environ.pop(FILLED, "").split() if "=" in part)
    if all(environ.get(name) == value for name, value in parents.items()):
        for name in parents:
            del environ[name]
    try:
        place = detect_environment(environ)
    except InvalidArgumentError:
        return
    if place.source in _PROGRAMS or not _agrees(place, environ.get("RANK"), environ.get("WORLD_SIZE")):
        return
    told = {
        "RANK": place.rank,
        "WORLD_SIZE": place.size,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_WORLD_SIZE": place.local_size,
    }
    filled = {name: str(told[name]) for name in told if told[name] is not None and name not in environ}
    if filled:
        environ.update(filled)
        environ[FILLED] = " ".join(f"{name}={value}" for name, value in filled.items())


def install() -> None:
    """Puts itself before torch's handler of env://."""
    handlers: dict[str, Any] = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    original = handlers["env"]
    if getattr(original, "__module__", "") == __name__:
        return

    def rendezvous(url: str, timeout: timedelta = timedelta(minutes=30), **more: Any) -> Iterator[Any]:
        place = _place(url)
        if place is None:
            yield from original(url, timeout=timeout, **more)
            return
        yield _store(place, timeout), place.rank, place.size
        raise RuntimeError("the ranks of a launcher do not meet again")

    handlers["env"] = rendezvous


def _place(url: str) -> Environment | None:
    """This process's place, where it is the launcher's to say where the ranks meet."""
    if os.environ.get("MASTER_ADDR") or os.environ.get("MASTER_PORT") or TORCHRUN.applies(os.environ):
        return None
    place = detect_environment()
    asked = {name: values[0] for name, values in parse_qs(urlparse(url).query).items()}
    rank = asked.get("rank", os.environ.get("RANK"))
    size = asked.get("world_size", os.environ.get("WORLD_SIZE"))
    return place if place.source not in _PROGRAMS and _agrees(place, rank, size) else None


def _agrees(place: Environment, rank: str | None, size: str | None) -> bool:
    return rank in (None, "", str(place.rank)) and size in (None, "", str(place.size))


def _store(place: Environment, timeout: timedelta) -> Store:
    if place.size == 1:
        return HashStore()
    from unicomm.backends.bootstrap.store import store_of_job

    store = store_of_job(place, timeout.total_seconds(), uses_mpi=os.environ.get(CHOICE) == "mpi")
    assert store is not None  # there are several ranks
    # A program may end its group and make another: no keys of the first.
    return PrefixStore(f"env/{next(_times)}", store)
