"""The private parts of a communicator that tests of its rooms reach for: no other file names them."""

from __future__ import annotations

from typing import Any

from unicomm import Communicator, Work
from unicomm.comms.execution import point_to_point


def engine(comm: Communicator) -> Any:
    return comm._engine


def fast_path(comm: Communicator) -> Any:
    return comm._engine.fast


def executor(comm: Communicator) -> Any:
    return comm._engine.executor


def symmetric_memory(comm: Communicator) -> Any:
    return comm._engine.symmetric


def store(comm: Communicator) -> Any:
    return comm._member.store


def endpoint(comm: Communicator) -> Any:
    return comm._dynamic.endpoint


def post(comm: Communicator, kind: str, tensor: Any, peer: int, timeout: float | None = None) -> Work:
    """Posts a message as a process group does."""
    return point_to_point.post(comm._engine, kind, tensor, peer, timeout)
