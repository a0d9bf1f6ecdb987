"""A message library like Gloo, over the scheduler, and the backend that uses it.

`SimulatedBackend` is unicomm's own Gloo backend, with its deadlines, fault channel, exchange and waiting
threads; only the group that Gloo would provide is replaced, and collectives are composed.
"""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import Any

import torch

from unicomm.backends.gloo.backend import GlooBackend
from unicomm.backends.out_of_band import checks_signatures, connect_all
from unicomm.comms.backend import Setup

from .primitives import current, current_process
from .scheduler import Process, Task

_ENDED = "Connection closed by peer [simulated]"


class Fabric:
    """What the groups of one run have in common: the groups by the uid of their communicator."""

    def __init__(self) -> None:
        self.groups: dict[str, dict[int, Group]] = {}
        self.slowest = current().rng.choice((0.0002, 0.002, 0.03))

    def later(self, action: Any) -> None:
        scheduler = current()
        scheduler.call_at(scheduler.now + scheduler.rng.random() * self.slowest, action)


_fabric: list[Fabric] = []


def use(fabric: Fabric | None) -> None:
    _fabric[:] = [] if fabric is None else [fabric]


class Work:
    """A send or receive. `peer` is -1 for a receive from any rank."""

    def __init__(self, group: Group, send: bool, tensor: torch.Tensor, peer: int, tag: int) -> None:
        self.send, self.tensor, self.peer, self.tag = send, tensor, peer, tag
        self._group = group
        self._over = False
        self._error = ""
        self._waiters: list[Task] = []

    def finish(self, error: str = "") -> None:
        if not self._over:
            self._over, self._error = True, error
            for task in self._waiters:
                current().wake(task)

    def is_completed(self) -> bool:
        return self._over

    def wait(self, timeout: timedelta) -> bool:
        current().pause("library")
        if not self._over:
            self._waiters.append(current().current)  # type: ignore[arg-type]
            if not current().block("library", current().now + timeout.total_seconds()):
                raise RuntimeError("Timed out waiting for the library")
        if self._error:
            raise RuntimeError(self._error)
        return True

    def _source_rank(self) -> int:
        return self.peer


class Group:
    """One rank's end. Messages of two ranks and a tag keep their order; a send waits for its receive."""

    def __init__(self, uid: str, rank: int) -> None:
        self.rank = rank
        self.process: Process = current_process()
        self._members = _fabric[0].groups.setdefault(uid, {})
        self._members[rank] = self
        self._ended = False
        self._lost: set[int] = set()
        self._arrived: list[Work] = []  # sends of other ranks, to this one
        self._receives: list[Work] = []
        self._sends: list[Work] = []
        self.process.at_end.append(self.end)

    def set_timeout(self, timeout: timedelta) -> None:
        pass

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        work = self._new(True, tensors[0], peer, tag)
        self._sends.append(work)
        _fabric[0].later(lambda: self._deliver(work))
        return work

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        work = self._new(False, tensors[0], peer, tag)
        self._receives.append(work)
        self._match()
        return work

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> Work:
        return self.recv(tensors, -1, tag)

    def _new(self, send: bool, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        current().pause("library")
        if self._ended or peer in self._lost:
            raise RuntimeError(_ENDED)
        return Work(self, send, tensor, peer, tag)

    def _deliver(self, work: Work) -> None:
        to = self._members.get(work.peer)
        if to is None:  # its rank has not come to the end of connecting
            _fabric[0].later(lambda: self._deliver(work))
        elif not self._ended and not to._ended:
            # Messages of one pair and tag in the order of the calls, whatever their delays.
            alike = [w for w in self._sends if w.peer == work.peer and w.tag == work.tag]
            to._arrived.append(next(w for w in alike if w not in to._arrived))
            to._match()

    def _match(self) -> None:
        for receive in list(self._receives):
            for sent in self._arrived:
                if sent.tag == receive.tag and receive.peer in (sent._group.rank, -1):
                    self._arrived.remove(sent)
                    self._receives.remove(receive)
                    sent._group._sends.remove(sent)
                    self._move(sent, receive)
                    break

    def _move(self, sent: Work, receive: Work) -> None:
        data = sent.tensor.clone()

        def arrive() -> None:
            if self._ended or sent._group._ended:
                receive.finish(_ENDED)
                sent.finish(_ENDED)
                return
            receive.tensor.copy_(data)
            receive.peer = sent._group.rank
            receive.finish()
            _fabric[0].later(sent.finish)

        _fabric[0].later(arrive)

    def end(self) -> None:
        """Ends all connections of this rank, as closing them does. Called by any thread."""
        if self._ended or current().closing:
            return
        self._ended = True
        for work in [*self._sends, *self._receives]:
            work.finish(_ENDED)
        for member in self._members.values():
            if member is not self:
                _fabric[0].later(lambda member=member: member._lose(self.rank))

    def _lose(self, rank: int) -> None:
        self._lost.add(rank)
        self._arrived = [work for work in self._arrived if work._group.rank != rank]
        for works in (self._sends, self._receives):
            # A receive from any rank goes on: another rank may send.
            for work in [work for work in works if work.peer == rank]:
                works.remove(work)
                work.finish(_ENDED)


class SimulatedBackend(GlooBackend):
    name = library = "simulated"
    capabilities = dataclasses.replace(GlooBackend.capabilities, operations=frozenset())

    @classmethod
    def connect(cls, setup: Setup) -> SimulatedBackend:
        if setup.size == 1:
            return cls(None, setup, None, [{}])
        each = 2 if checks_signatures(setup) else 1
        sockets = connect_all(setup, "127.0.0.1", each, "simulated")
        group = Group(setup.rendezvous.uid, setup.rank)
        return cls(group, setup, group, sockets)  # type: ignore[arg-type]

    @classmethod
    def reachable_at(cls, hints: Any) -> str:
        return ""
