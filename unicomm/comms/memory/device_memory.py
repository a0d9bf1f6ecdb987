"""DeviceMemory: symmetric memory on devices, its tensors, and the errors of its kernels.

Operations are put on the current stream, so a refusal or a disagreement is known only when the device has
reached it. All ranks find the same, but not at the same call: raising the error at the next call would bring
them out of step. So it is raised where the host waits for the device, which all ranks do at the same places.
A wait that times out ends the communicator; the watchdog raises it, as for other operations.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from unicomm.comms.errors import AbortedError, CommError, CommTimeoutError, InvalidArgumentError
from unicomm.comms.execution.one_sided import attempt, issue
from unicomm.comms.failures.faults import rank_list, told
from unicomm.comms.failures.missing_ranks import explain
from unicomm.comms.operations.symmetric_table import Capability, bytes_at
from unicomm.comms.operations.table import BY_CODE

from . import device_domain
from .device_domain import DeviceDomain, Outcome
from .symmetric import SymmetricMemory, disagreement

if TYPE_CHECKING:
    from unicomm.comms.options import Timeout

_GRACE = 2.0  # seconds that the kernels have to report a timeout before the watchdog ends them


_explaining = threading.RLock()  # a signal handler may ask, too


class DeviceMemory(SymmetricMemory):
    """The symmetric memory of a communicator on devices. `domain` is a `DeviceDomain`."""

    domain: DeviceDomain
    counts_on_device = True
    _late: CommError | None = None  # one error, whoever asks first

    def open(self, said: torch.Tensor | None = None) -> None:
        said = self.allocate(self.domain.said_bytes(self.size)) if said is None else said
        said.zero_()
        self.domain.open(self.rank, self.size, said.data_ptr())
        issue(self.engine, "symm_init", lambda limit: self.check(self.domain.barrier(limit), limit))
        if Capability.POINTER in self.capabilities and not self.domain.far:
            self.capabilities |= Capability.SIGNAL | Capability.ATOMICS  # by our kernels

    def grace(self) -> float:
        return _GRACE

    def reduces(self, dtype: torch.dtype, red: int) -> bool:
        return super().reduces(dtype, red) and device_domain.reduces(dtype, red)

    def atomic(self, op: str, words: tuple[int, ...], peer: int, limit: float) -> tuple[Any, int]:
        return self.domain.atomic(op, words, peer, limit)

    def _bytes(self, address: int, nbytes: int) -> torch.Tensor:
        return bytes_at(self.domain.native, address, nbytes, self.engine.member.device)

    def abort(self, error: CommError | None = None) -> None:
        self.domain.abort(*told(error))  # by our kernels, which look at a word of their own

    # --- errors of the device ----------------------------------------------------------------------

    def settle(self, limit: float) -> None:
        self.domain.wait(limit)
        self.engine.check_broken()
        if (outcome := self.domain.outcome()) is not None:
            raise self._error(outcome, limit)

    def synchronize(self, timeout: Timeout = None) -> None:
        super().synchronize(timeout)
        engine = self.engine
        limit = engine.per_op("symm_barrier", None, timeout)
        with engine.in_order():
            engine.executor.follow_last()
            engine.raise_recorded("symm_barrier", 0, lambda: attempt(engine, self.settle, limit))

    def late_error(self) -> CommError | None:
        found = self.domain.outcome(clear=False)
        if found is None or found.kind != device_domain.LATE:
            return None
        with _explaining:
            if self._late is None:
                self._late = error = self._error(found, 0.0)
                if isinstance(error, CommTimeoutError):
                    explain(error, self.engine.member.uid)
                    error.explained = True  # the device knows the missing ranks
            return self._late

    def _error(self, outcome: Outcome, limit: float) -> CommError:
        row = BY_CODE.get(outcome.op)
        error = self._error_of(outcome, limit)
        error.op = row.name if row is not None else None
        return error

    def _error_of(self, outcome: Outcome, limit: float) -> CommError:
        who = outcome.who
        if outcome.kind == device_domain.FULL:
            return InvalidArgumentError(
                f"rank {who} would receive into row {outcome.rows}, behind its out; nothing was written",
                culprits=(who,),
                hint="make out larger on all ranks: the rows of all blocks, padding included",
            )
        if outcome.kind == device_domain.SPLITS:
            return InvalidArgumentError(
                f"the splits of rank {who} go beyond the rows of input, or are negative; nothing was written",
                culprits=(who,),
                hint="look at how they were computed there",
            )
        if outcome.kind == device_domain.MISMATCH:
            return self._mismatch(outcome.each)
        absent = [rank for rank, each in enumerate(outcome.each) if not each[0]]
        if outcome.kind == device_domain.ABORTED:
            return AbortedError("the communicator was ended while the device waited", hint="make a new one")
        within = f" within {limit:g} s" if limit else ""
        return CommTimeoutError(
            f"{rank_list(absent)} did not come to it on the device{within}",
            culprits=absent,
            hint="look at what these ranks do; timeout= and comm.set_timeout allow more",
        )

    def _mismatch(self, each: list[list[int]]) -> CommError:
        """Makes the error of ranks in different calls; culprits are the minority, if any, else all."""
        heads = [(here, signature) for here, _, _, signature in each]
        most = max(heads, key=heads.count)
        tie = 2 * heads.count(most) <= len(heads)
        culprits = [rank for rank, head in enumerate(heads) if tie or head != most]
        claims = [
            (rank, called & 0xFFFFFFFF if here else 0, 0, called >> 40 & 0xFF, root, 0, 0)
            for rank, (here, called, root, _) in enumerate(each)
        ]
        return disagreement(culprits, claims)
