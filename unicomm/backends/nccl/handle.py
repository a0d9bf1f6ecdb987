"""One rank's `ncclComm_t`: its address, its end, and how the result of a call on it is checked."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator

import torch

from unicomm.comms.errors import CommError
from unicomm.comms.streams import Streams, device_guard

from .library import Library
from .result_codes import IN_PROGRESS, SUCCESS, aborted


class Handle:
    """The `ncclComm_t` of one rank, used on the current stream of its device.

    Attributes:
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
        self.log_position = library.start_log()

    def alive(self) -> int:
        """Returns the address of the `ncclComm_t`. Raises `AbortedError` after its end."""
        if not self.comm:
            raise aborted()
        return self.comm

    def stream(self) -> int:
        """Returns the native pointer of the current stream."""
        return self.streams.handle(self.streams.current())

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
            with self.lock:
                result = self.library.state_of(self.alive())
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
        with self.lock:
            if not self.comm:
                return aborted()
            result = self.library.state_of(self.comm)
            if result in (SUCCESS, IN_PROGRESS):
                self.library.trim_log()
                return None
            return self.library.error("operation", result, self.comm, self.log_position)
