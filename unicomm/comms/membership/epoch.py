"""Epochs: what `reconfigure` replaces in a communicator, and what a communicator without ranks has instead.

An epoch is one connection of a fixed list of ranks: a backend, a uid, sequence numbers from 1 and an entry in
the recorder. A communicator that cannot be reconfigured has one epoch.
"""

from __future__ import annotations

import dataclasses
import threading
from dataclasses import dataclass, field
from typing import Protocol

from unicomm.comms.backend import Backend, Unconnected
from unicomm.comms.errors import NotReadyError
from unicomm.comms.execution.engine import Engine
from unicomm.comms.execution.member import Member

from .endpoint import Endpoint
from .reconfigure_session import ReconfigureSession

_UNRECORDED = (1 << 16) - 1  # a recorder index that belongs to no communicator


@dataclass
class ReconfigureState:
    """What a communicator that can be reconfigured keeps over its epochs.

    Attributes:
        endpoint: where other ranks reach this one.
        label: this process's number in the job, which never changes; None until it has one.
        top: the highest number in the job that this rank has heard of.
        used: uuids of all attempts.
        busy: held while the communicator is reconfigured or finalized.
        session: the attempt under way.
        recorded: the indexes in the recorder of the epochs before the current one.
    """

    endpoint: Endpoint
    label: int | None
    top: int
    used: set[int] = field(default_factory=set)
    busy: threading.Lock = field(default_factory=threading.Lock)
    session: ReconfigureSession | None = None
    recorded: set[int] = field(default_factory=set)

    def cancel(self) -> None:
        if (session := self.session) is not None:
            session.cancel()

    def forget(self) -> None:
        self.busy = threading.Lock()
        self.session = None
        self.endpoint.forget()


class EpochHolder(Protocol):
    """What membership needs of a communicator: the current epoch, which it reads and replaces."""

    _engine: Engine
    _member: Member
    _dynamic: ReconfigureState | None

    def abort(self) -> None: ...


class Vacant(Unconnected):
    """Takes the place of the backend while a communicator has no ranks. No operation reaches it."""

    def __init__(self, meant: type[Backend]) -> None:
        self.name = meant.name  # type: ignore[misc]
        self.capabilities = meant.capabilities


def vacant_member(member: Member) -> Member:
    """The same member without ranks."""
    return dataclasses.replace(
        member, backend=Vacant(member.asked_for), recorder_index=_UNRECORDED, store=None
    )


def no_ranks_yet(name: str) -> NotReadyError:
    return NotReadyError(
        "the communicator has no ranks yet",
        comm=name,
        hint="call reconfigure with the init handles of all ranks; or pass rank= and size= to new_comm to"
        " connect at once",
    )
