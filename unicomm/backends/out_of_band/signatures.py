"""Signatures of collectives, compared before anything is sent: what shm does in its memory, by messages.

Each rank tells each other one what it is about to run, in a frame of fixed size, and waits for everybody's.
All see the same frames, so all come to the same conclusion, and stay in step whatever it is.
"""

from __future__ import annotations

import abc
import socket
import struct
from collections import Counter

import torch

from unicomm.backends.shm import _mismatch, _mismatch_hint
from unicomm.comms.errors import BackendError, MismatchError
from unicomm.comms.operations.call import Call

from .sockets import Sockets

_FRAME = struct.Struct("<QIIiIQQ24x")  # number, operation, dtype, root, reduction, count, extra; 64 bytes
_MASK = (1 << 64) - 1
_Claim = tuple[int, ...]


class Agreement(abc.ABC):
    """One rank's end. One thread at a time calls `check`."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size

    @abc.abstractmethod
    def swap(self, mine: bytes) -> list[bytes]:
        """Every rank's bytes, of one length, which is some kilobytes at most. A collective."""

    def check(self, call: Call, number: int) -> None:
        """Returns when all ranks are about to run this; raises `MismatchError`, on all, when they are not.

        `number`: of this collective, from 1.
        """
        mine = (
            number,
            call.operation.code,
            call.dtype_code,
            call.root,
            call.red_code,
            call.count,
            call.extra & _MASK,
        )
        theirs = self.swap(_FRAME.pack(*mine))
        if any(frame != theirs[self._rank] for frame in theirs):
            self._refuse([_FRAME.unpack(frame) for frame in theirs])
        if call.operation.splits or call.name == "all_to_all":
            self._check_pairs(call)

    def _refuse(self, frames: list[tuple[int, ...]]) -> None:
        if len({frame[0] for frame in frames}) > 1:
            raise BackendError(
                f"the ranks have lost step: they are in collectives {[frame[0] for frame in frames]}",
                hint="please report this; create a new communicator to go on",
            )
        signatures = [frame[1:] for frame in frames]
        culprits = minority(signatures)
        claims: list[_Claim] = [
            (r, op, dtype, red, root, count, extra)
            for r, (_, op, dtype, root, red, count, extra) in enumerate(frames)
        ]
        raise MismatchError(_mismatch(claims, ""), culprits=culprits, hint=_mismatch_hint(culprits))

    def _check_pairs(self, call: Call) -> None:
        """What each rank sends must be what its peer expects: all see the bytes of all pairs."""
        n = self._size
        row = struct.Struct(f"<{2 * n}Q")
        sent, expected = _parts(call.inputs, call.in_splits), _parts(call.outputs, call.out_splits)
        rows = [row.unpack(r) for r in self.swap(row.pack(*sent, *expected))]
        claims: list[_Claim] = []
        blame = [0] * n
        for receiver in range(n):
            odd = (s for s in range(n) if rows[s][receiver] != rows[receiver][n + s])
            if (sender := next(odd, None)) is not None:
                sizes = rows[receiver][n + sender], rows[sender][receiver]
                claims.append((receiver, call.operation.code, call.dtype_code, 0, sender, *sizes))
                blame[receiver] += 1
                blame[sender] += 1
        if claims:
            culprits = [r for r in range(n) if blame[r] == max(blame)]
            raise MismatchError(_mismatch(claims, "sizes"), culprits=culprits, hint=_mismatch_hint(culprits))


class AgreementBySockets(Agreement):
    """To each other rank there is a socket; when one ends, `OSError` is raised."""

    def __init__(self, sockets: Sockets, rank: int) -> None:
        super().__init__(rank, len(sockets) + 1)
        self._sockets = sockets

    def swap(self, mine: bytes) -> list[bytes]:
        for s in self._sockets.values():
            s.sendall(mine)
        return [mine if r == self._rank else receive(self._sockets[r], len(mine)) for r in range(self._size)]


def minority(signatures: list[tuple[int, ...]]) -> list[int]:
    """The ranks whose signature is not the majority's; all of them when there is none."""
    votes = Counter(signatures).most_common()
    tie = len(votes) > 1 and votes[0][1] == votes[1][1]
    # With a tie for the first place nobody is in the right, as on shm.
    return [r for r, s in enumerate(signatures) if tie or s != votes[0][0]]


def receive(s: socket.socket, length: int) -> bytes:
    """Exactly `length` bytes, which this side chose; `OSError` when the connection ends before."""
    data = s.recv(length, socket.MSG_WAITALL)
    while len(data) < length:  # a signal came
        more = s.recv(length - len(data), socket.MSG_WAITALL)
        if not more:
            raise ConnectionError("Connection closed by peer")
        data += more
    return data


def _parts(tensors: list[torch.Tensor], splits: list[int] | None) -> list[int]:
    """Bytes for each rank, of one tensor each, or of one tensor that is cut by rows."""
    if splits is None:
        return [t.numel() * t.element_size() for t in tensors]
    rows = sum(splits)
    total = tensors[0].numel() * tensors[0].element_size()
    return [total // rows * split if rows else 0 for split in splits]
