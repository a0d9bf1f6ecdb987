"""unicomm's native core. Private: use the package's Python modules."""

import enum
from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import NDArray
from torch import Tensor

Fault = tuple[int, list[int], list[tuple[int, ...]], str, int]
Message = tuple[bool, int, Tensor, int]
SymmHead = tuple[int, int, int, int, bool, int, float]
SymmRefusal = tuple[int, int, int]
SymmTile = tuple[int, int, int, int, int]

class FaultCode(enum.IntEnum):
    NONE = 0

    TIMEOUT = 1

    PEER_LOST = 2

    MISMATCH = 3

    ABORTED = 4

    INTERNAL = 5

    DEADLOCK = 6

    UNSUPPORTED = 7

    SILENT_CORRUPTION = 8

class WorkBase:
    """The name and the number of an operation."""

    name: str

    seq: int

class Counts:
    """How many operations a rank has begun on a communicator."""

    def __init__(self, size: int) -> None: ...
    @property
    def entered(self) -> int:
        """Collectives."""

    @entered.setter
    def entered(self, arg: int, /) -> None: ...
    @property
    def running(self) -> str:
        """The collective that runs in native code, or ""."""

    @property
    def inside(self) -> str:
        """The collective of which this communicator's are parts, or ""."""

    @property
    def whole(self) -> int:
        """
        How many collectives there were of which this communicator's are parts.
        """

    def begin_whole(self, code: int) -> None:
        """Such a collective begins."""

    def end_whole(self) -> None:
        """It is over."""

    @property
    def left(self) -> bool:
        """Whether a rank has left: then native code takes no operation."""

    @left.setter
    def left(self, arg: bool, /) -> None: ...
    @property
    def hearing(self) -> bool:
        """Whether what another rank has told is being read."""

    @hearing.setter
    def hearing(self, arg: bool, /) -> None: ...
    def next(self, peer: int, send: bool, part: bool = False) -> int:
        """
        Counts a message without a tag to or from `peer`; returns its number. `part`: of a collective.
        """

    def of(self, peer: int, send: bool, part: bool = False) -> int:
        """How many messages there were to or from `peer`."""

class Recorder:
    def __init__(self, path: str, meta: str, rank: int, world: int, records: int) -> None: ...
    def add_comm(self, name: str, backend: str, uid: str, ranks: str, rank: int, size: int) -> int: ...
    def set_comm_state(self, comm: int, state: int, uid: str) -> None: ...
    def begin(
        self,
        comm: int,
        op: int,
        seq: int,
        op_id: int,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        red: int = 0,
        peer: int = -1,
        flags: int = 0,
        timeout: float = 0.0,
        batch: int = 0,
        start_now: bool = True,
    ) -> int:
        """Begins a record and returns its id."""

    def add_flags(self, id: int, flags: int, /) -> None: ...
    def set_sender(self, id: int, peer: int, seq: int, /) -> None:
        """
        Sets the sender of a receive from any rank, by its rank in the communicator, and its number.
        """

    def add_checksum(self, id: int, which: int, checksum: int, /) -> None:
        """
        Sets the checksum of the inputs (RECORD_INPUT_CHECKSUM) or outputs (RECORD_OUTPUT_CHECKSUM).
        """

    def add_sent(self, id: int, bytes: int, /) -> None:
        """Sets the bytes that this rank has sent of elements in a wire format."""

    def place(self, id: int, /) -> str:
        """
        The user's line that a record was called from, as file:line; empty if it is unknown.
        """

    def shape(self, id: int, /) -> bytes:
        """
        A record without its numbers, for `begin_again`; empty if it was overwritten.
        """

    def begin_again(self, shape: bytes, seq: int, op_id: int, flags: int, /) -> int: ...
    def start(self, id: int, ago_ns: int = 0) -> None: ...
    def finish(self, id: int, state: int = 3, error: int = 0, ago_ns: int = 0) -> None: ...
    def close(self, remove: bool) -> None: ...
    def snapshot(self) -> bytes: ...
    def total(self) -> int:
        """The number of records ever begun."""

    @property
    def path(self) -> str: ...

def set_libraries(
    own: str,
    torch: str = "",
    stdlib: str = "",
    torch_wrappers: Sequence[str] = (),
    wrappers: Sequence[str] = (),
) -> None:
    """
    Folders whose files are not the user's, which end with a slash; folders in torch's, and installed packages, that wrap the user's code. Call paths that are known already keep their frames.
    """

def next_op_id() -> int: ...

RECORD_CREATED: int = 1

RECORD_STARTED: int = 2

RECORD_COMPLETED: int = 3

RECORD_FAILED: int = 4

RECORD_ASYNC: int = 1

RECORD_P2P: int = 2

RECORD_BATCH: int = 4

RECORD_RECEIVE: int = 8

RECORD_CAPTURED: int = 16

RECORD_REPLAYED: int = 32

RECORD_REPLAY: int = 64

RECORD_INPUT_CHECKSUM: int = 128

RECORD_OUTPUT_CHECKSUM: int = 256

RECORD_COMPARED: int = 512

RECORD_ENCODED: int = 1024

RECORD_FROM_ANY: int = 2048

RECORD_OTHER_ERROR: int = 100

COMM_OPEN: int = 1

COMM_FINALIZED: int = 2

COMM_FAILED: int = 3

def ring_layout() -> dict[str, int]:
    """
    Sizes of the ring's structures and offsets of fields, for the test of the Python reader.
    """

def read_dump(data: bytes, most: int = ...) -> dict[str, Any]:
    """
    Reads torch's flight recorder dump into columns; ValueError if it is none, MemoryError if it needs more than `most` bytes.
    """

def listen_for_dump_signal(number: int) -> int:
    """
    Installs the handler and returns the pipe's read end, one byte a signal.
    """

def forget_dump_signal() -> None: ...
def fold(
    out: Tensor, inputs: list[Tensor], op: int, factors: Sequence[float] | None = None, n_avg: int = 0
) -> bool:
    """
    Folds the inputs from left to right into `out`, which may be one of them.

    All are contiguous CPU tensors of one dtype and size. `op` is a RedOpType; PREMUL_SUM takes a
    factor for each input, AVG the divisor `n_avg`. Returns False, with `out` untouched, if the dtype
    does not have the operation. Raises ValueError if the arguments do not fit together.
    """

def fold_defined(dtype: int, op: int) -> bool:
    """Whether `fold` has the operation for this dtype number."""

def fold_isa() -> str:
    """The instruction set that folds use: avx512, avx2 or baseline."""

def set_fold_isa(name: str) -> bool:
    """
    Makes folds use another instruction set, for tests. Returns False if this machine lacks it.
    """

def checksum(tensors: Sequence[Tensor]) -> int:
    """
    The 64-bit checksum of contiguous CPU tensors, in their order; ValueError for others.

    Differs for certain when one aligned word of 8 bytes differs. csrc/checksum/data_checksum.hpp
    defines it.
    """

def wire_bytes(format: int, count: int) -> int:
    """The bytes of `count` encoded elements."""

def wire_encode(
    out: Tensor,
    input: Tensor,
    format: int,
    factor: float = 1.0,
    stochastic: bool = False,
    key: int = 0,
    residual: Tensor | None = None,
    first: int = 0,
) -> None:
    """
    Encodes the elements of `input`, times `factor`, into the bytes of `out`.

    Both are contiguous CPU tensors; `input` is float32, float16 or bfloat16. Rounds to nearest even, or
    `stochastic` by random bits that depend on `key` and the element's number, which is `first` for the
    first one. `residual`, float32, is added to the elements first, and replaced by what encoding loses of
    them. Raises ValueError if the arguments do not fit together.
    """

def wire_decode(out: Tensor, input: Tensor, format: int, add: bool = False) -> None:
    """
    Decodes the bytes of `input` into the elements of `out`, or adds them to it, which is float32 then.

    Raises ValueError if the arguments do not fit together.
    """

class ShmSegment:
    def __init__(self, world: int, slot_bytes: int, p2p_bytes: int) -> None: ...
    @staticmethod
    def open(pid: int, fd: int) -> ShmSegment:
        """Maps the segment that process `pid` holds as descriptor `fd`."""

    def close_fd(self) -> None:
        """To be called once all ranks have mapped it."""

    @property
    def fd(self) -> int: ...
    @property
    def bytes(self) -> int: ...

class FastOperations:
    """What runs the operations of a fast path."""

class ShmGroup(FastOperations):
    def __init__(self, segment: ShmSegment, rank: int, pids: Sequence[int], name: str = "") -> None: ...
    def run(
        self,
        code: int,
        dtype: int,
        red: int,
        factor: float,
        root: int,
        count: int,
        extra: int,
        timeout: float,
        inputs: list[Tensor],
        outputs: list[Tensor],
        in_splits: list[int] | None,
        out_splits: list[int] | None,
    ) -> Fault | None:
        """Runs a collective."""

    def exchange(self, messages: list[Message], timeout: float) -> Fault | None:
        """Runs all messages together; returns when all are done."""

    def offer_memory(self, proofs: Sequence[tuple[int, int]], readers: Sequence[int]) -> None:
        """
        Has long messages read where they lie, by the ranks `readers`, which can read the memory of this one. `proofs`: of the processes of all ranks.
        """

    def abort(self) -> None: ...
    def give_up(self, code: int, culprits: Sequence[int]) -> None:
        """Like `abort`, with the cause, which the other ranks get."""

    def expect_slow(self, seconds: float) -> None:
        """Keeps operations of all ranks from timing out for that long."""

    def finalize(self) -> None: ...
    def lost(self, ranks: Sequence[int]) -> Fault | None:
        """The fault if a rank has failed, or if one of these ranks has died."""

    def left(self, ranks: Sequence[int]) -> list[int]:
        """Those of these ranks that have finalized."""

    def dead_ranks(self) -> list[int]: ...
    def failed(self) -> bool: ...
    @property
    def direct_operations(self) -> int: ...
    @property
    def id(self) -> int: ...
    @property
    def bytes(self) -> int: ...

class ShmExchange:
    def __init__(self, group: ShmGroup) -> None: ...
    def add(self, messages: list[Message]) -> None: ...
    def run(
        self, group: ShmGroup, timeout: float, limit: float
    ) -> Fault | list[tuple[int, int, Fault | None]]:
        """
        Returns at the first event: a fault of the group, or (index, peer, fault) of each message that is done.
        """

    def interrupt(self) -> None: ...
    def set_attended(self, attended: bool) -> None:
        """
        Says whether a thread of the program waits for any of the messages. May be called at any time.
        """

def heap_allocate(bytes: int) -> NDArray[Any]:
    """
    Memory that ranks of this host can read, as an array of bytes that owns it.
    """

def heap_holds(data: int, bytes: int) -> bool: ...
def heap_allocated() -> int: ...
def set_thread_check(check: Callable[[int, int, list[int]], list[int] | None]) -> None:
    """
    `check(comm, rank, threads)` returns the waiting threads that matter, or None.
    """

def usable_cores() -> int: ...
def proof_of_reading() -> tuple[int, int]:
    """A word of this process that nobody can guess: its address and value."""

def can_read(pid: int, proof: tuple[int, int]) -> bool:
    """
    Whether this process can read the memory of another one, which has this proof.
    """

class FastCalls:
    """What native fast paths share: whether they may be used now."""

    def block(self) -> None: ...
    def unblock(self) -> None: ...
    def running(self, here: bool = False) -> list[tuple[int, int]]:
        """
        The operations that run now, as (code, number); with `here` only those of this thread.
        """

    @property
    def timeout(self) -> float: ...
    @timeout.setter
    def timeout(self, arg: float, /) -> None: ...

class FastPath(FastCalls):
    """
    Operations in one native call. Each returns False, before it has done anything, if the general path has to run it.
    """

    def __init__(self, backend: FastOperations, recorder: Recorder, comm: int, timeout: float) -> None: ...
    @property
    def backend(self) -> FastOperations: ...
    @property
    def failed(self) -> object:
        """The tensors of the operation that failed, or None."""

    def next_seq(self) -> int: ...
    @property
    def seq(self) -> int: ...
    def all_reduce(
        self,
        tensor: object | None,
        op: object | None,
        async_op: object | None,
        hints: object | None,
        timeout: object | None,
    ) -> object: ...
    def broadcast(
        self,
        tensor: object | None,
        root: object | None,
        async_op: object | None,
        hints: object | None,
        timeout: object | None,
    ) -> object: ...
    def barrier(self, async_op: object | None, hints: object | None, timeout: object | None) -> object: ...
    def all_gather_single(
        self,
        output: object | None,
        input: object | None,
        async_op: object | None,
        hints: object | None,
        timeout: object | None,
    ) -> object: ...
    def reduce_scatter_single(
        self,
        output: object | None,
        input: object | None,
        op: object | None,
        async_op: object | None,
        hints: object | None,
        timeout: object | None,
    ) -> object: ...
    def all_to_all_single(
        self,
        output: object | None,
        input: object | None,
        async_op: object | None,
        hints: object | None,
        timeout: object | None,
    ) -> object: ...
    def send(
        self,
        tensor: object | None,
        dst: object | None,
        async_op: object | None,
        hints: object | None,
        timeout: object | None,
    ) -> object: ...
    def recv(
        self,
        tensor: object | None,
        src: object | None,
        async_op: object | None,
        hints: object | None,
        timeout: object | None,
    ) -> object: ...
    def batch(
        self, items: object | None, async_op: object | None, hints: object | None, timeout: object | None
    ) -> object: ...
    def pair_seq(self, peer: int, send: bool, /) -> int: ...
    def next_pair_seq(self, peer: int, send: bool, /) -> int: ...

def short_method(general: object, op: int, names: tuple[str, ...], defaults: tuple[object, ...]) -> object:
    """
    Returns a method of a communicator that tries its fast path, and calls `general` if that does not take the operation `op`.
    """

class SingleMessages:
    """Messages of a process group that need not wait."""

    @property
    def patience(self) -> float:
        """Seconds that a receive waits in the core at most."""

    @patience.setter
    def patience(self, arg: float, /) -> None: ...
    def post(
        self, send: bool, tensors: object, peer: object, tag: object, wait: bool
    ) -> int | tuple[int, int, int] | None:
        """
        Returns the message's number once it is complete. None: nothing has happened. (number, op_id, record): it has begun, the queue has to run it, and the fast path is blocked until then.
        """

def single_messages(fast: object) -> SingleMessages | None:
    """
    Returns those of a communicator with this fast path; None if it has none in memory.
    """

def all_reduce_method(
    options: type,
    reduction_hash: object,
    unset_timeout: object,
    caller: object | None,
    reductions: dict[object, int],
    modes: object,
    path: tuple[str, ...],
    general: str,
    failed: str,
    done: object,
) -> object: ...
def noted_property(property: object, name: str) -> object:
    """
    The property of torch's AllreduceOptions, as one that notes what is set.
    """

class NcclLibrary:
    """
    The C functions of NCCL or RCCL. Pointers are integers; each returns the library's result, and what it creates.
    """

    def __init__(self, path: str, loaded_only: bool = False) -> None: ...
    @property
    def version(self) -> int: ...
    @property
    def file(self) -> str: ...
    def functions(self) -> list[tuple[str, int, bool]]:
        """
        (name, version that introduced it, whether this library has it) of each known function.
        """

    def error_string(self, result: int, /) -> str: ...
    def last_error(self, comm: int, /) -> str: ...
    def unique_id(self) -> tuple[int, bytes]: ...
    def init(
        self, size: int, id: bytes, rank: int, settings: Sequence[tuple[str, int | str]], seconds: float, /
    ) -> tuple[int, int]: ...
    def init_scalable(
        self,
        size: int,
        rank: int,
        ids: Sequence[bytes],
        settings: Sequence[tuple[str, int | str]],
        seconds: float,
        /,
    ) -> tuple[int, int]: ...
    def split(
        self,
        parent: int,
        color: int,
        key: int,
        settings: Sequence[tuple[str, int | str]],
        seconds: float,
        state: Callable[[], int],
        /,
    ) -> tuple[int, int]:
        """`state()` returns the state of the parent."""

    def shrink(
        self,
        parent: int,
        without: Sequence[int],
        settings: Sequence[tuple[str, int | str]],
        abort: bool,
        seconds: float,
        state: Callable[[], int],
        /,
    ) -> tuple[int, int]:
        """`state()` returns the state of the parent."""

    def grow(
        self,
        parent: int,
        size: int,
        id: bytes,
        rank: int,
        settings: Sequence[tuple[str, int | str]],
        seconds: float,
        state: Callable[[], int],
        /,
    ) -> tuple[int, int]:
        """
        A member passes its communicator, and the id if it has asked for it; a new rank passes parent 0 and the id. `state()` returns the state of the parent, and is not called without one.
        """

    def comm_unique_id(self, comm: int, /) -> tuple[int, bytes]: ...
    def end(self, comm: int, seconds: float, set_device: int, device: int, /) -> int:
        """
        Finalizes and destroys; kInProgress if that takes longer, and it continues. `set_device` is the address of cudaSetDevice or hipSetDevice, or 0.
        """

    def abort(self, comm: int, seconds: float, set_device: int, device: int, /) -> int:
        """
        Aborts; kInProgress if that takes longer, and it continues. `set_device` as in `end`.
        """

    def revoke(self, comm: int, seconds: float, set_device: int, device: int, /) -> int:
        """
        Revokes; kInProgress if that takes longer. It then continues, and aborts the communicator. `set_device` as in `end`.
        """

    def suspend(self, comm: int, flags: int, /) -> int: ...
    def resume(self, comm: int, /) -> int: ...
    def async_error(self, comm: int, /) -> tuple[int, int]: ...
    def count(self, comm: int, /) -> tuple[int, int]: ...
    def user_rank(self, comm: int, /) -> tuple[int, int]: ...
    def device(self, comm: int, /) -> tuple[int, int]: ...
    def mem_stats(self, comm: int, which: int, /) -> tuple[int, int]: ...
    def mem_alloc(self, bytes: int, /) -> tuple[int, int]: ...
    def mem_free(self, memory: int, /) -> int: ...
    def allocator(self) -> tuple[int, int]:
        """Addresses of two functions for torch's pluggable allocator."""

    def block_of(self, address: int, /) -> tuple[int, int]:
        """
        (address, bytes) of the allocation in which the byte lies; zeros for none.
        """

    def bytes_in_use(self) -> int: ...
    def register(self, comm: int, memory: int, bytes: int, /) -> tuple[int, int]: ...
    def deregister(self, comm: int, handle: int, /) -> int: ...
    def window_register(
        self, comm: int, memory: int, bytes: int, flags: int, seconds: float, state: Callable[[], int], /
    ) -> tuple[int, int]:
        """`state()` returns the state of the communicator."""

    def window_deregister(self, comm: int, window: int, /) -> int: ...
    def window_pointer(self, comm: int, window: int, /) -> tuple[int, int]: ...
    def premul_sum(self, scalar: bytes, dtype: int, comm: int, /) -> tuple[int, int]:
        """`scalar`: the factor in the element type."""

    def op_destroy(self, op: int, comm: int, /) -> int: ...
    def group_start(self) -> int: ...
    def group_end(self) -> int: ...
    def all_reduce(
        self, send: int, recv: int, count: int, dtype: int, op: int, comm: int, stream: int, /
    ) -> int: ...
    def reduce(
        self, send: int, recv: int, count: int, dtype: int, op: int, root: int, comm: int, stream: int, /
    ) -> int: ...
    def broadcast(
        self, send: int, recv: int, count: int, dtype: int, root: int, comm: int, stream: int, /
    ) -> int: ...
    def all_gather(self, send: int, recv: int, count: int, dtype: int, comm: int, stream: int, /) -> int: ...
    def reduce_scatter(
        self, send: int, recv: int, count: int, dtype: int, op: int, comm: int, stream: int, /
    ) -> int: ...
    def all_to_all(self, send: int, recv: int, count: int, dtype: int, comm: int, stream: int, /) -> int: ...
    def gather(
        self, send: int, recv: int, count: int, dtype: int, root: int, comm: int, stream: int, /
    ) -> int: ...
    def scatter(
        self, send: int, recv: int, count: int, dtype: int, root: int, comm: int, stream: int, /
    ) -> int: ...
    def send(self, buffer: int, count: int, dtype: int, peer: int, comm: int, stream: int, /) -> int: ...
    def recv(self, buffer: int, count: int, dtype: int, peer: int, comm: int, stream: int, /) -> int: ...
    def put_signal(
        self,
        source: int,
        count: int,
        dtype: int,
        peer: int,
        window: int,
        offset: int,
        signal: int,
        context: int,
        flags: int,
        comm: int,
        stream: int,
        /,
    ) -> int: ...
    def signal(self, peer: int, signal: int, context: int, flags: int, comm: int, stream: int, /) -> int: ...
    def wait_signal(self, count: int, peer: int, index: int, comm: int, stream: int, /) -> int: ...

def nccl_config_fields() -> list[tuple[str, bool, int]]: ...
def nccl_config_bytes(version: int) -> int: ...

class TransportFailure(RuntimeError):
    pass

def most_in_slot(size: int) -> int:
    """
    Bytes of a rank's data that travel with what it calls, if all of so many ranks need them.
    """

class Transport:
    """What carries one communicator's messages."""

    def stop(self) -> None:
        """By any thread: ends all waits from now on."""

    def rouse(self) -> None:
        """By any thread: ends a wait for messages."""

    def flush(self, seconds: float) -> bool:
        """Waits until the system has all that was sent."""

    def drop(self) -> bool:
        """
        Ends the connections. Returns False if the memory of messages may still be touched.
        """

    def forget(self) -> None:
        """For a forked child: lets go without a word to anybody."""

    def gather(self, head: bytes, data: int, bytes: int) -> bool:
        """Exchanges slots with all ranks. Returns whether they call the same."""

    def slot_head(self, rank: int) -> bytes: ...
    def slot_data(self, rank: int) -> bytes: ...
    def take_slot(self, rank: int, to: int, bytes: int, at: int, all: int) -> None:
        """Copies a part of a rank's data, which are `all` bytes."""

    def fold_slots(
        self, to: int, bytes: int, at: int, all: int, dtype: int, red: int, factors: Sequence[float]
    ) -> bool:
        """
        Folds the same part of all ranks' data, `all` bytes each. Returns False if the core cannot.
        """

    def reduce(
        self,
        shares: Sequence[tuple[int, int]],
        out: int,
        dtype: int,
        red: int,
        factors: Sequence[float],
        to: Sequence[int],
        from_: Sequence[int],
        chunk: int,
    ) -> None:
        """
        Folds the shares of all ranks, and passes the result on to the ranks `to`.
        """

    def broadcast(self, data: int, bytes: int, root: int, chunk: int) -> None: ...

class SupervisedOperations(FastOperations):
    """Operations that the general path runs as well."""

    def run(
        self,
        op: int,
        dtype: int,
        red: int,
        root: int,
        count: int,
        extra: int,
        timeout: float,
        input: object | None,
        output: object | None,
    ) -> object:
        """Runs a collective on the general path. Returns None, or a fault."""

    def wait_idle(self) -> None:
        """Waits until no operation runs."""

class TransportOperations(SupervisedOperations):
    pass

class TransportFast(TransportOperations):
    """Operations of a transport, for a fast path."""

    def __init__(self, transport: Transport, compares: bool, counts: Counts, supervisor: object) -> None:
        """`supervisor` is held weakly."""

    def fits(self, op: int, bytes: int) -> bool:
        """Whether `run` takes a collective with so many bytes of input."""

    def hear(self, connections: Sequence[int]) -> None:
        """
        Takes the descriptors of the connections on which other ranks tell of faults.
        """

    def close(self) -> None:
        """It takes no operation any more."""

    @property
    def moment(self) -> float:
        """Seconds in which an operation needs no supervision."""

    @moment.setter
    def moment(self, arg: float, /) -> None: ...
    @property
    def awaited(self) -> list[tuple[int, bool, int, int]]:
        """
        The messages of the last exchange: peer, whether it is a send, number, bytes.
        """

class TransportMessages:
    """Messages of a transport that complete one by one."""

    def __init__(self, transport: Transport) -> None: ...
    def add(self, number: int, send: bool, peer: int, data: int, bytes: int, tag: int) -> None: ...
    def wait(self, limit: float, all: bool) -> list[tuple[int, int, int]] | None:
        """
        Waits up to `limit` seconds. Returns (number, peer, bytes) of those that are over; None if the transport was stopped, or not `all` came in time.
        """

class UcxLibrary:
    """An opened libucp."""

    def __init__(self, path: str, loaded_only: bool) -> None:
        """Opens the library; raises OSError if it is none, or too old."""

    @property
    def version(self) -> tuple[int, int, int]: ...
    @property
    def file(self) -> str: ...
    def functions(self) -> list[tuple[str, int, bool]]:
        """
        Each function that may be used: name, since which version, whether the library has it.
        """

    def set_log_level(self, level: str) -> bool:
        """
        Sets the level of UCX's own log, of this process. Returns False if it is none.
        """

def end_full_sockets(epoll: int, seconds: float) -> int:
    """
    Ends the sending side of the TCP sockets below an epoll file whose buffers stay full. Returns how many.
    """

class UcxWorker(Transport):
    """One communicator's worker of UCX."""

    def __init__(
        self,
        library: UcxLibrary,
        rank: int,
        size: int,
        settings: Sequence[tuple[str, str, bool]],
        spin: float,
    ) -> None:
        """
        `settings`: names without UCX_, values, and whether this UCX has to have them. `spin`: seconds that a wait polls before it sleeps.
        """

    @property
    def address(self) -> bytes: ...
    def connect(self, addresses: Sequence[bytes]) -> None:
        """Makes the endpoints to all workers, by the ranks' addresses."""

    def greet(self, seconds: float) -> bool:
        """
        Exchanges a message with every rank. Returns False when one did not come.
        """

    def transports(self, peer: int) -> list[str]:
        """The ways to a peer, as transport/device; [] if this UCX does not tell."""

class TcpStreams(Transport):
    """One communicator's TCP connections."""

    def __init__(self, rank: int, size: int, spin: float) -> None:
        """`spin`: seconds that a wait polls before it sleeps. Raises OSError."""

    def connect(self, connections: Sequence[int]) -> None:
        """
        Takes over the descriptors of connected sockets to the ranks, with -1 for this one. Raises OSError, and has closed them then.
        """

def hosts_most_in_slot(hosts: int) -> int:
    """
    Bytes of a host's data for all others that travel with what its ranks call.
    """

def hosts_signature(op: int, dtype: int, how: int, root: int, count: int, extra: int) -> int:
    """A number for what all ranks of several hosts must agree on."""

class HostsPart(enum.Enum):
    """The part of an operation that failed."""

    NONE = 0

    NEAR = 1

    LATE = 2

    FAR = 3

class HostsFast(SupervisedOperations):
    """Operations on several hosts, for a fast path."""

    def __init__(
        self,
        near: ShmGroup,
        far: TransportFast,
        hosts: Sequence[Sequence[int]],
        rank: int,
        crowded: bool,
        slack: float,
        for_others: float,
        supervisor: object,
    ) -> None:
        """`supervisor` is held weakly."""

    def fits(self, op: int, dtype: int, red: int, bytes: int) -> bool:
        """Whether `run` takes a collective with so many bytes of input."""

    def agree(self, signature: int, timeout: float) -> object:
        """
        The first step of an operation of the general path. Returns None, or a fault.
        """

    def swap(self, mine: bytes, timeout: float) -> tuple[object, list[bytes]]:
        """
        The leaders exchange bytes. Returns None, or a fault, and the bytes of each host.
        """

    def close(self) -> None:
        """Lets go of the host's memory; it takes no operation any more."""

    def over(self) -> None:
        """A failed operation is over, whose cause is known."""

    @property
    def awaited_near(self) -> list[tuple[int, bool, int, int]]:
        """
        The messages within the host that run, or have failed, as `TransportFast.awaited`.
        """

    @property
    def by_columns(self) -> bool:
        """Whether small collectives go by the columns."""

    @property
    def failed_in(self) -> HostsPart:
        """Where the last operation failed."""

class SymmTable:
    """What a SHMEM library can do."""

    @property
    def name(self) -> str: ...
    @property
    def capabilities(self) -> int: ...
    def limited(self, capabilities: int, /) -> SymmTable: ...
    def unique_id(self, world: int, heap_bytes: int, /) -> tuple[Fault | None, bytes]: ...
    def discard_id(self, uid: bytes, /) -> Fault | None: ...
    def init(
        self, uid: bytes, rank: int, world: int, name: str, timeout: float, /
    ) -> tuple[Fault | None, SymmDomain | None]: ...

def symm_cuda_ipc(path: str, prefix: str = "cuda") -> SymmTable:
    """The table over memory of this host's CUDA or HIP devices."""

def symm_library(path: str) -> SymmTable:
    """
    The table that a shared object exports; OSError if it has none for this version.
    """

symm_table_abi: int = 196253912

def symm_nvshmem(path: str, loaded: bool = False) -> SymmTable:
    """
    The table over NVSHMEM; with `loaded` only if the library is already in the process.
    """

def symm_nvshmem_info() -> tuple[int, str, int]:
    """
    (version, file, nvshmemx_init_status) of the opened NVSHMEM; version 30405 is 3.4.5.
    """

def symm_host() -> SymmTable:
    """The table over this host's shared memory."""

class SymmDomain:
    """
    One PE's end of a symmetric heap: csrc/symm/table.hpp. Addresses are integers.
    """

    @staticmethod
    def said_bytes(world: int) -> int:
        """Bytes of symmetric memory that `open` needs."""

    def open(self, rank: int, world: int, said: int) -> None: ...
    def meet(self, head: SymmHead, tensors: list[Tensor], /) -> Fault | None: ...
    def broadcast(self, head: SymmHead, tensor: Tensor, /) -> Fault | None: ...
    def all_to_all(self, head: SymmHead, input: Tensor, out: Tensor, /) -> Fault | None: ...
    def all_to_all_v(
        self, head: SymmHead, input: Tensor, out: Tensor, splits: list[int], /
    ) -> tuple[Fault | None, SymmRefusal | None, list[int]]: ...
    def dispatch(
        self, head: SymmHead, input: Tensor, out: Tensor, splits: Tensor, results: Tensor, align: int, /
    ) -> tuple[Fault | None, SymmRefusal | None]: ...
    def combine(
        self, head: SymmHead, input: Tensor, out: Tensor, splits: Tensor, results: Tensor, /
    ) -> tuple[Fault | None, SymmRefusal | None]: ...
    def one_shot(self, head: SymmHead, input: Tensor, out: Tensor, /) -> Fault | None: ...
    def two_shot(self, head: SymmHead, input: Tensor, /) -> Fault | None: ...
    def reduce_scatter(self, head: SymmHead, input: Tensor, out: Tensor, rows: int, /) -> Fault | None: ...
    def reduce_tiles(
        self, head: SymmHead, ins: list[SymmTile], owners: list[int], outs: list[SymmTile], /
    ) -> Fault | None: ...
    @property
    def capabilities(self) -> int: ...
    def begins(self, address: int, /) -> bool: ...
    def holds(self, address: int, bytes: int, /) -> bool: ...
    def abort(self, code: int = 0, culprits: Sequence[int] = ()) -> Fault | None: ...
    def leave(self) -> Fault | None: ...
    def allocate(self, bytes: int, align: int, timeout: float, /) -> tuple[Fault | None, int]: ...
    def free(self, address: int, timeout: float, /) -> Fault | None: ...
    def barrier(self, timeout: float, stream: int, /) -> Fault | None: ...
    def ptr(self, address: int, bytes: int, pe: int, /) -> tuple[Fault | None, int]: ...
    def transfer(self, put: bool, plan: NDArray[Any], stream: int, /) -> Fault | None: ...
    def put(self, to: int, source: int, bytes: int, pe: int, stream: int, /) -> Fault | None: ...
    def get(self, to: int, source: int, bytes: int, pe: int, stream: int, /) -> Fault | None: ...
    def fence(self, stream: int, /) -> Fault | None: ...
    def quiet(self, stream: int, /) -> Fault | None: ...
    def put_signal(
        self, to: int, source: int, bytes: int, signal: int, value: int, op: int, pe: int, stream: int, /
    ) -> Fault | None: ...
    def wait_signal(
        self, signal: int, compare: int, value: int, source: int, timeout: float, stream: int, /
    ) -> Fault | None: ...
    def fetch_add(self, target: int, value: int, pe: int, stream: int, /) -> tuple[Fault | None, int]: ...
    def compare_swap(
        self, target: int, expected: int, value: int, pe: int, stream: int, /
    ) -> tuple[Fault | None, int]: ...
    def team_split(
        self, start: int, stride: int, size: int, timeout: float, /
    ) -> tuple[Fault | None, SymmDomain | None]: ...

def symm_bytes(domain: SymmDomain, address: int, bytes: int, /) -> NDArray[Any]:
    """
    Memory that this process can address, as an array of bytes that keeps the domain alive.
    """

def symm_device_bytes(domain: SymmDomain, address: int, bytes: int, device_type: int, device: int, /) -> Any:
    """The same for device memory, with DLPack's device type."""

class SymmFast:
    """
    An operation on symmetric memory in one native call. Each returns False, before it has done anything, if the general path has to run it.
    """

    def __init__(self, calls: FastCalls, domain: SymmDomain) -> None: ...
    def dispatch(
        self,
        op: int,
        input: object | None,
        out: object | None,
        splits: object | None,
        results: object | None,
        align: object | None,
        relaxed: object | None,
        timeout: object | None,
    ) -> object: ...
    def combine(
        self,
        op: int,
        input: object | None,
        out: object | None,
        splits: object | None,
        results: object | None,
        relaxed: object | None,
        timeout: object | None,
    ) -> object: ...
    def move(
        self,
        name: object,
        op: int,
        put: bool,
        tensor: object | None,
        peer: object | None,
        offset: object | None,
        async_op: object | None,
        hints: object | None,
        timeout: object | None,
        base: int,
        count: int,
        dtype: int,
    ) -> object: ...
    def signal(
        self,
        name: object,
        op: int,
        peer: object | None,
        async_op: object | None,
        hints: object | None,
        timeout: object | None,
        word: int,
    ) -> object: ...
    def wait_signal(
        self,
        name: object,
        op: int,
        peer: object | None,
        async_op: object | None,
        hints: object | None,
        timeout: object | None,
        word: int,
        value: int,
    ) -> object: ...
    def atomic(
        self,
        op: int,
        swaps: bool,
        peer: object | None,
        offset: object | None,
        first: object | None,
        second: object | None,
        timeout: object | None,
        base: int,
        count: int,
        dtype: int,
    ) -> object: ...
    def broadcast(
        self,
        op: int,
        tensor: object | None,
        root: object | None,
        relaxed: object | None,
        timeout: object | None,
    ) -> object: ...
    def all_to_all(
        self,
        op: int,
        input: object | None,
        out: object | None,
        relaxed: object | None,
        timeout: object | None,
    ) -> object: ...
    def one_shot(
        self,
        op: int,
        input: object | None,
        out: object | None,
        red: object | None,
        relaxed: object | None,
        timeout: object | None,
    ) -> object: ...
    def two_shot(
        self, op: int, input: object | None, red: object | None, timeout: object | None
    ) -> object: ...
    def reduce_scatter(
        self,
        op: int,
        input: object | None,
        out: object | None,
        red: object | None,
        last_dim: object | None,
        relaxed: object | None,
        timeout: object | None,
    ) -> object: ...
    def all_to_all_v(
        self,
        op: int,
        input: object | None,
        out: object | None,
        splits: object | None,
        relaxed: object | None,
        timeout: object | None,
    ) -> object: ...

def symm_nccl_windows(
    library: NcclLibrary,
    comm: int,
    window: int,
    memory: int,
    bytes: int,
    rank: int,
    world: int,
    signals: int,
    copy: int,
    query: int,
    last_error: int,
    /,
) -> SymmDomain:
    """
    The symmetric heap on a window of the library's memory, which it frees at the end.
    """

def symm_nccl_windows_reserve(world: int) -> int:
    """Bytes of such a heap that the table keeps for itself."""
