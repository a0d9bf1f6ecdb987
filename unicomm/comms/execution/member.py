"""Member: what a communicator is made of on this rank, and this process's place in its job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unicomm.c10d.compat import Store
from unicomm.comms.backend import Backend
from unicomm.comms.options import CommOptions


@dataclass(frozen=True)
class Environment:
    """This process's place in its job.

    Attributes:
        rank, size: its number, and how many processes there are.
        local_rank, local_size: the same within its host; None where the launcher does not tell.
        source: who told, such as "torchrun" or "Open MPI", or "single process".
        job: the launcher's name for the job and the attempt, the same on all ranks; "" if it has none.
    """

    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    source: str
    job: str


@dataclass
class Member:
    """Everything a `Communicator` is made of: this rank's place, and the parts it owns or shares."""

    backend: Backend
    asked_for: type[Backend]  # may be another than the one in use: "auto" chooses
    name: str
    uid: str
    rank: int
    size: int
    labels: Sequence[int]  # the members' numbers in the whole job
    device: torch.device
    options: CommOptions
    store: Store | None
    recorder: Any
    recorder_index: int
    world: Environment
