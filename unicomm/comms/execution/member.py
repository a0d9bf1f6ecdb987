"""Member: what a communicator is made of on this rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unicomm.c10d.compat import Store
from unicomm.comms.backend import Backend
from unicomm.comms.options import CommOptions


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
    world: Any  # the `Environment` of this process (membership/environment.py)
