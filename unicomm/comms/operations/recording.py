"""States of a recorded operation, error codes and flags, as csrc/recorder/ring.hpp and csrc/core/error.hpp
have them."""

from __future__ import annotations

from unicomm.comms.errors import AbortedError, CommError, CommTimeoutError, MismatchError, PeerLostError

COMPLETED, FAILED = 3, 4  # of an operation
BROKEN = 3  # of a communicator
ASYNC, P2P, BATCH, RECEIVE, CAPTURED, REPLAYED, REPLAY = 1, 2, 4, 8, 16, 32, 64
MOST_MS = (1 << 32) - 1  # of a timeout, that a record can hold
OTHER_ERROR = 100
_ERROR_CODES: tuple[tuple[type[CommError], int], ...] = (
    (CommTimeoutError, 1),
    (PeerLostError, 2),
    (MismatchError, 3),
    (AbortedError, 4),
)


def error_code(error: BaseException) -> int:
    return next((code for cls, code in _ERROR_CODES if isinstance(error, cls)), OTHER_ERROR)
