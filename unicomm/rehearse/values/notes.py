"""Notes: small values that ranks have really sent, kept in files for the ranks that receive them.

A rank that needs an object waits for its sender; objects cannot be made up. The parent then starts the sender
next, so that few ranks are alive at once. Other values are waited for only if the sender has a lower number,
so it was started before. A rank that is over, or is not run at all, leaves no further notes.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import torch

from unicomm.comms.operations.parts import bytes_of

from .turns import Stuck

_MOST = {True: 1 << 20, False: 1 << 12}  # bytes of a value of integers, and of another one
_LOOK = 0.002  # seconds
GO_ON = -1
#: Functions whose messages are objects, which differ in size from rank to rank.
OBJECTS = {
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
}


@dataclass
class Notes:
    """The notes of one rehearsal, as one of its ranks sees them.

    Attributes:
        folder: where they are. rank: the rank's number in the job. runs: the ranks that are run.
        patience: seconds to wait for a rank that still runs.
        pipe: to the parent, which reads for which rank this one waits, or `GO_ON`.
    """

    folder: Path
    rank: int
    runs: Collection[int]
    patience: float
    pipe: int
    groups: Counter[tuple[str, str]] = field(default_factory=Counter)

    def of_group(self, name: str, labels: list[int]) -> GroupNotes:
        """Returns the notes of a new communicator. Members call it in the same order for one name."""
        key = (name, ",".join(map(str, labels)))
        self.groups[key] += 1
        return GroupNotes(self, (*key, self.groups[key]), labels)

    def file(self, key: object) -> Path:
        return self.folder / hashlib.sha256(repr(key).encode()).hexdigest()[:24]

    def wait(self, key: object, sender: int, whole: bool) -> bytes | None:
        """Returns the noted value, and waits for it if it may come; else None.

        `whole`: integers or bytes, as of objects, which cannot be made up. Raises `Stuck` if they never
        come, because their sender is over: a real rank would wait for ever.
        """
        path, asked = self.file(key), False
        comes = sender in self.runs and (sender < self.rank or current_objects() is not None)
        until = time.monotonic() + self.patience
        try:
            while True:
                over = not comes or ended(self.folder, sender).exists() or time.monotonic() > until
                over = over or given_up(self.folder, self.rank).exists()
                try:
                    return path.read_bytes()
                except FileNotFoundError:
                    if over:
                        break
                if not asked:
                    asked = True
                    self._tell(sender)
                time.sleep(_LOOK)
        finally:
            if asked:
                given_up(self.folder, self.rank).unlink(missing_ok=True)
                self._tell(GO_ON)
        if whole and comes and ended(self.folder, sender).exists():
            raise Stuck
        return None

    def _tell(self, sender: int) -> None:
        os.write(self.pipe, b"%d\n" % sender)


def ended(folder: Path, rank: int) -> Path:
    """Returns the file that says that a rank is over."""
    return folder / f"ended-{rank}"


def given_up(folder: Path, rank: int) -> Path:
    """Returns the file that tells a rank to stop waiting: what it waits for cannot come."""
    return folder / f"given-up-{rank}"


class GroupNotes:
    """The notes of one communicator."""

    def __init__(self, notes: Notes, key: tuple[object, ...], labels: list[int]) -> None:
        self._notes, self._key, self._labels = notes, key, labels
        self._counts: Counter[tuple[str, int, int]] = Counter()

    def count(self, kind: str, peer: int, tag: int) -> int:
        """Counts the messages of a kind and tag to or from a peer."""
        self._counts[kind, peer, tag] += 1
        return self._counts[kind, peer, tag]

    def put(self, key: object, tensor: torch.Tensor) -> None:
        """Notes a value that is sent, if it is small."""
        if not _is_small(tensor):
            return
        path = self._notes.file((self._key, key))
        part = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        part.write_bytes(bytes_of(tensor).cpu().numpy().tobytes())
        os.replace(part, path)

    def get(self, key: object, sender: int, tensor: torch.Tensor) -> bool:
        """Writes the noted value, or the own rank's object, into `tensor`; False if there is neither."""
        objects, target = current_objects(), bytes_of(tensor)
        data = None
        if _is_small(tensor) and not (objects and objects.own):
            known = 0 <= sender < len(self._labels)
            data = self._notes.wait(
                (self._key, key), self._labels[sender] if known else -1, _is_whole(tensor)
            )
        if objects is not None:
            data = objects.take(data)
        if data is None or len(data) != target.numel():
            return False
        if data:
            target.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return True


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.numel() * tensor.element_size() <= _MOST[_is_whole(tensor)]


def _is_whole(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


# --- objects of the own rank ------------------------------------------------------------------------------

_here = threading.local()


class OwnObjects:
    """While it is entered, objects that nobody has noted are received as `data`, tensor after tensor.

    Attributes:
        own: whether the first tensor was not noted; then none of the others counts as noted.
    """

    def __init__(self, *data: bytes) -> None:
        self._data = list(data)
        self.own = False

    def take(self, noted: bytes | None) -> bytes | None:
        """Returns the next tensor's bytes: `noted`, or the own ones."""
        own = self._data.pop(0) if self._data else None
        if noted is None:
            self.own = True
        return own if self.own else noted

    def __enter__(self) -> None:
        _here.objects = self

    def __exit__(self, *_: object) -> None:
        _here.objects = None


def current_objects() -> OwnObjects | None:
    """Returns the objects that are entered in this thread."""
    found: OwnObjects | None = getattr(_here, "objects", None)
    return found
