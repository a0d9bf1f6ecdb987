"""The communicator of Gloo.

Data moves as bytes. Gloo's own reductions serve where they are defined as unicomm's are: sums and products of
plain numbers. Everything else, such as bfloat16, AVG or complex numbers, is composed
(comms/execution/composed/completion.py).
"""

from __future__ import annotations

import ctypes
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch.distributed import (
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOp,
    ScatterOptions,
)

from unicomm.backends.bootstrap import addresses
from unicomm.backends.out_of_band import (
    CHECK_HINT,
    COMPARE,
    SILENCE_HINT,
    OutOfBandBackend,
    Sockets,
    checks_signatures,
    connect_all,
)
from unicomm.c10d.compat import AllgatherOptions
from unicomm.comms.backend import Capabilities, Exchange, OpensExchange, Reconfigures, Setup
from unicomm.comms.operations.call import Call, Message
from unicomm.comms.operations.reduction import RedOpType
from unicomm.comms.options import Hint

from .connect import Connecting
from .connections import Pairs
from .messages import GlooExchange, Results, await_all, tag, waiters
from .waits import Waits

_HINTS = (
    Hint(
        "hostname",
        str,
        "",
        "Name or address to listen on. Default: of UNICOMM_INTERFACE, or of the way to the store's host.",
    ),
    Hint("interface", str, "", "Network interface to use, such as eth0. Default: as for hostname."),
    SILENCE_HINT,
    CHECK_HINT,
)
_REDUCTIONS = {RedOpType.SUM: ReduceOp.SUM, RedOpType.PRODUCT: ReduceOp.PRODUCT}
_NEVER = timedelta(days=1000)  # Gloo's own deadline: the fault channel keeps the operation's
_SLICE = timedelta(seconds=1)  # of waiting, after which this rank checks whether it waits in vain
_FORGETS = 2.0  # seconds after a fault in which Gloo ends an operation, if it ever does
forgotten: list[str] = []  # communicators of this process whose group never ended, and could not be freed


class GlooBackend(OutOfBandBackend, OpensExchange, Reconfigures):
    name = library = "gloo"
    receives_from_any = overlaps = True
    capabilities = Capabilities(
        device_types=frozenset({"cpu"}),
        operations=frozenset(
            [
                "broadcast",
                "all_reduce",
                "all_gather",
                "all_gather_single",
                "all_to_all_single",
                "all_to_all_v_single",
                "gather",
                "scatter",
                "barrier",
            ]
        ),
        reduce_dtypes=frozenset(
            {torch.float32, torch.float64, torch.int32, torch.int64, torch.int8, torch.uint8}
        ),
        reduce_ops=frozenset(_REDUCTIONS),
        bytes_only=True,
        checks_mismatch=True,
        hints=_HINTS,
    )

    def __init__(self, group: Any, setup: Setup, pairs: Pairs | None, sockets: list[Sockets]) -> None:
        self._group = group
        self._pairs = pairs
        self._waits = Waits()
        self._name = setup.name
        self._lock = threading.Lock()
        self._limit = _NEVER if pairs else timedelta(seconds=setup.timeout)
        super().__init__(setup, sockets)

    @classmethod
    def connect(cls, setup: Setup) -> GlooBackend:
        each = 2 if checks_signatures(setup) else 1
        addresses.guard_store(setup.store)
        gloo = Connecting(setup, each)
        if setup.size == 1:
            return cls(gloo.group, setup, None, [{}])
        address = gloo.pairs.own[0] if gloo.pairs else setup.hints["hostname"] or socket.gethostname()
        sockets = connect_all(setup, address, each, "gloo", gloo.trouble)
        return cls(gloo.group, setup, gloo.pairs, sockets)

    @classmethod
    def reachable_at(cls, hints: Mapping[str, Any]) -> str:
        return addresses.reachable_at(hints["interface"], hints["hostname"])

    def run(self, call: Call) -> None:
        self._await(getattr(self, f"_{call.name}")(call))

    def _await(self, work: Any) -> None:
        """Waits for a collective, in slices: Gloo may have forgotten it, and Ctrl-C must have its effect."""
        while True:
            was_over = work.is_completed()
            try:
                work.wait(_SLICE if self._pairs else self._limit)
                return
            except RuntimeError:
                if was_over or not self._pairs:
                    raise
            if not work.is_completed():
                self._leave_forgotten()

    def _leave_forgotten(self) -> None:
        """Raises the fault if Gloo does not end what waits for connections that have ended.

        Gloo's thread takes a message off its list when the receiver is ready. If it cannot write then,
        because the connection has just ended, the message is on no list whose waiters get an error.
        """
        fault = self.fault()
        if fault is None or time.monotonic() < self.channel.fault_at + _FORGETS:
            return
        with self._lock:
            # The group's destructor would wait for the thread that waits for ever.
            if self._group is not None:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
                self._group = None
                forgotten.append(self._name)
        raise fault

    def exchange(self, messages: Sequence[Message], timeout: float) -> None:
        # Receives first: gloo then has a place for whatever arrives.
        ordered = sorted(messages, key=lambda m: m.send)
        results: Results = queue.SimpleQueue()
        works: list[Any] = []
        with self._in_messages(ordered, timeout, COMPARE) as awaits:
            self._group.set_timeout(self._limit)
            try:
                # No name here may mean the group, such as its bound method.
                for m in ordered:
                    start = "send" if m.send else "recv"
                    works.append(getattr(self._group, start)([m.tensor], m.peer, tag(m)))
                    self._waits.add(works[-1])
            except RuntimeError:
                works.clear()
                raise
            # In another thread, as nothing interrupts a thread that waits in Gloo for a message.
            waiters.run(partial(await_all, works, awaits, self._limit, results))
            while True:
                try:
                    failure = results.get(timeout=_SLICE.total_seconds())
                except queue.Empty:
                    self._leave_forgotten()
                    continue
                if failure is not None:
                    raise failure
                return

    def open_exchange(self) -> Exchange:
        return GlooExchange(self, lambda: self._group, self._limit, self._waits)

    def _end(self) -> None:
        if self._group is not None and self._pairs is not None:
            self._pairs.end()
            self._waits.end()

    def _interrupt(self) -> None:
        with self._lock:
            self._end()
        super()._interrupt()

    def _drop(self) -> None:
        with self._lock:
            self._end()
            group, self._group = self._group, None
        del group  # its destructor waits for Gloo's threads

    def close(self) -> None:
        super().close()
        with self._lock:
            group, self._group = self._group, None
        del group

    def forget(self) -> None:
        # The group's destructor joins threads, which a forked child has not: it must never run here.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
        super().forget()

    # --- what Gloo does itself -----------------------------------------------------------------------------

    def _options(self, kind: Callable[[], Any]) -> Any:
        options = kind()
        options.timeout = self._limit
        return options

    def _broadcast(self, call: Call) -> Any:
        options = self._options(BroadcastOptions)
        options.rootRank = call.root
        return self._group.broadcast(call.outputs, options)

    def _all_reduce(self, call: Call) -> Any:
        assert call.op is not None
        options = self._options(AllreduceOptions)
        options.reduceOp = _REDUCTIONS[RedOpType(call.op.type)]
        return self._group.allreduce([t.detach() for t in call.outputs], options)

    def _all_gather(self, call: Call) -> Any:
        return self._group.allgather([call.outputs], call.inputs, self._options(AllgatherOptions))

    def _all_gather_single(self, call: Call) -> Any:
        options = self._options(AllgatherOptions)
        return self._group._allgather_base(call.outputs[0], call.inputs[0], options)

    def _all_to_all_single(self, call: Call) -> Any:
        options = self._options(AllToAllOptions)
        return self._group.alltoall_base(
            call.outputs[0], call.inputs[0], call.out_splits or [], call.in_splits or [], options
        )

    _all_to_all_v_single = _all_to_all_single

    def _gather(self, call: Call) -> Any:
        options = self._options(GatherOptions)
        options.rootRank = call.root
        return self._group.gather([call.outputs] if call.outputs else [], call.inputs, options)

    def _scatter(self, call: Call) -> Any:
        options = self._options(ScatterOptions)
        options.rootRank = call.root
        return self._group.scatter(call.outputs, [call.inputs] if call.inputs else [], options)

    def _barrier(self, call: Call) -> Any:
        return self._group.barrier(self._options(BarrierOptions))

    @classmethod
    def version(cls) -> str:
        return f"torch {torch.__version__}"
