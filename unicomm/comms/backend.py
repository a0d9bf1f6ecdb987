"""The backend protocol: what a backend has to do, and what it may do besides.

A backend moves validated buffers and nothing else. Every backend is a `Backend`: it connects, runs sends and
receives together, closes and aborts. What else it can do it declares by deriving from other classes, such as
`RunsCollectives`; unicomm asks with `isinstance`. Data, such as element types, is in its `Capabilities`.

A collective that a backend does not run itself is composed from `exchange`
(comms/execution/composed/completion.py). docs/backends.md tells how to write a backend;
`unicomm.testing.conformance` is the suite that it has to pass.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn, Protocol

import torch

from unicomm.c10d.compat import Store
from unicomm.comms.operations.call import MOST_TAG, Call, Message
from unicomm.comms.operations.reduction import RedOpType, ReduceOp, ReproducibleOp

from .errors import CommError
from .options import Hint
from .streams import Streams

#: The version of this protocol. A change that a backend written before does not survive raises it.
PROTOCOL_VERSION = 1


@dataclass(frozen=True)
class Capabilities:
    """Data about a backend. A class states the most, an instance what its hints and library leave of it.

    Attributes:
        device_types: device types of the tensors that the backend takes.
        operations: names of the collectives that `RunsCollectives.run` runs; the others are composed.
        reduce_dtypes, reduce_ops: element types and reductions of the reducing collectives in `operations`.
        reductions: further single pairs of element type and reduction. All other pairs are composed.
        bytes_only: the backend gets data that it only moves as uint8 tensors, whatever the element type.
        checks_mismatch: every collective compares the ranks' signatures before it writes.
        empty_parts: its messages tell sizes that differ, so that without a comparison of all pairs an
            exchange also sends its empty parts: a part that one rank alone takes for empty is then an error.
        one_host: all ranks must be on one host. encodes: it runs calls whose elements have a wire format.
        moves_data: False for a backend that only pretends to move data.
        captured: graphs may capture the backend's operations; only for backends that use streams.
        most_tag: the greatest tag of a message that the backend takes.
        hints: the hints that the backend takes.
    """

    device_types: frozenset[str]
    operations: frozenset[str] = frozenset()
    reduce_dtypes: frozenset[torch.dtype] = frozenset()
    reduce_ops: frozenset[RedOpType] = frozenset()
    reductions: frozenset[tuple[torch.dtype, RedOpType | ReproducibleOp]] = frozenset()
    bytes_only: bool = False
    checks_mismatch: bool = False
    empty_parts: bool = False
    one_host: bool = False
    encodes: bool = False
    moves_data: bool = True
    captured: bool = True
    most_tag: int = MOST_TAG
    hints: tuple[Hint, ...] = ()


class SetupRendezvous(Protocol):
    """How the ranks of a communicator-to-be agree while they connect.

    Each method except `remaining` is collective among the ranks or, as `check`, raises when a rank has left;
    `unicomm.comms.membership.rendezvous.Rendezvous` implements it and says which errors are raised.

    Attributes:
        labels: the ranks as errors of this creation name them: by their numbers in the whole job, or, in
            `reconfigure`, by their places in its list.
    """

    rank: int
    size: int
    labels: tuple[int, ...]
    uid: str

    def remaining(self) -> float:
        """Returns the seconds left of the timeout."""

    def exchange(self, tag: str, value: bytes) -> list[bytes]:
        """Gathers every rank's value, in order of rank. `tag` says what the values are."""

    def broadcast(self, tag: str, value: bytes | None, root: int = 0) -> bytes:
        """Returns the root's value on all ranks."""

    def check(self) -> None:
        """Raises when a rank has left or cannot come any more. Does not wait."""


class PreviousEpoch(abc.ABC):
    """What a communicator's last epoch left for its next one to be made from; see `ReusesEpochs`."""

    @abc.abstractmethod
    def close(self) -> None:
        """Called once the next epoch is connected, or has failed. Local."""


@dataclass(frozen=True)
class Setup:
    """What a backend gets to connect with.

    Attributes:
        rendezvous: agreement among exactly the ranks of this communicator; usable until `connect` returns.
        store: for a library that needs a store itself; it puts a prefix with `rendezvous.uid` before its
            keys. None for a single rank.
        rank, size: this rank and the number of ranks. labels: the ranks' numbers in the whole job.
        device: the device of the tensors. timeout: seconds that connecting may take.
        name: the communicator's name.
        hints: the values of all hints that the backend declares, with defaults filled in.
        parent: the backend that this one is split from. color: a number that the ranks of one part share.
        reconfigurable, reconfiguring: it may be connected with other ranks later; it is so now.
        previous: what this rank's previous epoch left; None if this rank joins, or nothing was left.
    """

    rendezvous: SetupRendezvous
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
    reconfigurable: bool = False
    reconfiguring: bool = False
    previous: PreviousEpoch | None = None


class Backend(abc.ABC):
    """One end of one underlying communicator: the part of the protocol that every backend implements.

    Methods are never called concurrently, except `abort`.

    Attributes:
        name: the backend's name.
        protocol_version: the `PROTOCOL_VERSION` for which it is written; others are refused.
        capabilities: of the class; an instance may have others.
    """

    name: ClassVar[str]
    protocol_version: ClassVar[int]
    capabilities: Capabilities

    @classmethod
    @abc.abstractmethod
    def connect(cls, setup: Setup) -> Backend:
        """Called by all ranks at creation. Returns when all of them are connected; raises a `CommError`."""

    @abc.abstractmethod
    def exchange(self, messages: Sequence[Message], timeout: float) -> None:
        """Runs all messages together and returns when all are done.

        Messages to one peer keep their order. Also called for composed collectives. Raises a `CommError`.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Called once by finalize, on an idle backend. Local: it must not wait for other ranks."""

    @abc.abstractmethod
    def abort(self) -> None:
        """Ends a running operation from another thread with `AbortedError`, here and on the other ranks."""

    def give_up(self, error: CommError) -> None:
        """Like `abort`. The other ranks get the cause `error`, where the backend can tell them."""
        self.abort()

    @classmethod
    def version(cls) -> str:
        """Returns the version of the library underneath; "" if there is none."""
        return ""


class Unconnected(Backend):
    """A backend that no operation reaches, such as one that chooses another. A subclass has what it needs."""

    @classmethod
    def connect(cls, setup: Setup) -> Backend:
        raise AssertionError(f"{cls.name} is not connected itself")

    def exchange(self, messages: Sequence[Message], timeout: float) -> None:
        raise AssertionError(f"{self.name} is not connected itself")

    def close(self) -> None:
        pass

    def abort(self) -> None:
        pass


# --- operations -------------------------------------------------------------------------------------------


class RunsCollectives(abc.ABC):
    """A backend that runs the collectives in `capabilities.operations` itself."""

    @abc.abstractmethod
    def run(self, call: Call) -> None:
        """Runs one of these collectives; returns when the outputs are written. Called within `collective`."""

    def runs(self, call: Call) -> bool:
        """Whether it runs this call, of those that the capabilities cover; the same on all ranks."""
        return True

    def collective(self, call: Call, run: Callable[[], None]) -> None:
        """Runs any collective by `run`, which calls `run` or, if it is composed, `exchange`.

        The place for what is done once for each collective, such as comparing signatures.
        """
        run()


#: A message of an exchange that has completed: its number, its peer and its error.
Completed = tuple[int, int, CommError | None]


class Exchange(abc.ABC):
    """Messages that complete one by one. One thread at a time calls its methods, except `interrupt`.

    Attributes:
        waited_for: returns the numbers of those for which threads wait now, as far as the caller tells.
        joint: messages that are added together may be said to be over together. For a backend to which each
            message that is awaited alone costs a thread.
        due: the number of the message that is due first, to which the timeout of the next `run` belongs.
    """

    waited_for: Callable[[], Collection[int]] = tuple
    joint: bool = False
    due: int = 0

    @abc.abstractmethod
    def add(self, messages: Sequence[Message]) -> None:
        """Takes messages. They are numbered from 0 over all calls; between two ranks they keep that order."""

    @abc.abstractmethod
    def run(self, timeout: float, limit: float, given: float) -> list[Completed]:
        """Returns when a message has completed, after an `interrupt`, or after `limit` seconds.

        Returns the messages that have completed since the last call; the error of one concerns this message
        only. An exception ends all messages: `CommTimeoutError` after `timeout` seconds, or another
        `CommError`.

        `timeout`: what is left of `given`, the timeout of the message that is due first, which errors tell.
        """

    def interrupt(self) -> None:  # noqa: B027
        """From another thread: makes the running or the next `run` return soon, as there is more to add."""

    def attend(self, attended: bool) -> None:  # noqa: B027
        """From any thread: says whether any thread waits for these messages. Until then, one does."""

    def close(self) -> None:  # noqa: B027
        """Called when no message is left."""


class OpensExchange(abc.ABC):
    """A backend whose sends and receives can complete one by one.

    Attributes:
        receives_from_any: the exchange takes receives from whichever rank sends next, as peer -1.
        overlaps: messages that have begun go on while no thread runs the exchange.
    """

    receives_from_any: bool = False
    overlaps: bool = False

    @abc.abstractmethod
    def open_exchange(self) -> Exchange:
        """Returns an exchange, for messages that are added one after the other."""


class PreparesOperations(abc.ABC):
    """A backend that runs persistent all-gathers itself: such a call has its handle as `Call.prepared`."""

    @abc.abstractmethod
    def unprepare(self, handle: object) -> None:
        """The handle is not used any more."""


class RaisesFaults(abc.ABC):
    """A backend that makes errors of the faults which its native code returns."""

    @abc.abstractmethod
    def raise_fault(self, fault: Any, timeout: float) -> NoReturn:
        """Raises the error that the fault describes."""


class HasFastPath(RaisesFaults):
    """A backend that runs small synchronous operations in one native call."""

    @abc.abstractmethod
    def fast_path(self, recorder: Any, index: int, timeout: float) -> Any:
        """Returns the fast path, as `fast_path.NoFastPath` describes it, or None."""


class ExtendsDeadlines(abc.ABC):
    """A backend that can give the operations of all ranks more time."""

    @abc.abstractmethod
    def expect_slow(self, name: str, seconds: float) -> None:
        """No operation of any rank times out in the next `seconds`, while this rank does `name`.

        Replaces what this rank asked for before. Called by any thread; does not wait for the other ranks.
        """


# --- streams ----------------------------------------------------------------------------------------------


class UsesStreams(abc.ABC):
    """A backend whose operations run on a device's streams: `run` and `exchange` put them on the current
    stream and return."""

    @classmethod
    @abc.abstractmethod
    def device_streams(cls, device: torch.device) -> Streams | None:
        """Returns the device's streams; None if operations on it are done when their call returns."""

    @abc.abstractmethod
    def streams(self) -> Streams | None:
        """Returns the streams of the communicator's device; None as for `device_streams`."""

    def late_error(self) -> CommError | None:
        """Returns an error that came after the call of an operation, or None. Asked often, by any thread."""
        return None

    def explain(self, error: CommError) -> None:  # noqa: B027
        """Adds what the library has logged to an error that the watchdog found, such as a timeout."""


def streams_of(backend: Backend) -> Streams | None:
    """Returns the streams of a connected backend's device; None if its operations block the host."""
    return backend.streams() if isinstance(backend, UsesStreams) else None


def device_streams(backend: type[Backend], device: torch.device) -> Streams | None:
    """Returns the streams of a device that a backend would use, before anything is connected."""
    return backend.device_streams(device) if issubclass(backend, UsesStreams) else None


#: Takes an operation's checked tensors in the order of the operation table, the root or peer (else -1), and
#: the reduction, which may be undefined for the element type. Returns what puts the operation on the current
#: stream; None if `run` or `exchange` has to run this one.
Prepare = Callable[[Sequence[torch.Tensor], int, ReduceOp | None], Callable[[], None] | None]


class IssuesDirectly(UsesStreams):
    """A backend that puts plain operations on a stream without a `Call`."""

    @abc.abstractmethod
    def direct(self, name: str) -> Prepare | None:
        """Returns what prepares calls of an operation of `device.fast.SHORT`; None if `run` or `exchange` has
        to run them all. Asked once, when the communicator is made.
        """


class ChoosesDevice(abc.ABC):
    """A backend whose devices have numbers."""

    @classmethod
    @abc.abstractmethod
    def which_device(cls, device: torch.device) -> torch.device:
        """Returns the device that a device type without a number means; else the device as given."""


# --- memory -----------------------------------------------------------------------------------------------


class AllocatesMemory(abc.ABC):
    """A backend with memory for tensors that it moves without staging copies."""

    def check_allocates(self) -> None:  # noqa: B027
        """Raises `UnsupportedError` if this version of its library has no such memory."""

    @abc.abstractmethod
    def allocate(self, nbytes: int) -> torch.Tensor:
        """Returns new memory as uint8. Local. Raises `BackendError` if there is not enough."""

    @abc.abstractmethod
    def allocated_here(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in such memory."""

    @abc.abstractmethod
    def bytes_allocated(self) -> int:
        """Returns the bytes of such memory that this process uses."""

    def memory_pool(self) -> Any | None:
        """Returns a `torch.cuda.MemPool` of such memory; None if torch's own allocator cannot use it."""
        return None


class RegistersMemory(abc.ABC):
    """A backend whose library can be told of a tensor's memory beforehand.

    With `symmetric`, all ranks register memory together. Each method raises `UnsupportedError` if this
    version of the library cannot.
    """

    @abc.abstractmethod
    def registered_range(self, tensor: torch.Tensor, symmetric: bool) -> tuple[int, int]:
        """Returns (address, bytes) of what has to be registered; `InvalidArgumentError`. Local."""

    @abc.abstractmethod
    def register(self, tensor: torch.Tensor, symmetric: bool, timeout: float) -> None:
        """Registers the tensor's memory; with `symmetric` on all ranks. Holds the tensor."""

    @abc.abstractmethod
    def deregister(self, tensor: torch.Tensor) -> None:
        """Undoes `register`. Raises `InvalidArgumentError` for a tensor that is not registered."""


class OneSided(abc.ABC):
    """A library's one-sided operations. Memory that others write to is a window, which all ranks open.

    `put`, `signal` and `wait` put their work on the current stream, as `RunsCollectives.run` does. Each pair
    of ranks has counters, found by an index. Each put and each signal adds one to the receiver's counter when
    all data sent before it is there; a wait subtracts what it waited for.

    Attributes:
        indices: number of counters for each pair.
        used: indices in use. If there are several indices, the first is for puts that nobody waits for.
    """

    indices: int
    used: set[int]

    def take_index(self) -> int | None:
        """Returns a free index, or None; the same on all ranks, which take and free indices in one order."""
        free = [i for i in range(min(1, self.indices - 1), self.indices) if i not in self.used]
        if not free:
            return None
        self.used.add(free[0])
        return free[0]

    @abc.abstractmethod
    def range_of(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Returns (address, bytes) of what has to be opened for the tensor; `InvalidArgumentError`."""

    @abc.abstractmethod
    def open(self, at: int, nbytes: int, timeout: float) -> int:
        """Collective: makes a window of this rank's memory, of the same size on all ranks."""

    @abc.abstractmethod
    def close(self, window: int) -> None:
        """Called when no rank writes to the window any more."""

    @abc.abstractmethod
    def put(self, window: int, tensor: torch.Tensor, peer: int, offset: int, index: int) -> None:
        """Writes the tensor into `peer`'s window, `offset` bytes from its beginning."""

    @abc.abstractmethod
    def signal(self, peer: int, index: int) -> None:
        """Adds one to `peer`'s counter."""

    @abc.abstractmethod
    def wait(self, peer: int, index: int, count: int) -> None:
        """Waits until `peer` has added `count` to this rank's counter, besides those waited for before."""


class HasOneSided(abc.ABC):
    """A backend whose library has one-sided operations of its own."""

    @abc.abstractmethod
    def one_sided(self) -> OneSided:
        """Returns the operations, the same object each time. `UnsupportedError` if this version has none."""


class HasSymmetricMemory(RaisesFaults):
    """A backend whose communicators can have symmetric memory."""

    def host(self) -> str:
        """Returns what ranks of one host have alike, if the symmetric memory depends on that; else ""."""
        return ""

    @abc.abstractmethod
    def symmetric_table(self, one_host: bool = True) -> Any:
        """Returns the SHMEM library for this communicator's ranks, as csrc/symm/bind.cpp has it.

        `one_host`: all ranks have the same `host`. Raises `UnsupportedError`, on all ranks, if these ranks
        cannot have symmetric memory.
        """

    def symmetric_joined(self, uid: bytes, domain: Any) -> None:
        """This rank has joined the symmetric memory with that id; `domain` is its end of it."""


class LaunchesKernels(abc.ABC):
    """A backend that launches the kernels of symmetric memory in its own way."""

    @abc.abstractmethod
    def kernels(self, device: torch.device) -> Any:
        """Returns a `device_kernels.Launcher`."""


class ReportsMemory(abc.ABC):
    """A backend that knows what memory its communicators hold."""

    @abc.abstractmethod
    def memory(self) -> dict[str, int]:
        """Returns the bytes that this rank holds for the communicator, by purpose."""


# --- life -------------------------------------------------------------------------------------------------


class ChecksProcess(abc.ABC):
    """A backend that not every process can use, such as one that needs its library's launcher."""

    @classmethod
    @abc.abstractmethod
    def check_usable(cls, size: int, told_by: str = "") -> None:
        """Raises `UnsupportedError` if this process cannot be one of `size` ranks; called before all else.

        `told_by`: what told the number of ranks, such as a launcher, for the error.
        """


class ChecksPeers(abc.ABC):
    """A backend that notices ranks which are gone while no operation runs, as in a split. It never waits."""

    @abc.abstractmethod
    def check_peers(self, ranks: Sequence[int]) -> None:
        """Raises the error if the communicator has failed, or if one of these ranks is dead."""

    def left(self, ranks: Sequence[int]) -> list[int]:
        """Returns those of these ranks that have finalized; by default none."""
        return []


class SplitsInLibrary(abc.ABC):
    """A backend whose library splits a communicator by itself.

    Attributes:
        splits_when_idle: the library splits a communicator only when its operations are over.
    """

    splits_when_idle: bool = False

    @abc.abstractmethod
    def split_away(self, timeout: float) -> None:
        """Called on a rank that is in no part of the split, if the library needs all ranks to call."""


class Reconfigures(abc.ABC):
    """A backend whose communicators may be connected anew with other ranks.

    `connect` needs nothing but its `Setup`, and `close` leaves nothing behind, also after `abort` and while
    other ranks are gone.
    """

    @classmethod
    @abc.abstractmethod
    def reachable_at(cls, hints: Mapping[str, Any]) -> str:
        """Returns this host's address for ranks on other hosts; "" if there is none."""


class ReusesEpochs(Reconfigures):
    """A backend that can make a communicator's next epoch from its previous one."""

    @property
    @abc.abstractmethod
    def can_reuse_epoch(self) -> bool:
        """Whether this instance's library and hints allow it."""

    @abc.abstractmethod
    def take_epoch(self) -> PreviousEpoch | None:
        """Takes out what the next epoch may be made from; the caller closes it. None if nothing is left.

        Called before `close`, on an idle backend, also after `abort`.
        """


class SurvivesFork(abc.ABC):
    """A backend that has to let go of its connections in a forked child."""

    @abc.abstractmethod
    def forget(self) -> None:
        """Called in the child, for the parent's backend: it must never reach the other ranks from there.

        Must not block, nor take a lock that another thread may have held at the fork.
        """


class ChangesHints(abc.ABC):
    """A backend that takes some of its hints at run time."""

    @abc.abstractmethod
    def set_hints(self, hints: Mapping[str, Any]) -> None:
        """Changes the values of these hints."""
