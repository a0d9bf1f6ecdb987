"""What a native fast path offers, and what stands in its place."""

from __future__ import annotations

from typing import Any


class NoFastPath:
    """Stands where a backend has no native fast path, and says what one has to offer.

    A fast path's methods take the arguments of the communicator's methods of the same name. They return
    False when the call is not for them, before anything happened; the Work when it is done; else the sequence
    number and what the backend's `raise_fault` makes an error of. `all_reduce_with` takes a process group's
    arguments, a list of tensors and torch's options, and returns True in place of the Work. A fast path that
    is blocked answers False. It numbers collectives and messages for the general path too.
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

    def _never(self, *_: object) -> Any:
        return False

    send = recv = all_to_all_single = _never
    all_reduce = all_reduce_with = broadcast = barrier = all_gather_single = reduce_scatter_single = _never
