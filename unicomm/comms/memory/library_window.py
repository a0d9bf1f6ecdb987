"""LibraryWindow: a window over a library's own one-sided operations, such as NCCL's, on streams.

The library counts puts and signals by pair of ranks and index. If it has several indices, each window has its
own for signals, and all puts share one that no rank waits for. If it has one index, a put and the signal
behind it are counted together: then there is one window at a time, with one put before a signal.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from unicomm.comms.backend import OneSided
from unicomm.comms.errors import UnsupportedError
from unicomm.comms.execution.one_sided import agree
from unicomm.comms.operations.table import OPERATIONS
from unicomm.comms.work import Work

from .window import Window

if TYPE_CHECKING:
    from unicomm.comms.execution.engine import Engine
    from unicomm.comms.options import Hints, Timeout

_PUTS = 0  # the index of puts, if signals have others


class LibraryWindow(Window):
    """A window over a library's own windows."""

    def __init__(self, engine: Engine, library: OneSided, index: int) -> None:
        super().__init__(engine)
        self._library = library
        self._index = index
        self._alone = library.indices == 1  # signals and puts are counted together
        size = engine.group.size
        self._signals = [0] * size  # signals that this rank has sent, by rank
        self._waited = [0] * size  # signals that the library has counted, by rank
        self._ahead = [0] * size  # of these, those that the program has not waited for
        self._unsignalled = [0] * size  # puts since the last signal
        self._window = 0
        self._at: list[int] = []  # the tensor's offset in each rank's window, in bytes

    @classmethod
    def of(cls, engine: Engine, library: OneSided, tensor: Any) -> LibraryWindow:
        """Makes the window. Local; all ranks make their windows in the same order, so results agree."""
        if tensor is not None:
            _check(engine, library, tensor)
        index = library.take_index()
        if index is None:
            raise UnsupportedError(
                f"windows and symmetric memory have all {len(library.used)} of the library's signals, and"
                " there is none for another window",
                hint="free one; a newer library has more of them (NCCL since 2.31: hint num_rma_sig)",
            )
        return cls(engine, library, index)

    def _check_window(self, value: Any) -> torch.Tensor:
        return _check(self._engine, self._library, value)

    def _attach(self, tensor: torch.Tensor, timeout: Timeout) -> None:
        at, nbytes = self._library.range_of(tensor)
        same = [nbytes, tensor.nbytes, zlib.crc32(str(tensor.dtype).encode())]
        rows = agree(self._engine, "new_window", same, [tensor.data_ptr() - at], timeout)
        made: list[int] = []
        job = lambda limit: made.append(self._library.open(at, nbytes, limit))  # noqa: E731
        self._issue("new_window", job, -1, False, None, timeout, outputs=[tensor]).wait_blocking()
        self._window, self._at = made[0], [row[0] for row in rows]

    def _detach(self) -> None:
        self._library.close(self._window)
        self._window = 0

    def free(self, timeout: Timeout = None) -> None:
        self._open("symm_free")
        self._engine.refuse_capture("symm_free")
        if self._tensor is not None:
            self.tensor_deregister(timeout)  # a barrier, after which no signal is under way
        self._library.used.discard(self._index)
        self._freed = True

    # --- data and signals -------------------------------------------------------------------------------

    def _putting(self, tensor: torch.Tensor, start: int, peer: int) -> Callable[[float], None]:
        if self._alone and self._unsignalled[peer]:
            self._engine.refuse(
                "put",
                f"a second put to rank {peer} before a signal, which this library counts with the puts",
                "signal after each put; NCCL since 2.31 has signals that count apart",
            )

        def job(limit: float) -> None:
            if tensor.numel():
                offset = self._at[peer] + start * tensor.element_size()
                index = self._index if self._alone else _PUTS
                self._library.put(self._window, tensor, peer, offset, index)
                self._unsignalled[peer] += 1

        return job

    def _signalling(self, peer: int) -> Callable[[float], None]:
        self._registered("signal")  # the library has no signals before the first window

        def job(limit: float) -> None:
            # Put and signal come in pairs, since the receiver cannot know whether there was a put.
            for _ in range(2 - self._unsignalled[peer] if self._alone else 1):
                self._library.signal(peer, self._index)
            self._unsignalled[peer] = 0
            self._signals[peer] += 1

        return job

    def _waiting(self, peer: int) -> Callable[[float], None]:
        self._registered("wait_signal")

        def job(limit: float) -> None:
            if self._ahead[peer]:
                self._ahead[peer] -= 1
            else:
                self._take(peer, 1)

        return job

    def _take(self, peer: int, signals: int) -> None:
        if signals:
            self._library.wait(peer, self._index, signals * (2 if self._alone else 1))
            self._waited[peer] += signals

    def barrier(self, async_op: bool = False, hints: Hints = None, timeout: Timeout = None) -> Work:
        """See `Window.barrier`. Blocks the host: ranks tell each other how many signals to wait for."""
        self._registered("symm_barrier")
        self._engine.refuse_capture("symm_barrier")
        peers = range(len(self._signals))
        flushed = [peer for peer in peers if self._unsignalled[peer]]

        def signal(limit: float) -> None:
            for peer in flushed:
                self._signalling(peer)(limit)

        self._issue("symm_barrier", signal, -1, False, hints, timeout)
        # For each pair, take the number sent: no rank waits for signals of the flush alone.
        said = [2 * sent + (peer in flushed) for peer, sent in enumerate(self._signals)]
        rows = agree(self._engine, "symm_barrier", [self._index], said, timeout)
        mine = [row[self._engine.rank] for row in rows]

        def wait(limit: float) -> None:
            for peer, word in enumerate(mine):
                fresh = word // 2 - self._waited[peer]
                self._take(peer, fresh)
                self._ahead[peer] += fresh - word % 2

        work = self._issue("symm_barrier", wait, -1, bool(async_op), hints, timeout)
        work.wait_blocking()
        return work


def _check(engine: Engine, library: OneSided, value: Any) -> torch.Tensor:
    tensor = engine.check.check_tensor(OPERATIONS["new_window"], "tensor", value)
    with engine.located("new_window"):
        library.range_of(tensor)
    return tensor
