"""The state of a rendezvous as JSON: nothing that is in a store is ever unpickled.

torch's rendezvous keeps its state as a pickle in the store of a `RendezvousBackend`. Whoever can write there
runs code in each launcher that reads it. Here a backend holds JSON instead. torch still gets a pickle, which
this process has just made itself from what it has checked.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from torch.distributed.elastic.rendezvous.api import RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousBackend,
    _NodeDesc,
    _RendezvousState,
)

_VERSION = 1
_MOST_NODES = 1 << 16
_FIELDS = frozenset(
    (
        *("round", "complete", "deadline", "closed"),
        *("participants", "wait_list", "redundancy_list", "last_heartbeats"),
    )
)


class JsonState(RendezvousBackend):
    """A backend of torch's rendezvous around another one, which holds JSON."""

    def __init__(self, backend: RendezvousBackend) -> None:
        """Raises `RendezvousStateError` if this torch's state has other fields than those known here."""
        self._backend = backend
        if unknown := set(vars(_RendezvousState())) ^ _FIELDS:
            raise RendezvousStateError(
                f"this version of torch keeps another state of a rendezvous ({', '.join(sorted(unknown))}):"
                " use --rdzv-backend static, or a version that unicomm is tested with"
            )

    @property
    def name(self) -> str:
        return str(self._backend.name)

    def get_state(self) -> tuple[bytes, Any] | None:
        found = self._backend.get_state()
        return None if found is None else (_pickled(found[0]), found[1])

    def set_state(self, state: bytes, token: Any | None = None) -> tuple[bytes, Any, bool] | None:
        mine = pickle.loads(state)  # from torch in this process, not from a store
        found = self._backend.set_state(encode(mine), token)
        return None if found is None else (_pickled(found[0]), found[1], found[2])


def _pickled(data: bytes) -> bytes:
    return pickle.dumps(decode(data))


def encode(state: _RendezvousState) -> bytes:
    """Returns the JSON of a state. Equal states have equal JSON."""
    return json.dumps(
        {
            "version": _VERSION,
            "round": state.round,
            "complete": state.complete,
            "closed": state.closed,
            "deadline": None if state.deadline is None else state.deadline.isoformat(),
            "participants": [[*_parts(node), rank] for node, rank in sorted(state.participants.items())],
            "wait_list": sorted(map(_parts, state.wait_list)),
            "redundancy_list": sorted(map(_parts, state.redundancy_list)),
            "last_heartbeats": [
                [*_parts(node), when.isoformat()] for node, when in sorted(state.last_heartbeats.items())
            ],
        }
    ).encode()


def decode(data: bytes) -> _RendezvousState:
    """Reads what `encode` has made. Raises `RendezvousStateError` for anything else."""
    try:
        read: Any = json.loads(data)
        if read["version"] != _VERSION:
            raise ValueError("another version")
        state = _RendezvousState()
        state.round = _number(read["round"])
        state.complete, state.closed = _truth(read["complete"]), _truth(read["closed"])
        state.deadline = None if read["deadline"] is None else _time(read["deadline"])
        nodes: Mapping[str, list[list[Any]]] = {name: _list(read[name]) for name in _FIELDS if "_" in name}
        state.participants = {_node(p[:3]): _number(p[3]) for p in _list(read["participants"])}
        state.wait_list = {_node(parts) for parts in nodes["wait_list"]}
        state.redundancy_list = {_node(parts) for parts in nodes["redundancy_list"]}
        state.last_heartbeats = {_node(p[:3]): _time(p[3]) for p in nodes["last_heartbeats"]}
    except (ValueError, TypeError, KeyError, IndexError, RecursionError, OverflowError) as error:
        raise RendezvousStateError(
            "what the store holds as the state of the rendezvous was not written by `unicomm run`"
            f" ({type(error).__name__}): start all hosts with `unicomm run` of one version, none with"
            " torchrun, and give them the job's token, UNICOMM_JOB_TOKEN, so that nobody else writes there"
        ) from error
    return state


def _parts(node: _NodeDesc) -> tuple[str, int, int]:
    return node.addr, node.pid, node.local_id


def _node(parts: Any) -> _NodeDesc:
    address, pid, number = parts
    if not isinstance(address, str):
        raise ValueError("no address")
    return _NodeDesc(address, _number(pid), _number(number))


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError("no number")
    return value


def _truth(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError("neither true nor false")
    return value


def _time(value: Any) -> datetime:
    when = datetime.fromisoformat(value)
    if when.tzinfo is None:
        raise ValueError("a time without a zone")
    return when


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list) or len(value) > _MOST_NODES:
        raise ValueError("no list of hosts")
    return value
