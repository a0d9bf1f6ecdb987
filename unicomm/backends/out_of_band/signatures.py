"""Signatures of collectives, compared before anything is sent: what shm does in its memory, by messages.

Each rank sends every other rank the signature of the collective that it is about to run, in a frame of fixed
size, and waits for all frames. All ranks see the same frames, so all come to the same conclusion.
"""

from __future__ import annotations

import abc
import contextlib
import socket
import struct
from collections.abc import Sequence
from typing import Any

import torch

from unicomm.comms.errors import BackendError
from unicomm.comms.failures.faults import SIZES, Claim, minority, mismatch
from unicomm.comms.operations.call import Call

from .sockets import Sockets, receive_exactly

_FRAME = struct.Struct("<QIIIiQQ24x")  # number, then `Call.signature`; 64 bytes
_MASK = (1 << 64) - 1


def frame_of(call: Call, number: int) -> bytes:
    """Returns the frame of a collective: 64 bytes, of which the last 24 are zero."""
    *signature, extra = call.signature
    return _FRAME.pack(number, *signature, extra & _MASK)


class SignatureCheck(abc.ABC):
    """One rank's end of the comparison. One thread at a time calls `check`."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size

    @abc.abstractmethod
    def all_gather(self, mine: bytes) -> list[bytes]:
        """Collective: returns every rank's bytes, of one length, some kilobytes at most."""

    def interrupt(self) -> None:  # noqa: B027
        """Ends a running `all_gather` with an error. Called by any thread; must not wait."""

    def close(self) -> None:  # noqa: B027
        """Closes the connections that the check has of its own."""

    def check(self, call: Call, number: int) -> None:
        """Returns when all ranks are about to run this collective; else raises `MismatchError` on all.

        `number`: of the collective, from 1.
        """
        self.compare(self.all_gather(frame_of(call, number)))
        self.check_pairs(call)

    def compare(self, theirs: list[bytes]) -> None:
        """Raises `MismatchError` if the ranks' frames differ."""
        if any(frame != theirs[self._rank] for frame in theirs):
            self._refuse([_FRAME.unpack(frame) for frame in theirs])

    def _refuse(self, frames: list[tuple[Any, ...]]) -> None:
        if len({frame[0] for frame in frames}) > 1:
            raise BackendError(
                f"the ranks are in different collectives: {[frame[0] for frame in frames]}",
                hint="please report this; create a new communicator to go on",
            )
        signatures = [frame[1:] for frame in frames]
        claims = [Claim(rank, *signature) for rank, signature in enumerate(signatures)]
        raise mismatch(claims, minority(signatures))

    def check_pairs(self, call: Call) -> None:
        """Compares what each rank sends with what its peer expects: all ranks see the bytes of all pairs.

        Does nothing for operations whose parts are alike.
        """
        if not call.operation.splits and call.name != "all_to_all":
            return
        n = self._size
        row = struct.Struct(f"<{2 * n}Q")
        sent, expected = _parts(call.inputs, call.in_splits), _parts(call.outputs, call.out_splits)
        rows = [row.unpack(r) for r in self.all_gather(row.pack(*sent, *expected))]
        claims: list[Claim] = []
        blame = [0] * n
        for receiver in range(n):
            odd = (s for s in range(n) if rows[s][receiver] != rows[receiver][n + s])
            if (sender := next(odd, None)) is not None:
                sizes = rows[receiver][n + sender], rows[sender][receiver]
                claims.append(Claim(receiver, call.operation.code, call.dtype_code, 0, sender, *sizes))
                blame[receiver] += 1
                blame[sender] += 1
        if claims:
            culprits = [r for r in range(n) if blame[r] == max(blame)]
            raise mismatch(claims, culprits, SIZES)


class SocketSignatureCheck(SignatureCheck):
    """A comparison over one socket to each other rank. Raises `OSError` when a connection ends."""

    def __init__(self, sockets: Sockets, rank: int) -> None:
        super().__init__(rank, len(sockets) + 1)
        self._sockets = sockets

    def all_gather(self, mine: bytes) -> list[bytes]:
        for s in self._sockets.values():
            s.sendall(mine)
        return [
            mine if r == self._rank else receive_exactly(self._sockets[r], len(mine))
            for r in range(self._size)
        ]

    def interrupt(self) -> None:
        for s in self._sockets.values():
            with contextlib.suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for s in self._sockets.values():
            s.close()


def _parts(tensors: Sequence[torch.Tensor], splits: list[int] | None) -> list[int]:
    """Returns the bytes for each rank: one tensor a rank, or one tensor that is cut by rows."""
    if splits is None:
        return [t.numel() * t.element_size() for t in tensors]
    rows = sum(splits)
    total = tensors[0].numel() * tensors[0].element_size()
    return [total // rows * split if rows else 0 for split in splits]
