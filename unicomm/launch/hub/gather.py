"""What a hub reads: the rings of its host, and those of all hosts, for the live view or into one folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import zmq

from unicomm.flight_recorder.analysis.analyze import analyze
from unicomm.flight_recorder.ring.copies import folder_copies, freeze
from unicomm.flight_recorder.ring.endings import side_files
from unicomm.flight_recorder.ring.files import read_file, trusted_owners
from unicomm.flight_recorder.ring.folder import SUFFIX
from unicomm.flight_recorder.table.load import load

from . import protocol
from .protocol import HubConnection, HubError

_ASKED_AT_ONCE = 256  # hosts
_FETCHED_AT_ONCE = 16  # hosts
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

    def connect(self, peer: protocol.Announce) -> HubConnection:
        """Raises `HubError`."""
        return HubConnection(self.context, peer.address, self.token)

    def ask(
        self, request: protocol.AnyRequest, seconds: float
    ) -> tuple[list[tuple[protocol.Announce, Any]], list[str]]:
        """Asks all other hubs, many at once: of a thousand that are gone each would cost `seconds`.

        Returns who has answered what, and a sentence for each host that has not.
        """
        answers: list[tuple[protocol.Announce, Any]] = []
        missing: list[str] = []
        if (unknown := self.hosts - 1 - len(self.peers)) > 0:
            missing.append(f"{unknown} of {self.hosts} hosts have no hub, or one that is not known here")
        for at in range(0, len(self.peers), _ASKED_AT_ONCE):
            self._ask(self.peers[at : at + _ASKED_AT_ONCE], request, seconds, answers, missing)
        return answers, missing

    def _ask(
        self,
        peers: list[protocol.Announce],
        request: protocol.AnyRequest,
        seconds: float,
        answers: list[tuple[protocol.Announce, Any]],
        missing: list[str],
    ) -> None:
        end = time.monotonic() + seconds
        poller, asked = zmq.Poller(), {}
        with contextlib.ExitStack() as opened:
            for peer in peers:
                try:
                    hub = opened.enter_context(self.connect(peer))
                    hub.send(request)
                except HubError as error:
                    missing.append(f"{peer.name}: {error}")
                else:
                    asked[hub.socket] = peer, hub
                    poller.register(hub.socket, zmq.POLLIN)
            while asked and (left := end - time.monotonic()) > 0:
                for socket, _ in poller.poll(1 + int(1000 * left)):
                    peer, hub = asked.pop(socket)
                    poller.unregister(socket)
                    try:
                        answers.append((peer, hub.receive()))
                    except HubError as error:
                        missing.append(f"{peer.name}: {error}")
            missing += [f"{peer.name}: {hub.silent(seconds)}" for peer, hub in asked.values()]


class Room:
    """The bytes that may still be gathered, of all hosts together."""

    def __init__(self, size: int) -> None:
        self._left, self._lock = size, threading.Lock()

    def take(self, sizes: Sequence[int]) -> None:
        """Takes room for files of one host. Raises `HubError`, and takes none, if there is too little."""
        wanted = sum(sizes)
        with self._lock:
            if not all(0 <= size <= protocol.MOST_RING for size in sizes) or wanted > self._left:
                raise HubError(f"its rings are too large: {wanted} bytes, and room is left for {self._left}")
            self._left -= wanted


# --- the live view ------------------------------------------------------------------------------------


def look(folders: RingFolders, records: int) -> protocol.Rings:
    """Returns copies of this host's rings, as they are now."""
    host, found = socket.gethostname(), []
    for name, data in folder_copies(folders.rings, min(max(records, 1), _MOST_RECORDS)):
        found.append(protocol.Packed(host, name, len(data), protocol.pack(data)))
    return _fitting(found, [])


def look_everywhere(folders: RingFolders, records: int, others: OtherHubs, seconds: float) -> protocol.Rings:
    """Returns copies of all hosts' rings, as they are now."""
    answers, missing = others.ask(protocol.Look(records, False), seconds)
    rings = list(look(folders, records).rings)
    for _, answer in answers:
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


def gather(
    folders: RingFolders, others: OtherHubs, round: str, seconds: float, patience: float
) -> protocol.Gathered:
    """Copies the rings of all hosts into one folder, analyzes them, and tells the other hubs.

    Copying may take `seconds`; a hub that gives no first answer within `patience` seconds is left out. Raises
    `OSError`.
    """
    deadline = time.monotonic() + seconds
    own = folders.files()
    folder = folders.frozen
    there: list[protocol.Announce] = []
    missing: list[str] = []
    if others.hosts > 1:
        part = Path(tempfile.mkdtemp(prefix=".part-", dir=folders.job.parent))
        try:
            for name, _ in own:
                os.link(folders.frozen / name, part / name)
            room = Room(MOST_GATHERED - sum(size for _, size in own))
            answers, missing = others.ask(protocol.Ping(), patience)

            def fetch(peer: protocol.Announce) -> str:
                try:
                    with others.connect(peer) as hub:
                        _fetch(hub, round, part, room, deadline)
                except (HubError, OSError) as error:
                    return f"{peer.name}: {error}"
                return ""

            with ThreadPoolExecutor(_FETCHED_AT_ONCE) as pool:
                for (peer, _), why in zip(
                    answers, pool.map(fetch, (peer for peer, _ in answers)), strict=True
                ):
                    there += [] if why else [peer]
                    missing += [why] if why else []
            os.rename(part, folders.job)
            folder = folders.job
        finally:
            with contextlib.suppress(OSError):
                shutil.rmtree(part)
    table = load([folder])
    report = analyze(table)
    sentence = "" if table.empty else report.main.sentence
    found = protocol.Gathered(socket.gethostname(), str(folder), 1 + len(there), missing, sentence)
    replace(others, peers=there, hosts=1).ask(protocol.Tell(round, found), patience)
    return found


def _fetch(hub: HubConnection, round: str, folder: Path, room: Room, deadline: float) -> None:
    """Copies all rings of another host into `folder`, or none. Raises `HubError`, `OSError`."""

    def ask(request: protocol.Files | protocol.Read) -> Any:
        left = deadline - time.monotonic()
        if left <= 0:
            raise HubError("the time for copying was over before its rings were copied")
        return hub.ask(request, left)

    files = ask(protocol.Files(round)).files
    room.take([size for _, size in files])
    with tempfile.TemporaryDirectory(dir=folder) as partly:
        for name, size in files:
            with (Path(partly) / protocol.file_name(name)).open("xb") as out:
                offset = 0
                while offset < size:
                    part = ask(protocol.Read(round, name, offset))
                    data = protocol.unpack(part.data, part.size, protocol.PART)
                    if not data:
                        raise HubError(f"{name} is shorter than announced")
                    out.write(data)
                    offset += len(data)
        for path in list(Path(partly).iterdir()):
            os.link(path, folder / path.name)  # not over another host's
