"""`unicomm trace top --connect`: the live view of all hosts of a job, through one of its hubs."""

from __future__ import annotations

import contextlib
import socket

import zmq

from unicomm.flight_recorder.live import snapshot as live
from unicomm.flight_recorder.ring.folder import FolderError
from unicomm.flight_recorder.ring.reader import InputRemark, Ring, RingError
from unicomm.launch import job_token
from unicomm.launch.run.job_folder import DEFAULT_PORT, HubNote, running_hubs

from .gather import unpacked
from .protocol import HubConnection, HubError, Look, Rings, zmq_address

_PATIENCE = 5.0  # seconds that a hub gets to ask the others, and to answer
_HERE = ("localhost", "127.0.0.1", "::1")


def parse(where: str) -> tuple[str, int | None]:
    """Splits "host", "host:port" or "[::1]:port" into (host, port). Raises `HubError`."""
    host, colon, port = where.rpartition(":")
    if not colon or (where.count(":") > 1 and not where.startswith("[")) or where.endswith("]"):
        host, port = where, ""
    host = host.strip("[]")
    if not host or (port and not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16)):
        raise HubError(f"'{where}' is not HOST or HOST:PORT")
    return host, int(port) if port else None


def find(host: str, port: int | None) -> tuple[str, str]:
    """Returns (address, token) of the hub that the user names; notes of this host's jobs tell the rest.

    Raises `HubError` when no hub or several hubs match, or when the token is not known.
    """
    notes: list[HubNote] = []
    with contextlib.suppress(FolderError):
        notes = list(running_hubs())
    try:
        token = job_token.own_token()
    except job_token.TokenError as error:
        raise HubError(str(error)) from None
    if host in _HERE:
        meant = [note for note in notes if port in (None, note.port)]
        if len(meant) > 1:
            ports = ", ".join(str(note.port) for note in meant)
            raise HubError(f"several jobs run here: give the port of one of them, {ports}")
        if meant:
            return zmq_address(meant[0].address, meant[0].port), meant[0].token
        if not token:
            at = f" at port {port}" if port else ""
            raise HubError(f"no job of `unicomm run` with a hub{at} runs here as this user")
    # All hubs of a job share its token, so the note of a job on this host gives access to its other hosts.
    tokens = {token} if token else {note.token for note in notes}
    if len(tokens) != 1:
        why = "several jobs run here" if tokens else "no job of it runs here"
        raise HubError(
            f"the token of the hub of {host} is not known ({why}):"
            f" set {job_token.VARIABLE} to the job's token"
        )
    return zmq_address(host, DEFAULT_PORT if port is None else port), tokens.pop()


class HubEndedError(HubError):
    """Nothing listens at a hub's address any more: hubs end with their job."""


def _listens(address: str) -> bool:
    """Whether something listens at a zmq address; True also if that cannot be told within a second."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=1).close()
    except OSError as error:
        return not isinstance(error, ConnectionRefusedError)
    return True


def snapshot_of(answer: Rings, address: str, everything: bool = False) -> live.Snapshot:
    """Returns what the rings in a hub's answer show. Raises `HubError` for damaged data."""
    rings, remarks = [], [InputRemark(address, text) for text in answer.missing]
    for where, data in unpacked(answer.rings):
        try:
            rings.append(Ring(data, where))
        except RingError as error:
            remarks.append(InputRemark(where, str(error)))
    return live.snapshot(rings, remarks, everything)


class RemoteView:
    """The ranks of all hosts of a job, as a hub sees them. A context manager, which closes the connection."""

    def __init__(self, where: str) -> None:
        self.address, self._token = find(*parse(where))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._last: live.Snapshot | None = None

    def __enter__(self) -> RemoteView:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def take(self, everything: bool = False) -> live.Snapshot:
        """Returns the ranks of all hosts, now. Raises `HubError` when the hub does not answer."""
        with HubConnection(self._context, self.address, self._token) as hub:
            answer = hub.ask(Look(), _PATIENCE)
        if not isinstance(answer, Rings):
            raise HubError(f"the hub at {self.address} sent an answer of another kind")
        self._last = snapshot_of(answer, self.address, everything)
        return self._last

    @property
    def last(self) -> live.Snapshot | None:
        """The latest snapshot that was taken."""
        return self._last

    def follow(self, everything: bool = False) -> live.Snapshot:
        """Like `take`, but while the hub does not answer it returns the latest snapshot with a remark.

        Raises `HubEndedError` when there is no hub any more; `last` then is the latest snapshot.
        """
        try:
            return self.take(everything)
        except HubError as error:
            if self._last is None:
                raise
            if not _listens(self.address):
                raise HubEndedError(
                    f"the hub at {self.address} has ended, as hubs do with their job"
                ) from None
            return live.Snapshot(self._last.jobs, [InputRemark(self.address, str(error))], self._last.older)
