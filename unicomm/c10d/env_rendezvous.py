"""`init_process_group` with env:// when the switch is on.

torch wants RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which mpiexec and srun do not set. `fill_in` puts
RANK and WORLD_SIZE into the environment, and LOCAL_RANK and LOCAL_WORLD_SIZE if the launcher tells them,
because programs read them too. An address is not needed: without MASTER_ADDR the ranks meet in the same way
as those of `new_comm`. Variables that are set are never changed.

With MASTER_ADDR, rank 0 hosts torch's store. Like that of `new_comm`, it listens at this address only.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, MutableMapping
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

from unicomm.comms.errors import InvalidArgumentError
from unicomm.comms.membership.environment import TORCHRUN, Environment, detect_environment
from unicomm.comms.membership.job_store import store_listener

from .choice import CHOICE
from .compat import HashStore, PrefixStore, Store, TCPStore, rendezvous_handlers

# The variables that were filled in, with their values. A process started by this one may be below another
# launcher, whose values then replace these.
FILLED = "UNICOMM_FILLED_IN"
_PROGRAMS = ("single process", "RANK/WORLD_SIZE", TORCHRUN.name)  # sources that torch reads itself

_times = itertools.count()


def fill_in(environ: MutableMapping[str, str] = os.environ) -> None:
    """Sets RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE to the launcher's values where they are missing.

    Sets nothing when no launcher is recognised, or when one of the variables is set and contradicts the
    launcher. An error in the launcher's variables is raised later, by the function that makes the group.
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
    """Registers a handler of env:// that calls torch's own handler unless the launcher has the ranks meet."""
    handlers = rendezvous_handlers()
    original = handlers["env"]
    if getattr(original, "__module__", "") == __name__:
        return

    def rendezvous(url: str, timeout: timedelta = timedelta(minutes=30), **more: Any) -> Iterator[Any]:
        place = _place(url)
        if place is None:
            if (hosted := _hosted(url, timeout)) is not None:
                yield hosted
                raise RuntimeError("the ranks of an environment do not meet again")
            yield from original(url, timeout=timeout, **more)
            return
        yield _store(place, timeout), place.rank, place.size
        raise RuntimeError("the ranks of a launcher do not meet again")

    handlers["env"] = rendezvous


def _hosted(url: str, timeout: timedelta) -> tuple[Store, int, int] | None:
    """Returns rank 0's store at MASTER_ADDR with rank and size; None if torch has to make the store."""
    asked = {name: values[0] for name, values in parse_qs(urlparse(url).query).items()}
    named = {name: asked.get(name.lower(), os.environ.get(name, "")) for name in ("RANK", "WORLD_SIZE")}
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    old = "0" in (asked.get("use_libuv"), os.environ.get("USE_LIBUV"))
    numbers = (named["RANK"], named["WORLD_SIZE"], port)
    if agent or old or not host or not all(map(str.isdecimal, numbers)) or int(named["RANK"]) != 0:
        return None
    size = int(named["WORLD_SIZE"])
    one_host = os.environ.get("LOCAL_WORLD_SIZE") == named["WORLD_SIZE"]
    listener = store_listener(host, int(port), one_host=one_host) if 0 < int(port) < 65536 else None
    if listener is None:
        return None
    fd = listener.detach()
    return TCPStore(host, int(port), size, True, timeout, multi_tenant=True, master_listen_fd=fd), 0, size


def _place(url: str) -> Environment | None:
    """Returns this process's place in the job if the launcher has the ranks meet, else None."""
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
    # A program may destroy its group and make another, which must not see the keys of the first.
    return PrefixStore(f"env/{next(_times)}", store)
