"""The communicator of ranks on several hosts.

Each collective begins with a comparison of what the ranks call. One rank of each host, its leader, exchanges
that with the leaders of the other hosts (collectives.py). Over a transport, each rank may exchange it with
the ranks that have its number on the other hosts (csrc/hosts/fast.hpp).
Messages between two ranks go through memory if they share it, else straight from one to the other.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch

from unicomm import _core
from unicomm._core import FaultCode
from unicomm.backends.gloo.backend import GlooBackend
from unicomm.backends.out_of_band import Awaited
from unicomm.backends.shm import ShmBackend
from unicomm.backends.tcp.backend import TcpBackend
from unicomm.backends.transport import TransportBackend
from unicomm.backends.ucx.backend import UcxBackend
from unicomm.comms.backend import (
    Backend,
    Capabilities,
    ChecksPeers,
    Exchange,
    ExtendsDeadlines,
    HasFastPath,
    OpensExchange,
    ReportsMemory,
    RunsCollectives,
    Setup,
    SurvivesFork,
    Unconnected,
)
from unicomm.comms.errors import (
    AbortedError,
    BackendError,
    CommError,
    CommTimeoutError,
    DeadlockError,
    InvalidArgumentError,
    MismatchError,
    NotReadyError,
    PeerLostError,
    UnsupportedError,
)
from unicomm.comms.execution.composed import completion
from unicomm.comms.execution.composed.exchanges import Trade, Traffic, overlapping
from unicomm.comms.failures.faults import Fault, aborted_by, error_of, interrupts, renumber_error
from unicomm.comms.failures.first_cause import GRACE, FirstCause
from unicomm.comms.operations.call import Call, Message
from unicomm.comms.operations.table import OPERATIONS

from . import collectives
from .first_step import INLINE, SLOT
from .layout import Layout
from .messages import BothExchange, beside
from .supervisor import Supervisor

# Seconds beyond an operation's timeout that a rank waits for other hosts. If ranks of another host wait for
# each other, these know which rank is missing, and report it first. Ranks that wait for a rank of their own
# host that waits for other hosts add `_FOR_OTHERS`.
_SLACK = 1.0
_FAR_VERDICT = 3.0  # seconds in which ranks that wait for another host find out which rank is missing
_FOR_OTHERS = 2 * _SLACK + GRACE + 5.0
#: What carries messages between hosts.
Far = GlooBackend | TransportBackend
_HARMLESS = (MismatchError, InvalidArgumentError, UnsupportedError, NotReadyError)


class HostsBackend(
    Backend,
    RunsCollectives,
    OpensExchange,
    HasFastPath,
    ExtendsDeadlines,
    ReportsMemory,
    ChecksPeers,
    SurvivesFork,
):
    """The backend that `auto` makes for ranks on several hosts."""

    name = "hosts"
    protocol_version = 1
    capabilities = Capabilities(
        device_types=frozenset({"cpu"}),
        operations=collectives.OPERATIONS_HERE,
        reduce_dtypes=ShmBackend.capabilities.reduce_dtypes,
        reduce_ops=ShmBackend.capabilities.reduce_ops,
        checks_mismatch=True,
        encodes=True,
    )

    def __init__(
        self,
        layout: Layout,
        near: ShmBackend,
        far: Far,
        leaders: GlooBackend | None,
        first_cause: FirstCause,
        crowded: bool,
    ) -> None:
        """`leaders`: the communicator of the hosts' leaders, only on these and only over Gloo.
        `crowded`: whether some host has more ranks than cores."""
        self.layout = layout
        self._near, self._far, self._leaders, self._first_cause = near, far, leaders, first_cause
        self._parts = [part for part in (near, leaders, far) if part is not None]
        self._far_group = completion.Group(far, layout.rank, layout.size)
        self._straight_group = completion.Group(_Straight(self), layout.rank, layout.size, layout.members)
        several = any(len(ranks) > 1 for h, ranks in enumerate(layout.hosts) if h != layout.host)
        self.slack = _SLACK if several else 0.0
        self.inline = INLINE
        self._limit = 0.0  # seconds that the operation may take
        # Returns the messages within the host that Python code runs.
        self._near_messages: Callable[[], list[Awaited]] = list
        far.channel.beside = self._beside
        far.channel.call_when_slow(self._wait_longer)
        self._supervisor: Supervisor | None = None  # of the fast path, over a transport only
        if isinstance(far, TransportBackend):
            self.inline = _core.hosts_most_in_slot(len(layout.hosts))
            self._supervisor = Supervisor(self, near.group, far, crowded, _FOR_OTHERS)

    @classmethod
    def connect(cls, setup: Setup) -> NoReturn:
        raise AssertionError("auto makes it, which knows the ranks of each host")

    def run(self, call: Call) -> None:
        supervisor, self._limit = self._supervisor, call.timeout
        if supervisor is not None and supervisor.runs(call):
            supervisor.run(call)
            return
        self._wait_idle()
        counts = self._far.channel.counts
        counts.begin_whole(call.operation.code)
        try:
            collectives.run(self, call)
        finally:
            counts.end_whole()

    # --- the fast path -----------------------------------------------------------------------------------

    def fast_path(self, recorder: Any, index: int, timeout: float) -> Any:
        return None if self._supervisor is None else self._supervisor.fast_path(recorder, index, timeout)

    def raise_fault(self, fault: Any, timeout: float) -> NoReturn:
        assert self._supervisor is not None
        self._limit = timeout
        self._supervisor.raise_fault(fault, timeout)

    def _wait_idle(self) -> None:
        """Waits until another thread's operation on the fast path is over."""
        if self._supervisor is not None:
            self._supervisor.native.wait_idle()

    # --- what the collectives run on: `Links` -------------------------------------------------------------

    def agree(self, call: Call) -> bool:
        if self._supervisor is None:
            return False
        self._supervisor.agree(call)
        return True

    def local(self, call: Call, seconds: float, late: bool = False) -> None:
        call.timeout = seconds + (_FOR_OTHERS if late else 0.0)
        try:
            self._near.run(call)
        except CommError as error:
            raise self.near_failed(error, late) from error

    def messages(self, messages: Sequence[Message], seconds: float) -> None:
        self._exchange(messages, seconds + self.slack, True)

    @contextlib.contextmanager
    def overlapping(self, call: Call, trade: Trade) -> Iterator[Traffic]:
        peers: set[int] = set()

        def seconds() -> float:
            return call.remaining() + self.slack

        def noted(ins: list[torch.Tensor], outs: list[torch.Tensor]) -> list[Message]:
            messages = trade(ins, outs)
            peers.update(message.peer for message in messages)
            return messages

        try:
            with overlapping(self._far, noted, seconds, call.timeout) as traffic:
                yield traffic
        except CommError as error:
            raise self._late_far_failed(error, peers) from error

    def all_gather(self, slot: torch.Tensor, seconds: float) -> list[torch.Tensor]:
        mine = slot.numpy().tobytes()
        if self._supervisor is not None:
            slots = self._supervisor.swap(mine, seconds + self.slack)
        else:
            assert self._leaders is not None
            # Between the leaders this counts as a barrier.
            call = Call(OPERATIONS["barrier"], timeout=seconds + self.slack)
            call.start_clock()
            try:
                slots = self._leaders.all_gather_bytes(call, mine.ljust(SLOT, b"\0"))
            except CommError as error:
                raise self.leaders_failed(error) from error
        return [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in slots]

    def straight(self, call: Call) -> None:
        if isinstance(self._far, TransportBackend) and call.wire is None:
            # A transport moves the data within a host as well, in this thread; `_straight_group` needs a
            # second one. With a wire format the ranks of a host get data as they are.
            self._far_collective(call, lambda: completion.run(self._far_group, call))
            return
        if call.operation.splits or call.name == "all_to_all":
            # Signatures do not say whether the sizes of all pairs fit: far compares them, or the messages do.
            self._far_collective(call, lambda: None)
        completion.run(self._straight_group, call)

    def _far_collective(self, call: Call, run: Callable[[], None]) -> None:
        try:
            self._far.collective(call, run)
        except CommError as error:
            raise self.far_failed(error, self.layout.elsewhere) from error

    # --- messages ----------------------------------------------------------------------------------------

    def _place(self, message: Message) -> tuple[bool, Message]:
        """Returns whether a message leaves the host, and the message as that part's backend takes it."""
        if self.layout.host_of[message.peer] == self.layout.host:
            return False, message._replace(peer=self.layout.local_of[message.peer])
        return True, completion.as_sent(self._far_group, message)

    def exchange(self, messages: Sequence[Message], timeout: float) -> None:
        self._wait_idle()
        self._limit = timeout
        self._exchange(messages, timeout, False)

    def _exchange(self, messages: Sequence[Message], seconds: float, late: bool) -> None:
        placed = [self._place(message) for message in messages]
        near = [message for is_far, message in placed if not is_far]
        far = [message for is_far, message in placed if is_far]

        def run_far() -> None:
            try:
                self._far.exchange(far, seconds)
            except CommError as error:
                failed = self._late_far_failed if late else self.far_failed
                raise failed(error, {message.peer for message in far}) from error

        awaits = [
            self._far.awaited(message)
            for message, (is_far, _) in zip(messages, placed, strict=True)
            if not is_far
        ]

        def run_near() -> None:
            self._near_messages = awaits.copy
            try:
                self._near.exchange(near, seconds + (_FOR_OTHERS if late else 0.0))
            except CommError as error:
                raise self.near_failed(error, late) from error
            finally:
                self._near_messages = list  # none

        if not near:
            run_far()
        elif not far:
            run_near()
        else:
            beside(run_far, run_near, self._end)

    def open_exchange(self) -> Exchange:
        self._wait_idle()
        return BothExchange(
            (self._near.open_exchange, lambda error, _: self.near_failed(error, False)),
            (self._far.open_exchange, self.far_failed),
            self._place,
            self._set_limit,
            self._far.awaited,
            self._set_near_messages,
            self._far.channel.patience,
        )

    def _set_near_messages(self, messages: Callable[[], list[Awaited]]) -> None:
        self._near_messages = messages

    def _beside(self) -> list[Awaited]:
        """The messages within the host that this rank waits for, as others hear that ask where it is."""
        native = () if self._supervisor is None else self._supervisor.native.awaited_near
        return [*self._near_messages(), *(Awaited(*message) for message in native)]

    def _set_limit(self, seconds: float) -> None:
        self._limit = seconds

    # --- failures ----------------------------------------------------------------------------------------

    def near_failed(self, error: CommError, late: bool) -> CommError:
        if (circle := self._circle(error)) is not None:
            return circle
        # A rank that waits for other hosts is not to blame for missing data of theirs.
        awaited = [r for r in range(self.layout.size) if r != self.layout.rank] if late else []
        if not late and _is_timeout(error) and error.culprits:
            members = self.layout.members
            named = [members[r] for r in error.culprits if r < len(members)]
            # Their own deadline passes about now; then they report which rank is missing.
            if (
                not self._far.channel.elsewhere(named)
                and (told := self._first_cause.published(error, _FAR_VERDICT)) is not None
            ):
                self._end()
                return told
        return self._failed(error, self.layout.members, not late, awaited=awaited)

    def _circle(self, error: CommError) -> CommError | None:
        """Returns the communicator's error if ranks wait for each other.

        Memory knows a circle within a host before any deadline, but by the parts of collectives.
        """
        if not (isinstance(error, CommTimeoutError) and self._far.channel.circle(self._limit)):
            return None
        found = self._far.fault()
        assert found is not None
        return self._failed(found, range(self.layout.size), True)

    def leaders_failed(self, error: CommError) -> CommError:
        if (circle := self._circle(error)) is not None:
            return circle
        others = [r for r in self.layout.leaders if r != self.layout.rank]
        return self._failed(error, self.layout.leaders, False, others, self.layout.elsewhere)

    def far_failed(self, error: CommError, peers: Collection[int]) -> CommError:
        return self._failed(error, range(self.layout.size), bool(error.culprits), list(peers), list(peers))

    def _late_far_failed(self, error: CommError, peers: Collection[int]) -> CommError:
        # In a collective, a rank that waits for another one in it is not to blame.
        if error.fault is not None and (error.dead or error.absent):
            error.fault = replace(error.fault, late=())
        return self.far_failed(error, peers)

    def _failed(
        self,
        error: CommError,
        ranks: Sequence[int],
        first_hand: bool,
        linked: Sequence[int] = (),
        awaited: Sequence[int] = (),
    ) -> CommError:
        """Returns the communicator's error for an error of a part; ends all parts, unless it is harmless.

        Args:
            ranks: the part's ranks, in its order.
            first_hand: whether this rank knows that the culprits that the part names are the cause.
            linked: ranks whose connection may be gone. awaited: ranks that may be missing.
        """
        if interrupts(error):
            return error  # of a signal handler; whoever ran the operation breaks the communicator
        error = renumber_error(error, ranks)
        # A message between hosts that does not fit its receive breaks the part between the hosts. Without the
        # end of the others, collectives would go on over Gloo's leaders, and all else would raise.
        if isinstance(error, _HARMLESS) and not (isinstance(error, MismatchError) and self._far.fault()):
            return error
        self._first_cause.report()
        if isinstance(error, PeerLostError):
            first_hand = bool(error.culprits)
            if not first_hand and len(linked) == 1 and self._first_cause.unreported(linked):
                error, first_hand = self._blaming(error, linked), True
        elif isinstance(error, AbortedError):
            first_hand = False
        elif not _is_timeout(error):
            first_hand = True
        elif not first_hand and len(awaited) == 1:
            error, first_hand = self._blaming(error, awaited), True
        elif first_hand and error.culprits:
            error = self._blaming(error, error.culprits)
        if first_hand:
            if isinstance(error, BackendError) and error.culprits == (self.layout.rank,):
                error = error.again(f"on rank {self.layout.rank}: {error.message}")  # all raise the same
            error = self._first_cause.publish(error)
            self._end()
            return error
        elsewhere: list[int] = []
        if isinstance(error, CommTimeoutError):
            elsewhere = self._far.channel.elsewhere(
                awaited
            )  # before the end of the parts makes them fail too
        self._end()
        aborted = isinstance(error, AbortedError)  # by a rank that is about to report the cause
        if (known := self._first_cause.published(error, 2 * GRACE if aborted else GRACE)) is not None:
            return known
        if aborted and (cause := self._far.fault()) is not None and not self._is_own_abort(cause):
            # Another rank ended this part because of it, and the store cannot tell.
            return self._first_cause.publish(cause)
        suspects = linked if isinstance(error, PeerLostError) else awaited
        if not aborted and (culprits := self._first_cause.unreported(suspects)):
            error = self._blaming(error, [r for r in culprits if r in elsewhere] or culprits)
        return self._first_cause.publish(error)

    def _is_own_abort(self, error: CommError) -> bool:
        return isinstance(error, AbortedError) and error.culprits == (self.layout.rank,)

    def _blaming(self, error: CommError, culprits: Sequence[int]) -> CommError:
        if isinstance(error, CommTimeoutError):
            return error_of(Fault(FaultCode.TIMEOUT, culprits=tuple(culprits), timeout=self._limit))
        return error_of(Fault(FaultCode.PEER_LOST, culprits=tuple(culprits), detail=error.message))

    def _end(self) -> None:
        """Ends all parts, so that no rank waits in vain."""
        for part in self._parts:
            part.abort()

    def check_peers(self, ranks: Sequence[int]) -> None:
        layout = self.layout
        try:
            self._near.check_peers([layout.local_of[r] for r in ranks if layout.host_of[r] == layout.host])
        except CommError as error:
            raise self.near_failed(error, False) from error
        try:
            self._far.check_peers(ranks)
        except CommError as error:
            raise self.far_failed(error, ranks) from error

    def left(self, ranks: Sequence[int]) -> list[int]:
        return self._far.left(ranks)

    def expect_slow(self, name: str, seconds: float) -> None:
        self._far.expect_slow(name, seconds)  # and the other parts by `_wait_longer`

    def _wait_longer(self) -> None:
        """Has this rank wait in its other parts, too, for the ranks of any host that have asked for it."""
        seconds = max(0.0, self._far.channel.patience() - time.monotonic())
        self._near.expect_slow("a rank of the job", seconds)
        if self._leaders is not None:  # of which each hears the same
            self._leaders.channel.expect_slow("a rank of the job", seconds, tell=False)

    def abort(self) -> None:
        rank = self.layout.rank
        self._first_cause.publish(aborted_by(rank))
        self._end()

    def close(self) -> None:
        if self._supervisor is not None:
            self._supervisor.native.close()
        for part in self._parts:
            part.close()

    def forget(self) -> None:
        for part in self._parts:
            if isinstance(part, SurvivesFork):
                part.forget()

    @classmethod
    def version(cls) -> str:
        return f"shm: {ShmBackend.version()}; gloo: {GlooBackend.version()}"

    def memory(self) -> dict[str, int]:
        held: dict[str, int] = {}
        for part in self._parts:
            for what, size in (part.memory() if isinstance(part, ReportsMemory) else {}).items():
                held[what] = held.get(what, 0) + size
        return held


class HostsOverTcp(HostsBackend):
    """The same with TCP between hosts."""

    @classmethod
    def version(cls) -> str:
        return f"shm: {ShmBackend.version()}; tcp: {TcpBackend.version()}"


class HostsOverUcx(HostsBackend):
    """The same with UCX between hosts."""

    @classmethod
    def version(cls) -> str:
        return f"shm: {ShmBackend.version()}; ucx: {UcxBackend.version()}"


def over(far: Far) -> type[HostsBackend]:
    """Returns the class of a communicator with this one between hosts."""
    if isinstance(far, TcpBackend):
        return HostsOverTcp
    return HostsOverUcx if isinstance(far, UcxBackend) else HostsBackend


class _Straight(Unconnected):
    """The messages of all ranks as a backend, for collectives composed of them."""

    name = HostsBackend.name
    capabilities = Capabilities(device_types=frozenset({"cpu"}), bytes_only=True)

    def __init__(self, hosts: HostsBackend) -> None:
        self._hosts = hosts
        far = hosts._far.capabilities
        self.capabilities = replace(
            type(self).capabilities, empty_parts=far.empty_parts, checks_mismatch=far.checks_mismatch
        )

    def exchange(self, messages: Sequence[Message], timeout: float) -> None:
        self._hosts.messages(messages, timeout)


def _is_timeout(error: CommError) -> bool:
    """Whether a deadline has passed. A deadlock is known before, and for certain."""
    return isinstance(error, CommTimeoutError) and not isinstance(error, DeadlockError)
