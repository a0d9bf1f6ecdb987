"""The communicator of NCCL and RCCL: one `ncclComm_t`, made at creation, used on the current stream.

Collectives that the library has are its own; lists and splits of rows are groups of sends and receives, and
v-reductions groups of reduces. What it cannot reduce (bitwise operations, 16-bit integers) is composed in
comms/completion.py. Reductions in float16, bfloat16 and float8 are added up as the library does, which may
round at each step, unlike on the other backends.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from unicomm.backends import addresses
from unicomm.comms.backend import Backend, Capabilities, Legacy, OneSided, Setup
from unicomm.comms.call import Call, Message
from unicomm.comms.errors import CommError, UnsupportedError
from unicomm.comms.reduction import RedOpType, ReduceOp
from unicomm.comms.streams import Streams, TorchStreams

from . import succession, types
from .causes import known_cause
from .errors import IN_PROGRESS, SUCCESS, aborted, log_text
from .hints import HINTS, settings_of, signals_of
from .library import NCCL, RCCL, Library, Vendor, open_library, version_text
from .making import NOBODY, Maker
from .memory import Memory, PoolMemory, Registrations, Windows, memory_of

_HERE = contextlib.nullcontext()

# What can be registered, and the function that does it.
_REGISTERS = {"local": "CommRegister", "symmetric": "CommWindowRegister"}
_NEEDED = {"allocates": "MemAlloc", "registers": "CommRegister", "windows": "PutSignal"}

_OWN = frozenset(
    {
        "broadcast",
        "all_reduce",
        "reduce",
        "all_gather_single",
        "reduce_scatter",
        "reduce_scatter_v",
        "reduce_scatter_single",
        "barrier",
    }
)


class NcclBackend(Backend):
    """See the module. A test's double is this class with another library, streams and device."""

    name = "nccl"
    vendor: ClassVar[Vendor] = NCCL
    capabilities = Capabilities(
        device_types=frozenset({"cuda"}),
        operations=_OWN,
        reductions=types.reductions(fp8=False),
        reconfigures=True,
        hints=HINTS,
    )

    # --- what a double replaces ----------------------------------------------------------------------------

    @classmethod
    def library(cls) -> Library:
        return open_library(cls.vendor)

    @classmethod
    def device_streams(cls, device: torch.device) -> Streams:
        return TorchStreams(device)

    @classmethod
    def on_device(cls, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """Within, the library's calls of this thread are for that device."""
        if torch.cuda.current_device() == device.index:
            return _HERE
        return torch.cuda.device(device)

    @classmethod
    def device_memory(cls, library: Library, device: torch.device) -> Memory:
        """The library's memory for tensors of that device."""
        return PoolMemory(library, device)

    @classmethod
    def fp8(cls, library: Library, device: torch.device) -> bool:
        """Whether the library reduces float8 on that device."""
        since = cls.vendor.fp8_since
        if since is None or library.version < since:
            return False
        return torch.cuda.get_device_capability(device) >= (9, 0)

    # --- life ----------------------------------------------------------------------------------------------

    def __init__(self, library: Library, comm: int, setup: Setup) -> None:
        self._library = library
        self._native = library.native
        self._comm = comm
        self._rank, self._size = setup.rank, setup.size
        self._device = setup.device
        self._streams = self.device_streams(setup.device)
        self._splits = setup.hints["split_by"] == "split" and library.has("CommSplit")
        self._token = torch.zeros(1, dtype=torch.uint8, device=setup.device)
        self._lock = threading.Lock()
        self._aborted = False
        self._began = library.listen()
        self._uid = setup.rendezvous.uid
        # One that may be reconfigured is revoked instead of aborted, so that it can be shrunk after that.
        shrinks = library.has("CommShrink") and setup.hints["reconfigure_by"] == "shrink"
        self._revokes = setup.dynamic and shrinks and library.has("CommRevoke")
        self._revoked = 0
        operations = _OWN
        for function, operation in (
            ("AlltoAll", "all_to_all_single"),
            ("Gather", "gather_single"),
        ):
            if library.has(function):
                operations |= {operation}
        kinds = [kind for kind, name in _REGISTERS.items() if library.has(name)]
        self.capabilities = replace(
            self.capabilities,
            operations=operations,
            reductions=types.reductions(self.fp8(library, setup.device)),
            allocates=library.has("MemAlloc"),
            registers=frozenset(kinds),
            windows=library.has("PutSignal") and "symmetric" in kinds,
            bequeaths=shrinks,
        )
        self._direct = types.direct(self.capabilities.reductions)
        self._memory = memory_of(library, setup.device, self.device_memory)
        self._registrations = Registrations(library, self._memory)
        self._windows = Windows(self, self._registrations, signals_of(setup.hints, library))

    @classmethod
    def connect(cls, setup: Setup) -> NcclBackend:
        library = cls.library()
        settings = settings_of(setup.hints, setup.name, library)
        if str(setup.device) == setup.device.type != "cpu":
            # "The current one" is another one in other threads, which the library's calls are made in.
            current = torch.get_device_module(setup.device).current_device()
            setup = replace(setup, device=torch.device(setup.device.type, current))
        maker = cls._maker(library, setup.device, settings, setup.timeout)
        parent = setup.parent
        if isinstance(parent, NcclBackend) and parent._splits:
            comm = maker.split(parent._alive(), setup.color, setup.rank)
        elif setup.again and (plan := succession.agreed(setup, library)) is not None:
            comm = succession.make(plan, setup, library, maker)
        else:
            comm = maker.new(setup.rendezvous, setup.rank, setup.size, setup.hints["large_world"])
        return cls(library, comm, setup)

    @classmethod
    def _maker(
        cls, library: Library, device: torch.device, settings: Sequence[tuple[str, Any]], timeout: float
    ) -> Maker:
        return Maker(library, lambda: cls.on_device(device), settings, timeout)

    def split_away(self, timeout: float) -> None:
        if self._splits:
            self._maker(self._library, self._device, [], timeout).split(self._alive(), NOBODY, 0)

    def streams(self) -> Streams:
        return self._streams

    def close(self) -> None:
        with self._lock:
            comm, self._comm = self._comm, 0
            revoked, self._revoked = self._revoked, 0
        if revoked:
            with self.on_device(self._device):
                self._native.abort(revoked)
        if not comm:
            return
        with self.on_device(self._device):
            self._registrations.close(comm)
            if self._library.has("CommFinalize"):
                self._native.finalize(comm)
                self._settle(comm)
            self._library.check("CommDestroy", self._native.destroy(comm))

    def _settle(self, comm: int) -> None:
        """With blocking=0 finalize goes on by itself; destroy wants it done."""
        end = time.monotonic() + 5.0
        while self._native.async_error(comm) == (SUCCESS, IN_PROGRESS) and time.monotonic() < end:
            time.sleep(0.001)

    def abort(self) -> None:
        # A call of the library may be under way in another thread, and this is what ends it.
        locked = self._lock.acquire(timeout=0.2)
        try:
            comm, self._comm = self._comm, 0
            self._aborted = True
            if comm:
                with self.on_device(self._device):
                    if self._revokes and self._revoke(comm):
                        self._revoked = comm
                    else:
                        self._native.abort(comm)
        finally:
            if locked:
                self._lock.release()
        self._registrations.close(0)

    def _revoke(self, comm: int) -> bool:
        """Ends what runs on it, here; it stays as something to shrink."""
        result = self._native.revoke(comm, 0)
        if result == IN_PROGRESS:
            self._settle(comm)
            result = self._native.async_error(comm)[1]
        return bool(result == SUCCESS)

    def bequeath(self) -> Legacy | None:
        with self._lock:
            comm, clean = (self._comm, True) if self._comm else (self._revoked, False)
            if not comm or not self.capabilities.bequeaths:
                return None
            self._comm = self._revoked = 0
        device = self._device
        with self.on_device(device):
            self._registrations.close(comm if clean else 0)
        return succession.Parent(
            self._library, lambda: self.on_device(device), comm, self._uid, self._rank, self._size, clean
        )

    @classmethod
    def reachable_at(cls, hints: Mapping[str, Any]) -> str:
        return addresses.of_interface(addresses.chosen_interface()) or addresses.here(None).address

    def forget(self) -> None:
        self._comm = 0

    def late_error(self) -> CommError | None:
        with self._lock:
            if not self._comm:
                return aborted()
            asked, state = self._native.async_error(self._comm)
            result = asked if asked != SUCCESS else state
            if result in (SUCCESS, IN_PROGRESS):
                self._library.trim_log()
                return None
            return self._library.error("operation", result, self._comm, self._began)

    def explain(self, error: CommError) -> None:
        with self._lock:
            _, lines = self._library.said(self._comm, self._began)
        error.message += log_text(self.vendor.title, lines)
        error.hint = known_cause("\n".join(lines)) or error.hint

    def memory(self) -> dict[str, int]:
        if not self._comm or not self._library.has("CommMemStats"):
            return {}
        result, total = self._native.mem_stats(self._comm, 0)
        return {"library": total} if result == SUCCESS else {}

    # --- memory --------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> torch.Tensor:
        return self._memory.allocate(nbytes)

    def allocated_here(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self._device and self._memory.block_of(tensor)[0] != 0

    def bytes_allocated(self) -> int:
        return self._memory.in_use()

    def memory_pool(self) -> Any | None:
        return self._memory.pool

    def lacks(self, capability: str) -> UnsupportedError | None:
        function = _REGISTERS.get(capability) or _NEEDED[capability]
        try:
            self._library.need(function, capability)
        except UnsupportedError as error:
            return error
        return None

    def registered_range(self, tensor: torch.Tensor, symmetric: bool) -> tuple[int, int]:
        return self._registrations.range_of(tensor, symmetric)

    def register(self, tensor: torch.Tensor, symmetric: bool, timeout: float) -> None:
        with self.on_device(self._device):
            self._registrations.add(self._alive(), tensor, symmetric, timeout)

    def deregister(self, tensor: torch.Tensor) -> None:
        with self.on_device(self._device):
            self._registrations.remove(self._alive(), tensor)

    def one_sided(self) -> OneSided | None:
        return self._windows if self.capabilities.windows else None

    @classmethod
    def version(cls) -> str:
        return version_text(cls.library().version)

    # --- operations ----------------------------------------------------------------------------------------

    def _alive(self) -> int:
        if not self._comm:
            raise aborted()
        return self._comm

    def _stream(self) -> int:
        return self._streams.handle(self._streams.current())

    def _do(self, what: str, result: int) -> None:
        if result == IN_PROGRESS:
            self._progress(what)
        elif result != SUCCESS:
            self._library.check(what, result, self._comm, self._began)

    def _progress(self, what: str) -> None:
        """With blocking=0: until the call has done what it had to do on the host."""
        while self._comm:
            asked, state = self._native.async_error(self._comm)
            self._library.check(what, asked, self._comm, self._began)
            if state != IN_PROGRESS:
                self._library.check(what, state, self._comm, self._began)
                return
            time.sleep(20e-6)
        raise aborted()

    @contextlib.contextmanager
    def _group(self, what: str) -> Iterator[None]:
        self._do(what, self._native.group_start())
        try:
            yield
        finally:
            result = self._native.group_end()
        self._do(what, result)

    def run(self, call: Call) -> None:
        with self.on_device(self._device):
            getattr(self, f"_{call.name}")(call)

    def exchange(self, messages: Sequence[Message], timeout: float) -> None:
        comm, stream = self._alive(), self._stream()
        with self.on_device(self._device), self._group("Send/Recv"):
            for send, peer, tensor in messages:
                act = self._native.send if send else self._native.recv
                self._do("Send/Recv", act(tensor.data_ptr(), tensor.nbytes, types.BYTE, peer, comm, stream))

    def _reduction(self, call: Call) -> tuple[int, int, int]:
        """(element type, operation, elements for each of ours) for the library; then `_done_with` it."""
        assert call.op is not None
        assert call.dtype is not None
        dtype, kind, width = types.reduced_as(call.dtype, call.op.type)
        number = types.number_of(dtype)
        if kind is not RedOpType.PREMUL_SUM:
            return number, types.op_number(kind), width
        result, op = self._native.premul_sum(types.factor_bytes(call.op, dtype), number, self._alive())
        self._do("RedOpCreatePreMulSum", result)
        return number, op, width

    def _done_with(self, op: int) -> None:
        """The library keeps a factor for as long as it needs it."""
        if op >= types.FIRST_MADE:
            self._do("RedOpDestroy", self._native.op_destroy(op, self._alive()))

    def _reduced(
        self, call: Call, what: str, function: Callable[..., int], to: torch.Tensor, count: int, *root: int
    ) -> None:
        """A reduction of one tensor into another; `count`: elements of ours."""
        dtype, op, width = self._reduction(call)
        try:
            pointers = call.inputs[0].data_ptr(), to.data_ptr()
            result = function(*pointers, count * width, dtype, op, *root, self._alive(), self._stream())
            self._do(what, result)
        finally:
            self._done_with(op)

    def direct_all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> Callable[[], None] | None:
        numbers = self._direct.get((tensor.dtype, op.type))
        if numbers is None:
            return None

        def put() -> None:
            at = tensor.data_ptr()
            with self.on_device(self._device):
                result = self._native.all_reduce(
                    at, at, tensor.numel(), *numbers, self._alive(), self._stream()
                )
                self._do("AllReduce", result)

        return put

    def _all_reduce(self, call: Call) -> None:
        to = call.outputs[0]
        self._reduced(call, "AllReduce", self._native.all_reduce, to, to.numel())

    def _reduce(self, call: Call) -> None:
        source = call.inputs[0]
        to = call.outputs[0] if call.outputs else source
        self._reduced(call, "Reduce", self._native.reduce, to, source.numel(), call.root)

    def _reduce_scatter_single(self, call: Call) -> None:
        to = call.outputs[0]
        self._reduced(call, "ReduceScatter", self._native.reduce_scatter, to, to.numel())

    def _moved(
        self, what: str, function: Callable[..., int], source: int, to: int, nbytes: int, *root: int
    ) -> None:
        """A movement of `nbytes` for each rank, between two places."""
        self._do(what, function(source, to, nbytes, types.BYTE, *root, self._alive(), self._stream()))

    def _broadcast(self, call: Call) -> None:
        tensor = call.outputs[0] if call.outputs else call.inputs[0]
        at = tensor.data_ptr()
        self._moved("Broadcast", self._native.broadcast, at, at, tensor.nbytes, call.root)

    def _all_gather_single(self, call: Call) -> None:
        # Not by call.root: as a part of a rooted operation it has one.
        source, to = call.inputs[0], call.outputs[0].data_ptr()
        self._moved("AllGather", self._native.all_gather, source.data_ptr(), to, source.nbytes)

    def _gather_single(self, call: Call) -> None:
        source, to = call.inputs[0], call.outputs[0].data_ptr() if call.outputs else 0
        self._moved("Gather", self._native.gather, source.data_ptr(), to, source.nbytes, call.root)

    def _all_to_all_single(self, call: Call) -> None:
        source, to = call.inputs[0], call.outputs[0].data_ptr()
        share = source.nbytes // self._size
        self._moved("AlltoAll", self._native.all_to_all, source.data_ptr(), to, share)

    def _reduce_scatter(self, call: Call) -> None:
        """A group of reduces, each with its own root and size."""
        to, comm, stream = call.outputs[0], self._alive(), self._stream()
        dtype, op, width = self._reduction(call)
        try:
            with self._group("Reduce"):
                for root, share in enumerate(call.inputs):
                    at = share.data_ptr()
                    out = to.data_ptr() if root == self._rank else at
                    if count := share.numel() * width:
                        result = self._native.reduce(at, out, count, dtype, op, root, comm, stream)
                        self._do("Reduce", result)
        finally:
            self._done_with(op)

    _reduce_scatter_v = _reduce_scatter

    def _barrier(self, call: Call) -> None:
        pointer = self._token.data_ptr()
        op = types.op_number(RedOpType.MAX)
        result = self._native.all_reduce(pointer, pointer, 1, types.BYTE, op, self._alive(), self._stream())
        self._do("AllReduce", result)


class RcclBackend(NcclBackend):
    """AMD's library: the same interface, another file."""

    name = "rccl"
    vendor = RCCL


__all__ = ["NcclBackend", "RcclBackend"]
