"""One rank's `ncclComm_t`: its address, its end, and how the result of a call on it is checked."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator

import torch

from unicomm.comms.errors import AbortedError, CommError
from unicomm.comms.streams import Streams, device_guard

from .library import Library
from .result_codes import IN_PROGRESS, SUCCESS, aborted

_LEAVE_SECONDS = 0.2  # time that an abort gives other threads to leave the library


class _InCall:
    """A block in which a thread calls the library; see `Handle.in_call`. A class, because a generator would
    cost each operation a microsecond."""

    __slots__ = ("_handle", "_inside")

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._inside: list[None] = []  # an element for each thread: append and pop need no lock

    def __enter__(self) -> int:
        self._inside.append(None)  # before the address is read, so that an abort sees it
        if comm := self._handle.comm:
            return comm
        self._inside.pop()
        raise aborted()

    def __exit__(self, *_: object) -> None:
        self._inside.pop()

    def wait_until_left(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self._inside and time.monotonic() < end:
            time.sleep(20e-6)


class Handle:
    """The `ncclComm_t` of one rank, used on the current stream of its device.

    Attributes:
        in_call: `with handle.in_call as comm:` surrounds calls of the library on the communicator. Another
            thread's abort frees it only after the block, unless a call does not return. Raises `AbortedError`
            after the communicator's end.
        on_device: makes the communicator's device the current one within a block.
        library, native: the opened library, and its table of C functions.
        comm: address of the `ncclComm_t`; 0 after its end.
        lock: held while the communicator is ended and while the library is asked for its state.
        log_position: position of the library's log at creation.
    """

    def __init__(self, library: Library, comm: int, device: torch.device, streams: Streams) -> None:
        self.library = library
        self.native = library.native
        self.comm = comm
        self.device = device
        self.on_device = device_guard(device)
        self.streams = streams
        self.lock = threading.Lock()
        self.in_call = _InCall(self)
        self.log_position = library.start_log()

    def take(self) -> int:
        """Returns the address of the `ncclComm_t` for its end, or 0. Later calls raise `AbortedError`."""
        comm, self.comm = self.comm, 0
        return comm

    def await_calls(self) -> None:
        """Waits briefly until other threads have left the library, before the communicator is freed.

        A call that waits for other ranks does not return before the abort. The library then ends it.
        """
        self.in_call.wait_until_left(_LEAVE_SECONDS)

    def stream(self) -> int:
        """Returns the native pointer of the current stream."""
        return self.streams.handle(self.streams.current())

    def state(self) -> int:
        """Returns `Library.state_of` the communicator, of which one thread asks at a time."""
        if not self.comm:  # an abort may hold the lock, and waits for this thread
            raise aborted()
        with self.lock, self.in_call as comm:
            return self.library.state_of(comm)

    def check(self, function: str, result: int, deadline: float = math.inf) -> None:
        """Raises the error of a failed call. With blocking=0, waits until the call's host part is done.

        At an operation's deadline the watchdog aborts, which ends this wait. Other callers pass a `deadline`
        by the monotonic clock, at which the wait returns.
        """
        if result == IN_PROGRESS:
            result = self._await_host_part(deadline)
        if result != SUCCESS:
            self.library.check(function, result, self.comm, self.log_position)

    def _await_host_part(self, deadline: float) -> int:
        while True:
            result = self.state()
            if result != IN_PROGRESS or time.monotonic() >= deadline:
                return result
            time.sleep(20e-6)

    @contextlib.contextmanager
    def group(self, function: str) -> Iterator[None]:
        """Issues the calls of the body together, as calls of `function`."""
        self.check(function, self.native.group_start())
        try:
            yield
        finally:
            result = self.native.group_end()
        self.check(function, result)

    def late_error(self) -> CommError | None:
        """Returns the error of operations that were issued without one, or None."""
        try:
            with self.lock, self.in_call as comm:
                result = self.library.state_of(comm)
                if result in (SUCCESS, IN_PROGRESS):
                    self.library.trim_log()
                    return None
                return self.library.error("operation", result, comm, self.log_position)
        except AbortedError as error:
            return error
