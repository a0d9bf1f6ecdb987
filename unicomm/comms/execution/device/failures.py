"""Who is to blame when an operation on a device does not end, and how the other ranks hear of it.

The library underneath names nobody, and where GPUs write into each other's memory it does not even notice
that a rank has gone. So a rank whose operation takes long says in the store what it waits for, and looks
there for what others know. When its time is up, those are the culprits that have not issued the operation: by
the recorders' rings on this host, by the store for other hosts. What the first rank finds is what all
raise.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from unicomm.comms.backend import UsesStreams
from unicomm.comms.errors import AbortedError, CommError, CommTimeoutError, PeerLostError
from unicomm.comms.execution.engine import Engine
from unicomm.comms.execution.issued import IssuedOperation
from unicomm.comms.failures.daemon_pool import DaemonPool
from unicomm.comms.failures.faults import rank_list
from unicomm.comms.failures.first_cause import GRACE, FirstCause
from unicomm.comms.failures.missing_ranks import dead_ranks, explain, neighbours, progress

_SHARE, _LONGEST = 0.25, 10.0  # of the timeout, and seconds: from then on a rank reports that it waits
_EVERY = 1.0  # seconds between two looks at the store, and more in a large world:
_PER_RANK = 1e-3
_MOST_MESSAGES = 256
_LONG = 0.2  # seconds after which a rank looks whether those of its host are alive ...
_LOOK = 0.1  # ... every so often; who has died may have done its part, which arrives ...
_ARRIVAL = 0.3  # ... within this
_threads = DaemonPool("unicomm-lookout", awaited=True)


class Lookout:
    """That of one communicator. Only the watchdog and whoever drains call it, one at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.heard: CommError | None = None  # what another rank has found
        self._busy = False
        self._next = 0.0
        self._told = b""
        self._published = False
        self._neighbours: dict[int, Path] | None = None  # None: nobody has looked yet
        self._next_look = 0.0
        self._dead_since = float("inf")

    def _first_cause(self) -> FirstCause | None:
        member, size = self._engine.member, self._engine.group.size
        if member.store is None or size == 1:
            return None
        return FirstCause(member.store, member.uid, member.name, member.rank, size)

    def waiting(self, op: IssuedOperation, now: float) -> None:
        """The oldest operation is not over. Returns at once."""
        begun = op.deadline - op.timeout
        if now < begun + min(_SHARE * op.timeout, _LONGEST) or now < self._next or self._busy:
            return
        first_cause = self._first_cause()
        if first_cause is None:
            self._next = float("inf")
            return
        self._busy = True
        self._next = now + _EVERY + _PER_RANK * self._engine.group.size
        state: dict[str, Any] = {"seq": op.seq, "reached": op.reached}
        if op.messages:
            state = {"messages": op.messages[:_MOST_MESSAGES]}
        text = json.dumps(state).encode()

        def tell() -> None:
            try:
                if text != self._told:
                    first_cause.report(text)
                    self._told = text
                self.heard = first_cause.published(CommError(""), 0.0)
            finally:
                self._busy = False

        _threads.run(tell)

    def lost(self, op: IssuedOperation, now: float) -> PeerLostError | None:
        """The device waits in the oldest operation, for ranks of this host whose process is gone. Returns at
        once. The library need not notice, where GPUs write into each other's memory.
        """
        if not op.reached or now < max(self._next_look, op.deadline - op.timeout + _LONG):
            return None
        self._next_look = now + _LOOK
        if self._neighbours is None:
            self._neighbours = {}
            _threads.run(self._meet_neighbours)
            return None
        asked = {peer for _, peer, _ in op.messages} or self._neighbours.keys()
        dead = [rank for rank in dead_ranks(self._neighbours) if rank in asked]
        if not dead:
            self._dead_since = float("inf")
            return None
        self._dead_since = min(self._dead_since, now)
        if now < self._dead_since + _ARRIVAL:
            return None
        error = PeerLostError(
            f"{rank_list(dead, 'is')} gone (process ended), and the device waits in {op.name}",
            hint="look at that rank's own output and exit code; its last operations: `unicomm trace show`",
        )
        error.sort_culprits(dead, (), ())
        return error

    def _meet_neighbours(self) -> None:
        member = self._engine.member
        found = neighbours(member.uid)
        found.pop(member.rank, None)
        self._neighbours = found

    def explained(self, error: CommError, op: IssuedOperation) -> CommError:
        """The error to raise for one that the watchdog found: with culprits, or what another rank found."""
        if self.heard is not None:
            return self._settled(self.heard)
        first_cause = self._first_cause()
        lost = isinstance(error, PeerLostError)
        timeout = isinstance(error, CommTimeoutError) and not error.explained
        told = None
        if first_cause is not None and (lost or timeout):
            # Where somebody's connection is gone: who has ended it is about to say why.
            told = first_cause.published(error, GRACE if lost and not error.culprits else 0.0)
        if told is not None:
            return self._settled(told)
        if timeout:
            error = self._overdue(error, op, first_cause)
            backend = self._engine.backend
            if isinstance(backend, UsesStreams):
                backend.explain(error)
        elif lost and not error.culprits:
            error.sort_culprits(dead_ranks(neighbours(self._engine.member.uid)), (), ())
            if error.culprits:
                error.message = f"{rank_list(error.culprits, 'is')} gone: {error.message}"
        if first_cause is not None:
            mine = self._for_all(error)
            told = first_cause.publish(mine)
            error = error if told.message == mine.message else told
        return self._settled(error)

    def ended(self, error: CommError) -> None:
        """The communicator is broken; the other ranks shall know why. Returns at once."""
        first_cause = None if self._published else self._first_cause()
        if first_cause is None:
            return
        self._published = True
        _threads.run(partial(first_cause.publish, self._for_all(error)))

    def _settled(self, error: CommError) -> CommError:
        self._published = True
        if isinstance(error, CommTimeoutError):
            error.explained = True
        return error

    def _for_all(self, error: CommError) -> CommError:
        """As the other ranks have to read it."""
        rank = self._engine.rank
        if isinstance(error, AbortedError) and not set(error.culprits) - {rank}:
            did = "aborted the communicator" if error.culprits else error.message
            return AbortedError(f"rank {rank} {did}", culprits=(rank,), hint=error.hint)
        if error.culprits or isinstance(error, CommTimeoutError):
            return error
        said = error.again(f"rank {rank}: {error.message}")
        said.culprits = (rank,)
        return said

    def _overdue(
        self, error: CommError, op: IssuedOperation, first_cause: FirstCause | None
    ) -> CommTimeoutError:
        engine = self._engine
        me, uid, messages = engine.rank, engine.member.uid, op.messages
        peers = {peer for _, peer, _ in messages} if messages else set(range(engine.group.size)) - {me}
        found = progress(uid, me, op.seq, messages)
        found[me] = 2 if op.reached else 1
        elsewhere = sorted(peers - found.keys())
        if elsewhere and first_cause is not None and (said := first_cause.reports(elsewhere)) is not None:
            found |= {rank: _said(said.get(rank), me, op) for rank in elsewhere}
        absent = sorted(rank for rank in peers if found.get(rank) == 0)
        stuck = sorted(rank for rank in peers | {me} if found.get(rank) == 1)
        unknown = sorted(peers - found.keys())
        limit = f"{op.timeout:g} s"
        if absent:
            text = f"timed out after {limit}: {rank_list(absent)} had not arrived"
        elif unknown:
            text = f"timed out on the device after {limit}; nothing is known of {rank_list(unknown)}"
        elif stuck and not messages:
            where = f"the device of {rank_list(stuck)}"
            text = f"timed out after {limit}: all ranks had issued it, but {where} had not come to it"
        else:
            text = f"timed out after {limit}: all ranks are in it, and it was not finished on the device"
        late = CommTimeoutError(text, culprits=absent or (stuck if not unknown else ()), hint=error.hint)
        if stuck and not absent and not unknown and not messages:
            late.hint = "a kernel before it still runs there, or waits for another stream or communicator"
            late.sort_culprits((), (), stuck)
        explain(late, uid)
        return late


def _said(text: bytes | None, me: int, op: IssuedOperation) -> int:
    """What a rank's report means for an operation of this one: 0 not in it, 1 issued, 2 started."""
    if text is None:
        return 0
    try:
        state = json.loads(text)
        if op.messages:
            theirs = [(bool(send), number) for send, peer, number in state.get("messages", ()) if peer == me]
            wanted = [(not send, number) for send, _, number in op.messages]
            return 2 if any(s == w and n >= m for s, n in theirs for w, m in wanted) else 0
        seq = int(state.get("seq", 0))
    except (ValueError, TypeError, AttributeError):
        return 0
    return 0 if seq < op.seq else 2 if seq > op.seq or state.get("reached") else 1
