"""What a backend is: the base class to derive from, and its capabilities as data.

A backend moves validated buffers and nothing else. The least it can do is `exchange`, several sends and
receives together; every other operation that it does not name in its capabilities is composed from that
in completion.py. To add one, derive from `Backend`, then `unicomm.register_backend(name, cls)` or the
entry-point group `unicomm.backends`; `unicomm.testing.conformance` holds the suite that it has to pass.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn

import torch
from torch._C._distributed_c10d import Store

from unicomm.comms.execution.streams import Streams
from unicomm.comms.membership.rendezvous import Rendezvous
from unicomm.comms.operations.call import Call, Message
from unicomm.comms.operations.reduction import RedOpType, ReduceOp

from .errors import CommError, UnsupportedError
from .options import Hint


@dataclass(frozen=True)
class Capabilities:
    """What a backend does by itself.

    Attributes:
        device_types: of the tensors that it takes.
        operations: names of the collectives that `run` does; the rest is composed from `exchange`.
        reduce_dtypes, reduce_ops: what its reducing collectives do, and `reductions`: single combinations
            besides; all others are composed.
        bytes_only: give it data to move as uint8, whatever the element type.
        checks_mismatch: every collective compares signatures before it writes.
        one_host: all ranks must be on one host.
        any_source: its exchanges take receives from whatever rank sends next.
        allocates: it has memory for tensors that it then moves without staging copies.
        prepares: it does persistent all-gathers by itself: `Call.prepared`, and `unprepare`.
        moves_data: False for a backend that only pretends.
        registers: memory that a communicator's library can be told of beforehand: "local", or "symmetric"
            where all ranks tell theirs of it together.
        windows: one-sided operations of the library's own: `Backend.one_sided`.
        reconfigures: a communicator may be connected anew with other ranks: `connect` needs nothing but its
            `Setup`, and `close` leaves nothing behind, also after `abort` and while other ranks are gone.
        bequeaths: the next epoch may be made from what this one leaves: `bequeath`.
        captured: with streams: graphs may capture its operations.
    """

    device_types: frozenset[str]
    operations: frozenset[str] = frozenset()
    reduce_dtypes: frozenset[torch.dtype] = frozenset()
    reduce_ops: frozenset[RedOpType] = frozenset()
    reductions: frozenset[tuple[torch.dtype, RedOpType]] = frozenset()
    bytes_only: bool = False
    checks_mismatch: bool = False
    one_host: bool = False
    any_source: bool = False
    allocates: bool = False
    prepares: bool = False
    moves_data: bool = True
    registers: frozenset[str] = frozenset()
    windows: bool = False
    reconfigures: bool = False
    bequeaths: bool = False
    captured: bool = True
    hints: tuple[Hint, ...] = ()


class Legacy(abc.ABC):
    """What is left of a communicator's epoch for the next one to be made from: see `Backend.bequeath`."""

    @abc.abstractmethod
    def close(self) -> None:
        """Called once the next epoch is connected, or has failed. Local."""


@dataclass(frozen=True)
class Setup:
    """What a backend gets to connect with.

    Attributes:
        rendezvous: agreement among exactly the ranks of this communicator; good until `connect` returns.
        store: for a library that wants one itself: put a prefix with `rendezvous.uid` before its keys. None
            for a single rank.
        rank, size: of this communicator. labels: the members' global ranks.
        device: of the tensors. timeout: seconds that connecting may take.
        hints: values of all hints that the backend declares, read and defaulted.
        parent, color: of a split: the backend that it is split from, and a number that its members share.
        dynamic: the communicator can be reconfigured. again: it is, right now; then `before` is what this
            rank's epoch before has left, None for a rank that joins or has nothing left.
    """

    rendezvous: Rendezvous
    store: Store | None
    rank: int
    size: int
    labels: Sequence[int]
    device: torch.device
    name: str
    timeout: float
    hints: Mapping[str, Any] = field(default_factory=dict)
    parent: Backend | None = None
    color: int = 0
    dynamic: bool = False
    again: bool = False
    before: Legacy | None = None


class Exchange(abc.ABC):
    """Messages that run side by side. One thread at a time calls its methods, except `interrupt`."""

    @abc.abstractmethod
    def add(self, messages: Sequence[Message]) -> None:
        """Takes messages, numbered from 0 in the order of all calls, which they keep between two ranks."""

    @abc.abstractmethod
    def run(self, timeout: float, limit: float) -> list[tuple[int, int, CommError | None]]:
        """Returns when a message is over, after an `interrupt`, or when `limit` seconds have passed.

        What it returns is (number, peer, error) of each message that is over since; such an error is the
        message's own. What it raises ends all: among others `CommTimeoutError` after `timeout` seconds.
        """

    def interrupt(self) -> None:  # noqa: B027
        """From another thread: makes `run` return soon, or its next call, for there is more to add."""

    def close(self) -> None:  # noqa: B027
        """Called when nothing is left to do."""


class Together(Exchange):
    """An exchange by `Backend.exchange`: what is there when it runs goes together, what comes later waits."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._messages: list[Message] = []
        self._over = 0

    def add(self, messages: Sequence[Message]) -> None:
        self._messages += messages

    def run(self, timeout: float, limit: float) -> list[tuple[int, int, CommError | None]]:
        messages, self._messages = self._messages, []
        first, self._over = self._over, self._over + len(messages)
        self._backend.exchange(messages, timeout)
        return [(first + i, m.peer, None) for i, m in enumerate(messages)]


class OneSided(abc.ABC):
    """A library's one-sided operations. Memory that others write to is a window, which all ranks open.

    `put`, `signal` and `wait` put their work on the current stream, as `Backend.run` does. Between two ranks
    there are counters, by an index: each put and each signal adds one to the receiver's, when all that came
    before it is there, and a wait takes as many off.

    Attributes:
        indices: how many there are for each pair.
        used: those that somebody has. Where there are several, the first is for what nobody waits for.
    """

    indices: int
    used: set[int]

    def take_index(self) -> int | None:
        """One that nobody has, or None; the same on all ranks, which take and give theirs in one order."""
        free = [i for i in range(min(1, self.indices - 1), self.indices) if i not in self.used]
        if not free:
            return None
        self.used.add(free[0])
        return free[0]

    @abc.abstractmethod
    def range_of(self, tensor: torch.Tensor) -> tuple[int, int]:
        """(address, bytes) of what has to be opened to have the tensor open; `InvalidArgumentError`."""

    @abc.abstractmethod
    def open(self, at: int, nbytes: int, timeout: float) -> int:
        """Collective: makes a window of own memory, of the same size on all ranks."""

    @abc.abstractmethod
    def close(self, window: int) -> None:
        """When no rank writes to it any more."""

    @abc.abstractmethod
    def put(self, window: int, tensor: torch.Tensor, peer: int, offset: int, index: int) -> None:
        """Writes the tensor into `peer`'s window, `offset` bytes from its beginning."""

    @abc.abstractmethod
    def signal(self, peer: int, index: int) -> None:
        """Adds one to `peer`'s counter."""

    @abc.abstractmethod
    def wait(self, peer: int, index: int, count: int) -> None:
        """Waits until `peer` has added that many to the own counter, besides those waited for before."""


class Backend(abc.ABC):
    """One end of one underlying communicator. Methods are never called concurrently, except `abort`."""

    name: ClassVar[str]
    capabilities: Capabilities  # of the class; an instance may have others, which its hints chose
    splits_when_idle = False  # its library splits a communicator only when its operations are over

    @classmethod  # noqa: B027
    def check_usable(cls, size: int) -> None:
        """Raises `UnsupportedError` where this process cannot be one of `size` ranks; before all else."""

    @classmethod
    @abc.abstractmethod
    def connect(cls, setup: Setup) -> Backend:
        """Called by all ranks at creation. Returns when all of them are connected; raises a `CommError`."""

    @classmethod
    def reachable_at(cls, hints: Mapping[str, Any]) -> str:
        """With `capabilities.reconfigures`: this host's address for ranks on other hosts, "" for none."""
        return ""

    @abc.abstractmethod
    def exchange(self, messages: Sequence[Message], timeout: float) -> None:
        """Runs all messages together and returns when all are done.

        Messages to one peer arrive in the order of the list. Called for send, recv, batches, and for the
        operations that `capabilities.operations` lacks. Raises `CommError` subclasses.
        """

    def open_exchange(self) -> Exchange:
        """For messages that are added one after the other. This one runs together what is there."""
        return Together(self)

    def collective(self, call: Call, run: Callable[[], None]) -> None:
        """Runs a collective by `run`, which calls this backend's `run` or, to compose it, its `exchange`.

        The place for what is done once for each collective, such as comparing signatures.
        """
        run()

    def run(self, call: Call) -> None:
        """Runs a collective of `capabilities.operations`; returns when the outputs are written."""
        raise AssertionError(f"{type(self).__name__} declares {call.name} but does not run it")

    @abc.abstractmethod
    def close(self) -> None:
        """Called once by finalize, on an idle backend. Local: it must not wait for other ranks."""

    @abc.abstractmethod
    def abort(self) -> None:
        """Ends a running operation from another thread with `AbortedError`, here and on the other ranks."""

    def bequeath(self) -> Legacy | None:
        """With `capabilities.bequeaths`: what the next epoch may be made from, for the caller to close.

        Called before `close`, on an idle backend, also after `abort`.
        """
        return None

    def expect_slow(self, name: str, seconds: float) -> None:
        """No operation of any rank times out in the next `seconds`, for this rank does `name` meanwhile.

        Replaces what this rank asked for before. From any thread; does not wait for the other ranks.
        """
        raise UnsupportedError(
            f"backend '{self.name}' cannot extend the other ranks' deadlines",
            hint="pass a longer timeout= to their operations",
        )

    @classmethod
    def which_device(cls, device: torch.device) -> torch.device:
        """The one that is meant by a device type alone, where a backend's devices have numbers."""
        return device

    def check_peers(self, ranks: Sequence[int]) -> None:  # noqa: B027
        """Raises the error if one of these ranks is known to be gone. Called now and then while other means
        of the same communicator's ranks wait for each other: while a split meets. Must not wait.
        """

    def raise_fault(self, fault: Any, timeout: float) -> NoReturn:
        """Raises the error behind what the fast path returned."""
        raise AssertionError(f"{type(self).__name__} has no fast path")

    def split_away(self, timeout: float) -> None:  # noqa: B027
        """Called on a rank that is in no part of a split, for a library that wants all to call."""

    @classmethod
    def device_streams(cls, device: torch.device) -> Streams | None:
        """The streams of such a device; None where operations are over when they return."""
        return None

    def streams(self) -> Streams | None:
        """The streams of its device, if its operations run there: `run` and `exchange` then put them on the
        current one and return. None where they are done when these return."""
        return None

    def direct(
        self, name: str, tensors: Sequence[torch.Tensor], other: int, op: ReduceOp | None
    ) -> Callable[[], None] | None:
        """With streams: what puts an operation of `stream_fast.SHORT` on the current one, or None where
        `run` or `exchange` has to.

        `tensors`: checked, in the order of the operation table. `other`: the root or the peer, else -1. `op`
        may be undefined for the element type.
        """
        return None

    def late_error(self) -> CommError | None:
        """With streams: an error that came after the call, or None. Asked often, by any thread."""
        return None

    def explain(self, error: CommError) -> None:  # noqa: B027
        """With streams: adds to an error of the watchdog's, such as a timeout, what the library has said."""

    def fast_path(self, recorder: Any, index: int, timeout: float) -> Any:
        """A native way for small synchronous operations, as `fast_path.NoFastPath` describes it, or None."""
        return None

    def forget(self) -> None:  # noqa: B027
        """Called in a forked child, for the parent's backend: it must never reach the other ranks from there.

        Must not block, nor take a lock that another thread may have held at the fork.
        """

    def set_hints(self, hints: Mapping[str, Any]) -> None:
        """Called when hints are changed later; a backend that takes some at run time overrides this."""
        raise UnsupportedError(
            f"backend '{self.name}' takes its hints at creation only: {', '.join(sorted(hints))}",
            hint="pass hints= to new_comm or split",
        )

    @classmethod
    def version(cls) -> str:
        """Version of the library underneath."""
        return ""

    def memory(self) -> dict[str, int]:
        """Bytes that this rank holds for the communicator, by purpose."""
        return {}

    def unprepare(self, handle: object) -> None:
        """With `capabilities.prepares`: a handle that calls had as `prepared` is not used any more."""
        raise AssertionError(f"{type(self).__name__} declares that it prepares but does not")

    def host(self) -> str:
        """What ranks of one host have alike, for one whose symmetric memory depends on that; else ""."""
        return ""

    def symmetric_table(self, one_host: bool = True) -> Any | None:
        """The SHMEM library for this communicator's ranks, as csrc/symm/bind.cpp has it, or None.

        Raises `UnsupportedError`, on all ranks, where there is one but not for them. `one_host`: whether all
        ranks have the same `host`.
        """
        return None

    def kernels(self, device: torch.device) -> Any:
        """What launches the kernels of symmetric memory: a `device_kernels.Launcher`."""
        from unicomm.comms.memory.device_kernels import CupyLauncher

        return CupyLauncher(device)

    def symmetric_joined(self, uid: bytes, domain: Any) -> None:  # noqa: B027
        """This rank now is in the symmetric memory with that id; `domain`: its end of it."""

    # --- with capabilities.allocates: memory for tensors that it moves without staging ------------------

    def allocate(self, nbytes: int) -> torch.Tensor:
        """New memory, as uint8. Local. Raises `BackendError` when there is not enough."""
        raise AssertionError(f"{type(self).__name__} declares that it allocates but does not")

    def allocated_here(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in such memory."""
        return False

    def bytes_allocated(self) -> int:
        """Of this process, in use."""
        return 0

    def memory_pool(self) -> Any | None:
        """A `torch.cuda.MemPool` of such memory, where tensors of torch's own making can lie there too."""
        return None

    # --- with capabilities.registers or windows ---------------------------------------------------------

    def lacks(self, capability: str) -> UnsupportedError | None:
        """Why it has not got `allocates`, `registers`, `symmetric` or `windows`, where there is more to say
        than that."""
        return None

    def registered_range(self, tensor: torch.Tensor, symmetric: bool) -> tuple[int, int]:
        """(address, bytes) of what has to be registered for a tensor; `InvalidArgumentError`. Local."""
        raise AssertionError(f"{type(self).__name__} declares that it registers but does not")

    def register(self, tensor: torch.Tensor, symmetric: bool, timeout: float) -> None:
        """Tells the library of the tensor's memory; with `symmetric` on all ranks. Holds the tensor."""
        raise AssertionError(f"{type(self).__name__} declares that it registers but does not")

    def deregister(self, tensor: torch.Tensor) -> None:
        """Undoes that. Raises `InvalidArgumentError` for a tensor that is not registered."""
        raise AssertionError(f"{type(self).__name__} declares that it registers but does not")

    def one_sided(self) -> OneSided | None:
        """Its one-sided operations, the same object each time, or None."""
        return None
