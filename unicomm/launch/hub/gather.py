"""What a hub reads: the rings of its host, and those of all hosts, for the live view or into one folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import zmq

from unicomm.flight_recorder.analysis.analyze import analyze
from unicomm.flight_recorder.ring.copies import folder_copies, freeze
from unicomm.flight_recorder.ring.endings import side_files
from unicomm.flight_recorder.ring.files import read_file, trusted_owners
from unicomm.flight_recorder.ring.folder import SUFFIX
from unicomm.flight_recorder.table.load import load

from . import protocol
from .protocol import HubConnection, HubError

_T = TypeVar("_T")
_AT_ONCE = 16  # hosts that are asked at the same time
_MOST_SHOWN = protocol.MOST_ANSWERED // 2  # bytes of rings in one answer
_MOST_LOOK = 1 << 20  # bytes of one uncompressed ring in the live view
_MOST_RECORDS = 4096
MOST_GATHERED = 8 << 30  # bytes of all rings of a job together


@dataclass(frozen=True)
class RingFolders:
    """The folders of the ranks that run now.

    Attributes:
        rings: where the ranks write.
        frozen: for copies of this host's rings, made when a rank failed.
        job: for the rings of all hosts.
    """

    rings: Path
    frozen: Path
    job: Path

    def files(self) -> list[tuple[str, int]]:
        """Returns names and sizes of the copies from the failure; makes copies now if no rank has failed."""
        freeze(self.rings, self.frozen)
        rings = sorted(self.frozen.glob(f"*{SUFFIX}"))
        return [(path.name, path.lstat().st_size) for path in (*rings, *side_files(self.frozen))]

    def read(self, name: str, offset: int) -> protocol.Part:
        path = self.frozen / protocol.file_name(name)
        data = read_file(path, trusted_owners(self.frozen), at=max(0, offset), size=protocol.PART)
        return protocol.Part(len(data), protocol.pack(data))


@dataclass(frozen=True)
class OtherHubs:
    """The known other hubs of a job that has `hosts` hosts."""

    context: zmq.Context[Any]
    token: str
    peers: list[protocol.Announce]
    hosts: int

    def all(self, ask: Callable[[HubConnection, protocol.Announce], _T]) -> tuple[list[_T], list[str]]:
        """Returns the answers of all other hubs, and a sentence for each that does not answer."""
        missing = []
        if (unknown := self.hosts - 1 - len(self.peers)) > 0:
            missing.append(f"{unknown} of {self.hosts} hosts have no hub, or one that is not known here")

        def one(peer: protocol.Announce) -> _T | str:
            try:
                with HubConnection(self.context, peer.address, self.token) as hub:
                    return ask(hub, peer)
            except (HubError, OSError) as error:
                return f"{peer.name}: {error}"

        answers: list[_T] = []
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for answer in pool.map(one, self.peers):
                if isinstance(answer, str):
                    missing.append(answer)
                else:
                    answers.append(answer)
        return answers, missing


# --- the live view ------------------------------------------------------------------------------------


def look(folders: RingFolders, records: int) -> protocol.Rings:
    """Returns copies of this host's rings, as they are now."""
    host, found = socket.gethostname(), []
    for name, data in folder_copies(folders.rings, min(max(records, 1), _MOST_RECORDS)):
        found.append(protocol.Packed(host, name, len(data), protocol.pack(data)))
    return _fitting(found, [])


def look_everywhere(folders: RingFolders, records: int, others: OtherHubs, seconds: float) -> protocol.Rings:
    """Returns copies of all hosts' rings, as they are now."""
    answers, missing = others.all(lambda hub, _: hub.ask(protocol.Look(records, False), seconds))
    rings = list(look(folders, records).rings)
    for answer in answers:
        if isinstance(answer, protocol.Rings):
            rings += answer.rings
            missing += answer.missing
    return _fitting(rings, missing)


def _fitting(rings: list[protocol.Packed], missing: list[str]) -> protocol.Rings:
    room, shown = _MOST_SHOWN, []
    for ring in rings:
        room -= len(ring.data)
        if room >= 0:
            shown.append(ring)
    if len(shown) < len(rings):
        missing = [*missing, f"{len(rings) - len(shown)} of {len(rings)} rings do not fit into one answer"]
    return protocol.Rings(shown, missing)


def unpacked(rings: Iterable[protocol.Packed]) -> list[tuple[str, bytes]]:
    """Returns (where, ring) for each ring that `look` has packed. Raises `HubError` for damaged data."""
    return [
        (f"{ring.host}:{protocol.file_name(ring.name)}", protocol.unpack(ring.data, ring.size, _MOST_LOOK))
        for ring in rings
    ]


# --- all rings in one folder ------------------------------------------------------------------------------


def gather(folders: RingFolders, others: OtherHubs, seconds: float, patience: float) -> protocol.Gathered:
    """Copies the rings of all hosts into one folder, analyzes them, and tells the other hubs.

    Copying may take `seconds`; a hub that gives no first answer within `patience` seconds is left out. Raises
    `OSError`.
    """
    deadline = time.monotonic() + seconds
    folders.files()
    folder = folders.frozen
    there: list[protocol.Announce] = []
    missing: list[str] = []
    if others.hosts > 1:
        part = Path(tempfile.mkdtemp(prefix=".part-", dir=folders.job.parent))
        try:
            for name, _ in folders.files():
                os.link(folders.frozen / name, part / name)
            budget = MOST_GATHERED // others.hosts

            def fetch(hub: HubConnection, peer: protocol.Announce) -> protocol.Announce:
                hub.ask(protocol.Ping(), patience)
                _fetch(hub, part, budget, deadline)
                return peer

            there, missing = others.all(fetch)
            os.rename(part, folders.job)
            folder = folders.job
        finally:
            with contextlib.suppress(OSError):
                shutil.rmtree(part)
    table = load([folder])
    report = analyze(table)
    sentence = "" if table.empty else report.main.sentence
    found = protocol.Gathered(socket.gethostname(), str(folder), 1 + len(there), missing, sentence)
    replace(others, peers=there, hosts=1).all(lambda hub, _: hub.ask(protocol.Tell(found), patience))
    return found


def _fetch(hub: HubConnection, folder: Path, budget: int, deadline: float) -> None:
    """Copies the rings of another host into `folder`. Raises `HubError`, `OSError`."""

    def ask(request: protocol.Files | protocol.Read) -> Any:
        left = deadline - time.monotonic()
        if left <= 0:
            raise HubError("the time for copying was over before its rings were copied")
        return hub.ask(request, left)

    files = ask(protocol.Files()).files
    for name, size in files:
        budget -= size
        if not 0 <= size <= protocol.MOST_RING or budget < 0:
            raise HubError("its rings are too large")
        with (folder / protocol.file_name(name)).open("xb") as out:
            offset = 0
            while offset < size:
                part = ask(protocol.Read(name, offset))
                data = protocol.unpack(part.data, part.size, protocol.PART)
                if not data:
                    raise HubError(f"{name} is shorter than announced")
                out.write(data)
                offset += len(data)
