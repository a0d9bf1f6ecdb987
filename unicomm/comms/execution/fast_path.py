"""The fast path: an executor that may take a plain operation whole, its interface and its absence."""

from __future__ import annotations

import inspect
from typing import Any

from unicomm import _core
from unicomm.comms.operations.table import OPERATIONS


class NoFastPath:
    """The fast path of a backend that has none, and the interface of a fast path.

    Its methods take the arguments of the communicator's methods of the same name. They return False, before
    anything has happened, when the operation needs the general path; the Work when the operation has
    completed; and (sequence number, fault) when it failed, from which the backend's `raise_fault` makes the
    error. While it is blocked, each method returns False. The fast path also numbers the collectives and
    messages of the general path.
    """

    def __init__(self) -> None:
        self.seq = 0
        self.timeout = 0.0
        self._pairs: dict[tuple[int, bool], int] = {}

    def next_seq(self) -> int:
        self.seq += 1
        return self.seq

    def pair_seq(self, peer: int, send: bool) -> int:
        return self._pairs.get((peer, send), 0)

    def next_pair_seq(self, peer: int, send: bool) -> int:
        self._pairs[peer, send] = seq = self.pair_seq(peer, send) + 1
        return seq

    def block(self) -> None:
        pass

    def unblock(self) -> None:
        pass

    def running(self, here: bool = False) -> list[tuple[int, int]]:
        """Returns the operations that run now, as (code, number); with `here` only those of this thread."""
        return []

    def _never(self, *_: object) -> Any:
        return False

    send = recv = batch = all_to_all_single = _never
    all_reduce = broadcast = barrier = all_gather_single = reduce_scatter_single = _never


#: The methods of a fast path, named like the communicator's.
SHORT = (
    *("send", "recv", "broadcast", "all_reduce", "all_gather_single", "reduce_scatter_single"),
    *("all_to_all_single", "barrier"),
)


def shorten(communicator: type) -> None:
    """Puts a native method before each method of the class that has a fast path.

    The native one calls the fast path of the native core with no Python code in between. If that does not
    take the call, it calls the method written in Python.
    """
    for name in SHORT:
        method = vars(communicator)[name]
        _, *parameters = inspect.signature(method).parameters.values()
        defaults = tuple(p.default for p in parameters if p.default is not p.empty)
        names = tuple(p.name for p in parameters)
        setattr(communicator, name, _core.short_method(method, OPERATIONS[name].code, names, defaults))
