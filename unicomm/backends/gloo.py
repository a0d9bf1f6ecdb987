"""Gloo: TCP between any hosts, through torch's `ProcessGroupGloo`, one for each communicator.

Data moves as bytes. Gloo's own reductions serve where they are defined as ours are (sums and products of
plain numbers); everything else, such as bfloat16, AVG or complex numbers, is composed (comms/completion.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    HashStore,
    PrefixStore,
    ReduceOp,
    ScatterOptions,
)

from unicomm.comms.backend import Backend, Capabilities, Exchange, Setup
from unicomm.comms.call import Call, Message
from unicomm.comms.errors import AbortedError, BackendError, CommError, CommTimeoutError, PeerLostError
from unicomm.comms.options import Hint
from unicomm.comms.reduction import RedOpType
from unicomm.comms.threads import Threads

_HINTS = (
    Hint("hostname", str, "", "Name or address of the interface to listen on. Default: that of the host."),
    Hint(
        "interface", str, "", "Network interface to use, such as eth0. Default: that of the host's address."
    ),
)
_REDUCTIONS = {RedOpType.SUM: ReduceOp.SUM, RedOpType.PRODUCT: ReduceOp.PRODUCT}
_TAG = 0
_LONGEST = 1e6  # seconds; a queue takes no more than some centuries


class GlooBackend(Backend):
    name = "gloo"
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
        any_source=True,
        hints=_HINTS,
    )

    def __init__(self, group: Any, name: str) -> None:
        self._group = group
        self._name = name
        self._aborted = False

    @classmethod
    def connect(cls, setup: Setup) -> GlooBackend:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=setup.timeout)
        host, interface = setup.hints["hostname"], setup.hints["interface"]
        store = setup.store
        if store is None:
            store = HashStore()
        try:
            if host or interface:
                device = dist.ProcessGroupGloo.create_device(
                    hostname=host, interface=interface, lazy_init=False
                )
            else:
                device = dist.ProcessGroupGloo.create_default_device(lazy_init=False)
            options._devices = [device]
            prefix = PrefixStore(f"unicomm-gloo/{setup.rendezvous.uid}", store)
            group = dist.ProcessGroupGloo(prefix, setup.rank, setup.size, options)
        except RuntimeError as error:
            raise BackendError(
                f"gloo could not connect: {_first_line(error)}",
                comm=setup.name,
                hint="check that the ranks reach each other; choose the interface by the hint 'interface'",
            ) from error
        return cls(group, setup.name)

    def run(self, call: Call) -> None:
        limit = timedelta(seconds=call.timeout)
        self._guard(lambda: getattr(self, f"_{call.name}")(call).wait(limit), call.timeout)

    def exchange(self, messages: Sequence[Message], timeout: float) -> None:
        limit = timedelta(seconds=timeout)
        self._group.set_timeout(limit)
        works: list[Any] = []

        def act() -> None:
            # Receives first: gloo then has a place for whatever arrives.
            for send, peer, tensor in sorted(messages, key=lambda m: m.send):
                works.append((self._group.send if send else self._group.recv)([tensor], peer, _TAG))
            for i in range(len(works)):
                works[i].wait(limit)

        try:
            self._guard(act, timeout)
        finally:
            works.clear()

    def open_exchange(self) -> Exchange:
        return _GlooExchange(self)

    def _guard(self, act: Callable[[], None], timeout: float) -> None:
        # Works hold the group open, and an error's traceback holds names: none in these frames means a work.
        try:
            act()
        except RuntimeError as error:
            failure = self._error(error, timeout)
            if not isinstance(failure, CommTimeoutError):
                self._drop()
            raise failure from error

    def _drop(self) -> None:
        """Of no more use; that its connections close tells the other ranks."""
        self._group = None

    def _error(self, error: RuntimeError, timeout: float) -> CommError:
        text = _first_line(error)
        if self._aborted:
            return AbortedError("aborted by this rank", hint="create a new communicator to go on")
        if "imed out" in text or "imeout" in text:
            return CommTimeoutError(
                f"gloo gave up after {timeout:g} s: {text}",
                hint="who has not come: `unicomm trace show`; a longer timeout= if they are only slow",
            )
        if "closed" in text or "reset by peer" in text or "Broken pipe" in text or "refused" in text:
            return PeerLostError(
                f"a peer's connection is gone: {text}",
                hint="look at the other ranks' own output; their last operations: `unicomm trace show`",
            )
        return BackendError(f"gloo: {text}", hint="the rest of gloo's message is in this error's __cause__")

    def _options(self, kind: Callable[[], Any], call: Call) -> Any:
        options = kind()
        options.timeout = timedelta(seconds=call.timeout)
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

    def abort(self) -> None:
        self._aborted = True
        if (group := self._group) is not None:
            with contextlib.suppress(RuntimeError):
                group.abort()

    def close(self) -> None:
        self._group = None

    def forget(self) -> None:
        # Its destructor joins threads, which a forked child has not: it must never run here.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))

    @classmethod
    def version(cls) -> str:
        return f"torch {torch.__version__}"


class _GlooExchange(Exchange):
    """Each message has a thread that waits for it: Gloo can say that one is over only to who waits for it."""

    def __init__(self, backend: GlooBackend) -> None:
        self._backend = backend
        self._over: queue.SimpleQueue[tuple[int, int, RuntimeError | None] | None] = queue.SimpleQueue()
        self._fresh: list[Message] = []
        self._added = 0

    def add(self, messages: Sequence[Message]) -> None:
        self._fresh += messages

    def run(self, timeout: float, limit: float) -> list[tuple[int, int, CommError | None]]:
        fresh, self._fresh = self._fresh, []
        backend = self._backend
        if fresh:
            # One more second: the deadline is this side's to notice, Gloo's own would be told as its fault.
            backend._guard(lambda: self._start(fresh, timeout), timeout)
        try:
            item = self._over.get(timeout=min(timeout, limit, _LONGEST))
        except queue.Empty:
            if timeout <= min(limit, _LONGEST):
                backend._drop()
                raise CommTimeoutError(
                    f"a message had not arrived after {timeout:g} s",
                    hint="who has not come: `unicomm trace show`; a longer timeout= if they are only slow",
                ) from None
            return []
        if item is None:
            return []
        number, peer, error = item
        if error is not None:

            def fail() -> None:
                raise error

            backend._guard(fail, timeout)
        return [(number, peer, None)]

    def _start(self, messages: Sequence[Message], timeout: float) -> None:
        limit = timedelta(seconds=timeout + 1)
        group = self._backend._group
        group.set_timeout(limit)
        for send, peer, tensor in messages:
            if send:
                work = group.send([tensor], peer, _TAG)
            elif peer < 0:
                work = group.recv_anysource([tensor], _TAG)
            else:
                work = group.recv([tensor], peer, _TAG)
            _waiters.run(partial(_await_message, work, self._added, peer, limit, self._over))
            self._added += 1

    def interrupt(self) -> None:
        self._over.put(None)


_waiters = Threads("unicomm-gloo")


def _await_message(work: Any, number: int, peer: int, limit: timedelta, over: Any) -> None:
    error = None
    try:
        work.wait(limit)
        if peer < 0:
            peer = int(work._source_rank())
    except RuntimeError as caught:
        error = caught
    del work  # it holds the group open
    over.put((number, peer, error))


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
