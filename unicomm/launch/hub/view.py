"""`unicomm trace top --connect`: the live view over all hosts of a job, by one of its hubs."""

from __future__ import annotations

import contextlib

import zmq

from unicomm.flight_recorder.live import jobs as live
from unicomm.flight_recorder.ring.folder import FolderError
from unicomm.flight_recorder.ring.reader import Finding, Ring, RingError
from unicomm.launch.run.job_folder import DEFAULT_PORT, HubNote, running_hubs

from .gather import unpacked
from .protocol import TOKEN_VARIABLE, Asker, HubError, Look, Rings, own_token, zmq_address

_PATIENCE = 5.0  # seconds that a hub gets to ask the others, and to answer
_HERE = ("localhost", "127.0.0.1", "::1")


def parse(where: str) -> tuple[str, int | None]:
    """(host, port) of "host", "host:port" or "[::1]:port". Raises `HubError`."""
    host, colon, port = where.rpartition(":")
    if not colon or (where.count(":") > 1 and not where.startswith("[")) or where.endswith("]"):
        host, port = where, ""
    host = host.strip("[]")
    if not host or (port and not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16)):
        raise HubError(f"'{where}' is no HOST or HOST:PORT")
    return host, int(port) if port else None


def find(host: str, port: int | None) -> tuple[str, str]:
    """(address, token) of a hub: what the user names, completed by what the jobs of this host left.

    Raises `HubError` when several hubs, or none, could be meant, or when there is no token.
    """
    notes: list[HubNote] = []
    with contextlib.suppress(FolderError):
        notes = list(running_hubs())
    token = own_token()
    if host in _HERE:
        meant = [note for note in notes if port in (None, note.port)]
        if len(meant) > 1:
            ports = ", ".join(str(note.port) for note in meant)
            raise HubError(f"several jobs run here: name the port of one, {ports}")
        if meant:
            return zmq_address(meant[0].address, meant[0].port), meant[0].token
        if not token:
            at = f" at port {port}" if port else ""
            raise HubError(f"no job of `unicomm run` with a hub{at} runs here as this user")
    # The hubs of one job have one token, so a job of this host opens those of its other hosts, too.
    tokens = {token} if token else {note.token for note in notes}
    if len(tokens) != 1:
        why = "several jobs run here" if tokens else "no job runs here that knows it"
        raise HubError(f"which token opens the hub of {host}? {why}: set {TOKEN_VARIABLE} to that of the job")
    return zmq_address(host, DEFAULT_PORT if port is None else port), tokens.pop()


class RemoteView:
    """What a hub sees. As a context manager it closes its connection."""

    def __init__(self, where: str) -> None:
        self.address, self._token = find(*parse(where))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._last: live.Snapshot | None = None

    def __enter__(self) -> RemoteView:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def take(self, everything: bool = False) -> live.Snapshot:
        """The ranks of all hosts, now. Raises `HubError` when the hub does not answer."""
        with Asker(self._context, self.address, self._token) as asker:
            answer = asker.ask(Look(), _PATIENCE)
        if not isinstance(answer, Rings):
            raise HubError(f"the hub at {self.address} answered something else")
        rings, findings = [], [Finding(self.address, text) for text in answer.missing]
        for where, data in unpacked(answer.rings):
            try:
                rings.append(Ring(data, where))
            except RingError as error:
                findings.append(Finding(where, str(error)))
        self._last = live.snapshot(rings, findings, everything)
        return self._last

    def follow(self, everything: bool = False) -> live.Snapshot:
        """As `take`; while the hub does not answer, what it said last, with a remark."""
        try:
            return self.take(everything)
        except HubError as error:
            if self._last is None:
                raise
            return live.Snapshot(self._last.jobs, [Finding(self.address, str(error))], self._last.older)
