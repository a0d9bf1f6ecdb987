"""What the native fast path over several hosts (csrc/hosts/fast.hpp) calls, and the errors of its faults."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NoReturn, Protocol

from unicomm import _core
from unicomm._core import FaultCode
from unicomm.backends.transport import TransportBackend, has_native_form, input_bytes, run_native
from unicomm.comms.errors import CommError
from unicomm.comms.failures.faults import core_error
from unicomm.comms.operations.call import Call

from .first_step import Links, explain

_PART = _core.HostsPart


class Supervised(Links, Protocol):
    """The backend. The last two return the communicator's error for one of a part, and end the others."""

    slack: float  #: seconds that ranks wait for other hosts beyond an operation's timeout

    def abort(self) -> None:
        """Ends the communicator."""

    def near_failed(self, error: CommError, late: bool) -> CommError:
        """`late`: some of the host's ranks may have waited for other hosts."""

    def far_failed(self, error: CommError, peers: Collection[int]) -> CommError: ...


class Supervisor:
    """The methods that the native core calls return whether the operation must fail.

    Attributes:
        native: the operations of the native core.
    """

    def __init__(
        self,
        backend: Supervised,
        group: Any,
        far: TransportBackend,
        crowded: bool,
        for_others: float,
    ) -> None:
        """`group`: the memory of this host. `crowded`: whether some host has more ranks than cores.
        `for_others`: seconds that ranks give on top to those of their host that wait for others."""
        self._backend, self._far = backend, far
        self._mismatch: CommError | None = None
        self._fast: _core.FastPath | None = None
        layout = backend.layout
        self.native = _core.HostsFast(
            group,
            far.supervisor.native,
            layout.hosts,
            layout.rank,
            crowded,
            backend.slack,
            for_others,
            self,
        )

    def fast_path(self, recorder: _core.Recorder, index: int, timeout: float) -> _core.FastPath:
        fast = _core.FastPath(self.native, recorder, index, timeout)
        self._fast = self._far.supervisor.fast = fast
        return fast

    def runs(self, call: Call) -> bool:
        """Whether `run` takes the call: the same on all ranks that call the same."""
        codes = call.operation.code, call.dtype_code, call.red_code
        return has_native_form(call) and self.native.fits(*codes, input_bytes(call))

    def run(self, call: Call) -> None:
        """Runs a collective of the general path."""
        self._far.keep(*call.inputs, *call.outputs)
        fault = run_native(self.native, call)
        if fault is not None:
            self.raise_fault(fault, call.timeout)
        self._far.keep()

    def agree(self, call: Call) -> None:
        """The first step of a collective whose data it does not move."""
        fault: Any = self.native.agree(_core.hosts_signature(*call.signature), call.remaining())
        if fault is None:
            return
        if FaultCode(fault[0]) is FaultCode.MISMATCH:
            raise explain(self._backend, call.signature, call.remaining())
        self.raise_fault(fault, call.timeout)

    def swap(self, mine: bytes, seconds: float) -> list[bytes]:
        """Exchanges bytes with the other leaders, as a part of an operation. Returns those of each host."""
        fault, slots = self.native.swap(mine, seconds)
        if fault is not None:
            self.raise_fault(fault, seconds)
        return slots

    def explain(self, *signature: int) -> bool:
        """The ranks have called different things. Collective: they tell each other what."""
        assert self._fast is not None
        try:
            self._mismatch = explain(self._backend, signature, self._fast.timeout)
        except CommError as error:
            self._mismatch = error
        return True

    def abort(self) -> bool:
        """Ends the communicator, as of an operation in which a signal handler has raised."""
        self._backend.abort()
        return True

    def raise_fault(self, fault: Any, timeout: float) -> NoReturn:
        try:
            self._raise_fault(fault, timeout)
        finally:
            self.native.over()

    def _raise_fault(self, fault: Any, timeout: float) -> NoReturn:
        part, backend = self.native.failed_in, self._backend
        if part in (_PART.NEAR, _PART.LATE):
            raise backend.near_failed(core_error(fault, timeout), part is _PART.LATE)
        if part is _PART.NONE:
            assert self._mismatch is not None
            error, self._mismatch = self._mismatch, None
            raise error
        try:
            self._far.raise_fault(fault, timeout)
        except CommError as error:
            peers = {m.peer for m in self._far.supervisor.awaited()} or backend.layout.elsewhere
            raise backend.far_failed(error, peers) from error
