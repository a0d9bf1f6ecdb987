"""The Work objects and futures that a process group returns to torch.distributed."""

# mypy: disable-error-code="override, misc, assignment"

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from unicomm.comms.execution.device.work import StreamWork
from unicomm.comms.failures.daemon_pool import DaemonPool
from unicomm.comms.work import Work

from .compat import fail_future, methods, not_traced

Tensor = torch.Tensor
NO_TIMEOUT = timedelta(milliseconds=-1)  # torch passes it when the caller gave no timeout


class ProcessGroupWork(dist.Work):
    """torch.distributed's Work over one `Work` of unicomm, or over several that count as one.

    `outputs`: what `result()` returns. `value`: that of the future, if it is more than a list of tensors.
    """

    def __init__(
        self,
        works: Sequence[Work],
        outputs: Sequence[Tensor] = (),
        value: Sequence[Sequence[Tensor]] | None = None,
    ) -> None:
        super().__init__()
        self._works = list(works)
        self._outputs = list(outputs)
        # A future of torch has lists only if there are several.
        self._value: list[Any] = self._outputs if value is None or len(value) == 1 else [*map(list, value)]
        self._after: Callable[[], None] | None = None
        self._settling = threading.Lock()
        self._settled: Any = None  # on a device: the event behind `_after`

    def then_do(self, after: Callable[[], None], outputs: Sequence[Tensor], value: Sequence[Any]) -> None:
        """Has `after` called once all works have succeeded, before anybody is told so.

        On the CPU it may be called more than once. On a device, the thread that first waits calls it, and the
        streams of all others wait for what it does. `outputs`, `value`: in place of those so far.
        """
        nested = self._value is not self._outputs
        self._after, self._outputs = after, list(outputs)
        self._value = [*map(list, value)] if nested else self._outputs
        for work in self._works:
            if not isinstance(work, StreamWork):
                work.add_done_callback(lambda _: self._settle_if_over())

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        limit = None if timeout in (NO_TIMEOUT, timedelta(0)) else timeout
        for work in self._works:
            work.wait(limit)
        self._settle()
        return True

    def synchronize(self) -> None:
        """Same as `wait`. The inherited method does nothing for a class written in Python."""
        self.wait()

    def block_current_stream(self) -> None:
        """Same as `wait`. For a CPU operation it blocks the host, not only the device's stream."""
        self.wait()

    def _settle_if_over(self) -> None:
        self.is_completed()

    def _settle(self) -> None:
        if self._after is None:
            return
        first = next(iter(self._works), None)
        if not isinstance(first, StreamWork):
            self._after()
            return
        streams = first.streams
        with self._settling:
            if self._settled is None:
                self._after()
                self._settled = streams.record(streams.current())
        streams.wait(streams.current(), self._settled)

    def is_completed(self) -> bool:
        completed = all(work.is_completed() for work in self._works)
        if completed and self._after is not None and self.exception() is None:
            self._settle()
        return completed

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Any:
        return next((e for w in self._works if (e := w.exception()) is not None), None)

    def result(self) -> list[Tensor]:
        return self._outputs

    def get_future(self) -> torch.futures.Future[Any]:
        """Returns a future of the outputs, at once. Waiting for it on a device makes the stream wait."""
        if (on_stream := self._on_stream()) is not None:
            return on_stream
        future = OperationFuture()
        left = len(self._works)

        def over(work: Work) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                future.settle(self._outcome)

        if not self._works:
            future.set_result(self._value)
        for work in self._works:
            work.add_done_callback(over)
        return future

    def _on_stream(self) -> torch.futures.Future[Any] | None:
        first = next(iter(self._works), None)
        if not isinstance(first, StreamWork) or (made := first.future()) is None:
            return None
        future, on_stream = made
        with on_stream:
            try:
                for work in self._works:
                    work.wait()
                self._settle()
                future.set_result(self._value)
            except Exception as error:
                fail_future(future, error)
        return future

    def _outcome(self) -> list[Any]:
        error = self.exception()
        if error is not None:
            raise error
        self._settle()
        return self._value


class OperationFuture(torch.futures.Future[Any]):
    """A future whose callbacks may wait for further operations.

    torch runs callbacks in the thread that sets the result. Some callbacks wait there for a further operation
    (PowerSGD does), which the thread that runs operations could then not run. If there are callbacks, another
    thread sets the result.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._watched = False

    def then(self, callback: Callable[..., Any]) -> torch.futures.Future[Any]:
        with self._lock:
            self._watched = True
        return super().then(callback)

    def add_done_callback(self, callback: Callable[..., Any]) -> None:
        with self._lock:
            self._watched = True
        super().add_done_callback(callback)

    def settle(self, outcome: Callable[[], Any]) -> None:
        """Sets the future to the value that `outcome` returns, or to the error that it raises."""

        def settle() -> None:
            try:
                result = outcome()
            except Exception as error:
                fail_future(self, error)
                return
            self.set_result(result)

        with self._lock:
            if not self._watched:
                settle()
                return
        _callbacks.run(settle)


_callbacks = DaemonPool("unicomm-callbacks")


class MessageWork(ProcessGroupWork):
    """The Work of a send or receive."""

    def __init__(self, work: Work, tensors: Sequence[Tensor]) -> None:
        super().__init__([work], tensors)
        self._message = work

    def source_rank(self) -> int:
        """Returns the rank of the peer once the message is complete; -1 before."""
        return self._message.peer

    _source_rank = source_rank


class _Giver(dist.ProcessGroup):
    """Returns a Work by a method that C++ code calls."""

    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]
        self.given = threading.local()

    def barrier(self, options: Any) -> dist.Work:
        work: dist.Work = self.given.work
        return work


_giver = _Giver()


def held_by_cpp(work: dist.Work) -> dist.Work:
    """Returns a Work in C++ that keeps `work`, a Python object, alive, and whose `wait` and `getFuture` call
    its.

    torch makes one (`PyWorkHolder`) of whatever an overridden method of a process group returns. A Work that
    follows a future (`_create_work_from_future`) would not do: its `wait` returns when the future has failed
    as if it had succeeded.
    """
    _giver.given.work = work
    try:
        return dist.ProcessGroup.barrier(_giver, dist.BarrierOptions())
    finally:
        del _giver.given.work


class _Done(ProcessGroupWork):
    """The Work of every synchronous all_reduce of the native fast path."""

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        return True


DONE = _Done([])


not_traced(methods(ProcessGroupWork))
