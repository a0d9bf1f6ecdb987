"""How the ranks of a rehearsal meet: each has a store of its own, and torch's ways to a store lead there."""

from __future__ import annotations

import inspect
import os
import pickle
from collections.abc import Callable, Iterator, MutableSequence
from datetime import timedelta
from functools import wraps
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch
import torch.distributed as dist

from unicomm.c10d.compat import HashStore, rendezvous_handlers
from unicomm.comms import objects

from .details import Details
from .values.notes import OwnObjects

_SCHEMES = ("env", "tcp", "file")
_PATIENCE = timedelta(seconds=5)


def install(own_objects: bool, details: Details) -> None:
    """Has `init_process_group` meet in a store of this process, and notes the calls of `new_group`.

    `own_objects`: whether objects that no other rank has noted are the own rank's.
    """
    store = HashStore()
    store.set_timeout(_PATIENCE)  # a key that another rank sets never comes

    def rendezvous(url: str, timeout: timedelta = _PATIENCE, **more: Any) -> Iterator[Any]:
        asked = {name: values[0] for name, values in parse_qs(urlparse(url).query).items()}
        rank = int(asked.get("rank", os.environ["RANK"]))
        yield store, rank, int(asked.get("world_size", os.environ["WORLD_SIZE"]))
        raise RuntimeError("the ranks of a rehearsal do not meet again")

    rendezvous_handlers().update(dict.fromkeys(_SCHEMES, rendezvous))
    dist.new_group = dist.distributed_c10d.new_group = _noted(dist.new_group, details)
    if not own_objects:
        return
    dist.broadcast_object_list = _own_list(dist.broadcast_object_list, _pickled)
    dist.recv_object_list = _own_list(dist.recv_object_list, _pickled)
    objects.broadcast_object_list = _own_list(objects.broadcast_object_list, _saved)
    objects.recv_object_list = _own_list(objects.recv_object_list, _saved_alone)


def _noted(new_group: Callable[..., Any], details: Details) -> Callable[..., Any]:
    """Wraps `new_group`. Calls that only members have to make are not noted."""
    signature = inspect.signature(new_group)

    @wraps(new_group)
    def call(*args: Any, **named: Any) -> Any:
        given = signature.bind(*args, **named)
        given.apply_defaults()
        if not given.arguments["use_local_synchronization"]:
            ranks = given.arguments["ranks"]
            ranks = given.arguments["ranks"] = None if ranks is None else list(ranks)  # may be an iterator
            details.add_new_group(sorted(range(dist.get_world_size()) if ranks is None else ranks))
        return new_group(*given.args, **given.kwargs)

    return call


def _own_list(function: Callable[..., Any], encode: Callable[..., list[bytes]]) -> Callable[..., Any]:
    """Wraps an object collective that replaces the elements of a list by those received.

    If no value from the sender is recorded, it receives this rank's own elements, so the list stays as it is.
    """

    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        # torch's functions begin with the list, ours with the communicator.
        found = next((value for value in (*args, *named.values()) if isinstance(value, MutableSequence)), [])
        try:
            own = encode(found, named.get("codec", "safe"))
        except Exception:  # an object that cannot travel; the function itself says so
            own = []
        with OwnObjects(*own):
            return function(*args, **named)

    return call


def _int64(*numbers: int) -> bytes:
    return torch.tensor(numbers, dtype=torch.int64).numpy().tobytes()


def _pickled(values: MutableSequence[Any], _: str) -> list[bytes]:
    each = [pickle.dumps(value) for value in values]
    return [_int64(*map(len, each)), b"".join(each)]


def _saved(values: MutableSequence[Any], codec: str) -> list[bytes]:
    data = objects.encoded(list(values), codec)
    return [_int64(len(data), len(values)), data]


def _saved_alone(values: MutableSequence[Any], codec: str) -> list[bytes]:
    data = objects.encoded(list(values), codec)
    return [_int64(len(data)), data]
