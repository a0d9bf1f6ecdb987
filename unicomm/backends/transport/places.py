"""Where a rank is: the address at which others reach it, and whether its host has a core for each rank."""

from __future__ import annotations

import json
import os
from typing import NamedTuple

from unicomm.backends.bootstrap import addresses
from unicomm.comms.backend import Setup

HOT = 0.0001  #: seconds that a wait polls before it sleeps, if each rank of the host has a core
_CROWDED = 0.00001  # if not


class Place(NamedTuple):
    """Attributes:
    address: at which this rank listens.
    spin: seconds that its waits poll before they sleep.
    """

    address: str
    spin: float


def find_place(setup: Setup, library: str) -> Place:
    """Collective, of at least two ranks: returns this rank's place."""
    addresses.guard_store(setup.store)
    mine = addresses.here(setup.store)
    told = setup.rendezvous.exchange(f"{library} places", json.dumps(mine).encode())
    places = [addresses.Place(*json.loads(blob)) for blob in told]
    here = sum(other.network == mine.network for other in places)
    spin = HOT if here <= len(os.sched_getaffinity(0)) else _CROWDED
    address = addresses.of_interface(setup.hints["interface"]) or setup.hints["hostname"]
    if not address:
        cure = "name an address by the hint 'hostname'"
        address = addresses.choose_for(setup, places, cure) or "127.0.0.1"
    return Place(address, spin)
