"""Gloo: TCP between any hosts, through torch's `ProcessGroupGloo`, one for each communicator.

Beside Gloo's, each rank has connections of our own to the others: one on which ranks compare what they are
about to run (agree.py), and one for what they have to tell each other when something goes wrong (watch.py).

Data moves as bytes. Gloo's own reductions serve where they are defined as ours are (sums and products of
plain numbers); everything else, such as bfloat16, AVG or complex numbers, is composed
(comms/execution/completion.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOp,
    ScatterOptions,
)

from unicomm.backends.bootstrap import addresses
from unicomm.backends.out_of_band import sockets as mesh
from unicomm.backends.out_of_band.backend import CHECK_HINT, WatchedBackend, checks
from unicomm.backends.out_of_band.fault_channel import COMPARE, Awaited, Operation
from unicomm.backends.out_of_band.signatures import AgreementBySockets
from unicomm.backends.out_of_band.sockets import Sockets
from unicomm.comms.backend import Capabilities, Exchange, OpensExchange, Reconfigures, Setup
from unicomm.comms.operations.call import Call, Message
from unicomm.comms.operations.reduction import RedOpType
from unicomm.comms.options import Hint

from .connect import Connecting
from .connections import Pairs
from .messages import GlooExchange, await_messages, tag, waiters

_HINTS = (
    Hint(
        "hostname",
        str,
        "",
        "Name or address to listen on. Default: of UNICOMM_INTERFACE, or of the way to the store's host.",
    ),
    Hint("interface", str, "", "Network interface to use, such as eth0. Default: as for hostname."),
    CHECK_HINT,
)
_REDUCTIONS = {RedOpType.SUM: ReduceOp.SUM, RedOpType.PRODUCT: ReduceOp.PRODUCT}
_NEVER = timedelta(days=1000)  # Gloo's own deadline: the watch has ours
_SLICE = timedelta(seconds=1)  # of waiting, after which it is looked whether that is of any use
_FORGETS = 2.0  # seconds after which what Gloo has not ended, it never will
forgotten: list[str] = []  # communicators of this process whose Gloo could not be freed, for that


class GlooBackend(WatchedBackend, OpensExchange, Reconfigures):
    name = library = "gloo"
    receives_from_any = True
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
        self._name = setup.name
        self._lock = threading.Lock()
        self._said: Sockets = sockets[1] if len(sockets) > 1 else {}
        self._limit = _NEVER if pairs else timedelta(seconds=setup.timeout)
        super().__init__(
            setup, sockets[0], AgreementBySockets(self._said, setup.rank) if self._said else None
        )

    @classmethod
    def connect(cls, setup: Setup) -> GlooBackend:
        each = 2 if checks(setup) else 1
        addresses.guard_store(setup.store)
        gloo = Connecting(setup, each)
        if setup.size == 1:
            return cls(gloo.group, setup, None, [{}])
        address = gloo.pairs.own[0] if gloo.pairs else setup.hints["hostname"] or socket.gethostname()
        sockets = mesh.connect(setup.rendezvous, address, each, setup.name, "gloo", gloo.trouble)
        return cls(gloo.group, setup, gloo.pairs, sockets)

    @classmethod
    def reachable_at(cls, hints: Mapping[str, Any]) -> str:
        hinted = addresses.of_interface(hints["interface"]) or hints["hostname"]
        return hinted or addresses.of_interface(addresses.chosen_interface()) or addresses.here(None).address

    def swap(self, call: Call, mine: bytes) -> list[bytes]:
        """What all ranks give, some kilobytes of one length, with the least latency; counts as `call`."""
        assert self._agreement is not None
        with self._collective(call):
            return self._agreement.swap(mine)

    def run(self, call: Call) -> None:
        with self._collective(call):
            self._await(getattr(self, f"_{call.name}")(call))

    def _await(self, work: Any) -> None:
        """Waits for a collective. In slices: Gloo may have forgotten it, and Ctrl-C is to be heard."""
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
        """Raises the fault when Gloo does not end by itself what waits for connections that are ended.

        A message that the loop's thread takes off its list, because the receiver is ready, and cannot write,
        because the connection has just ended, is on no list whose waiters get an error.
        """
        fault, watch = self._watch.fault, self._watch
        if fault is None or time.monotonic() < watch.fault_at + _FORGETS:
            return
        with self._lock:
            # Its destructor would wait for the thread that waits for ever.
            if self._group is not None:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
                self._group = None
                forgotten.append(self._name)
        raise self._error_of(fault)

    def exchange(self, messages: Sequence[Message], timeout: float) -> None:
        # Receives first: gloo then has a place for whatever arrives.
        ordered = sorted(messages, key=lambda m: m.send)
        name = "batch" if len(messages) > 1 else "send" if messages[0].send else "recv"
        awaits = [Awaited(m.peer, m.send, self._count(m.peer, m.send), m.tensor.nbytes) for m in ordered]
        over: queue.SimpleQueue[RuntimeError | None] = queue.SimpleQueue()
        works: list[Any] = []
        now = time.monotonic()
        with self._watched(Operation(name, 0, timeout, now + timeout, awaits, now + COMPARE)):
            self._group.set_timeout(self._limit)
            try:
                for send, peer, tensor in ordered:
                    # Nor one that means the group, such as its bound method.
                    works.append(
                        (self._group.send if send else self._group.recv)([tensor], peer, tag(tensor))
                    )
            except RuntimeError:
                works.clear()
                raise
            # In another thread: whoever waits in Gloo for a message cannot give up.
            waiters.run(partial(await_messages, works, awaits, self._limit, over))
            while True:
                try:
                    failure = over.get(timeout=_SLICE.total_seconds())
                except queue.Empty:
                    self._leave_forgotten()
                    continue
                if failure is not None:
                    raise failure
                return

    def open_exchange(self) -> Exchange:
        return GlooExchange(self)

    def _interrupt(self) -> None:
        with self._lock:
            if self._group is not None and self._pairs is not None:
                self._pairs.end()
        for s in self._said.values():
            with contextlib.suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)

    def _drop(self) -> None:
        with self._lock:
            if self._group is not None and self._pairs is not None:
                self._pairs.end()
            group, self._group = self._group, None
        del group  # its destructor waits for Gloo's threads

    def part_of(self, name: str) -> None:
        """This rank is in the operation `name`, of which this is a part, until it says "" here."""
        self._watch.inside = name

    def elsewhere(self, ranks: Collection[int]) -> list[int]:
        """Those of `ranks` that are in no operation, or do not answer. Waits for their answers."""
        return self._watch.elsewhere(ranks)

    def close(self) -> None:
        self._watch.close()
        for s in self._said.values():
            s.close()
        with self._lock:
            group, self._group = self._group, None
        del group

    # --- what Gloo does itself -----------------------------------------------------------------------------

    def _options(self, kind: Callable[[], Any], call: Call) -> Any:
        options = kind()
        options.timeout = self._limit
        return options

    def _broadcast(self, call: Call) -> Any:
        options = self._options(BroadcastOptions, call)
        options.rootRank = call.root
        return self._group.broadcast(call.outputs, options)

    def _all_reduce(self, call: Call) -> Any:
        assert call.op is not None
        options = self._options(AllreduceOptions, call)
        options.reduceOp = _REDUCTIONS[call.op.type]
        return self._group.allreduce([t.detach() for t in call.outputs], options)

    def _all_gather(self, call: Call) -> Any:
        return self._group.allgather([call.outputs], call.inputs, self._options(AllgatherOptions, call))

    def _all_gather_single(self, call: Call) -> Any:
        options = self._options(AllgatherOptions, call)
        return self._group._allgather_base(call.outputs[0], call.inputs[0], options)

    def _all_to_all_single(self, call: Call) -> Any:
        options = self._options(AllToAllOptions, call)
        return self._group.alltoall_base(
            call.outputs[0], call.inputs[0], call.out_splits or [], call.in_splits or [], options
        )

    _all_to_all_v_single = _all_to_all_single

    def _gather(self, call: Call) -> Any:
        options = self._options(GatherOptions, call)
        options.rootRank = call.root
        return self._group.gather([call.outputs] if call.outputs else [], call.inputs, options)

    def _scatter(self, call: Call) -> Any:
        options = self._options(ScatterOptions, call)
        options.rootRank = call.root
        return self._group.scatter(call.outputs, [call.inputs] if call.inputs else [], options)

    def _barrier(self, call: Call) -> Any:
        return self._group.barrier(self._options(BarrierOptions, call))

    def forget(self) -> None:
        # Its destructor joins threads, which a forked child has not: it must never run here.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
        self._watch.forget()
        for s in self._said.values():
            s.close()

    @classmethod
    def version(cls) -> str:
        return f"torch {torch.__version__}"
