"""The hub's process, which runs beside the launcher of each host and serves the rings of a job.

    python -m unicomm.launch.hub.server        # started by `unicomm run`, which writes commands to its stdin

The hub reads rings, which costs the ranks nothing, and takes no part in operations: a job runs on without it,
or when it is stopped or killed. protocol.py lists the requests. The hubs of the first hosts (the directories)
know the hubs of all others; when a rank fails, the first directory that answers gathers the rings.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import resource
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from unicomm.launch.side_process import live_with_the_launcher

from . import gather, protocol
from .hub_process import START_OF_HUBS
from .protocol import AnyAnswer, AnyRequest, HubConnection, HubError

_MOST_AT_ONCE = 32  # requests under way in the pool
_MOST_TAKEN = 64  # requests between two looks at the launcher's commands
_MOST_HOSTS = 1 << 16
_MOST_ROUNDS = 4
_WORKERS = 8
_DOMAIN = "unicomm"
PATIENCE = 2.0  # seconds in which another hub has to answer a small request
GATHERING = 40.0  # seconds in which another hub has to gather
_TRANSFERS = 20.0  # of these, seconds for copying rings


@dataclass(eq=False)
class Start:
    """What this hub knows of one start of the ranks. What comes late for an earlier one stays with it.

    Attributes:
        number: the launcher's, from 0.
        place: the folders of this host's rings.
        host: this host's number, of `hosts`.
        round: tells this start from others; the hubs that this one shall know announce themselves with it.
        directories: address and round of the hubs of the first hosts, by host.
        gathered: what this hub has gathered.
        told: what another hub has gathered.
        asking: who waits until this hub has gathered.
    """

    number: int
    place: gather.RingFolders
    host: int
    hosts: int
    round: str
    directories: dict[int, tuple[str, str]] = field(default_factory=dict)
    gathered: protocol.Gathered | None = None
    told: protocol.Gathered | None = None
    asking: list[bytes] = field(default_factory=list)
    gathering: threading.Lock = field(default_factory=threading.Lock)
    began: float = field(default_factory=time.monotonic)

    def gathered_by(self, round: str) -> bool:
        """Whether a hub that gathers for `round` means this start."""
        return any(round == theirs for _, theirs in self.directories.values())


class Hub:
    """Serves one launcher; `tell` sends the launcher a message."""

    def __init__(self, tell: Callable[[dict[str, Any]], None]) -> None:
        self._tell = tell
        self._context = zmq.Context()
        self._router: zmq.Socket[bytes] | None = None
        self._pool = ThreadPoolExecutor(_WORKERS, "hub")
        self._verdicts = ThreadPoolExecutor(_WORKERS, "hub-verdicts")  # which wait for no viewers
        self._busy = 0
        self._pending = b""  # a command that has not come whole
        self._answers: queue.SimpleQueue[tuple[bytes, AnyAnswer, int]] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._token = self._address = ""
        self._start: Start | None = None
        self._announced: dict[str, dict[int, protocol.Announce]] = {}  # by round

    # --- commands of the launcher ----------------------------------------------------------------------

    def open(self, token: str, address: str, port: int, others: bool) -> None:
        """Listens at `port` of `address`; with `others`, at any free port if that one is taken."""
        self._token = token
        self._authenticator = authenticator = ThreadAuthenticator(self._context)  # stops when dropped
        authenticator.start()
        authenticator.configure_curve_callback(_DOMAIN, protocol.GuestKeyCheck(token))
        router = self._context.socket(zmq.ROUTER)
        router.linger = 0
        router.maxmsgsize = protocol.MOST_ASKED
        router.rcvhwm, router.sndhwm = 64, 4
        router.handshake_ivl = 5000
        router.ipv6 = ":" in address
        router.zap_domain = _DOMAIN.encode()
        router.curve_server = True
        router.curve_publickey, router.curve_secretkey = protocol.keys(token, "hub")
        for wanted in (port, 0) if others and port else (port,):
            try:
                router.bind(protocol.zmq_address(address, wanted))
            except zmq.ZMQError as error:
                why = f"cannot listen at {address}, port {wanted}: {error}"
            else:
                self._router = router
                bound = int(router.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])
                self._address = protocol.zmq_address(address, bound)
                self._tell({"say": "open", "address": address, "port": bound})
                return
        router.close()
        self._tell({"say": "closed", "why": why})

    def attempt(
        self, number: int, rings: str, frozen: str, job: str, host: int, hosts: int, round: str
    ) -> None:
        """New processes run now, and write their rings to other folders; this is host `host` of `hosts`."""
        place = gather.RingFolders(Path(rings), Path(frozen), Path(job))
        self._start = Start(number, place, host, hosts, round)

    def join(self, directories: list[tuple[int, str, str]]) -> None:
        """Sets (number, address, round) of the directories that are known by now."""
        if (start := self._start) is not None:
            start.directories = {number: (address, theirs) for number, address, theirs in directories}
            self._pool.submit(self._introduce, start)

    def note(self, what: str) -> None:
        """Writes a line into the log."""
        print(what, file=sys.stderr, flush=True)

    def failed(self, number: int) -> None:
        """Reacts to a failed rank of this host: the launcher waits for the result of gathering."""
        if (start := self._start) is not None and start.number == number:
            self._tell({"say": "gathering", "attempt": number})
            self._verdicts.submit(self._report, start)

    # --- other hubs --------------------------------------------------------------------------------------

    def _ask(self, address: str, request: AnyRequest, seconds: float) -> Any:
        with HubConnection(self._context, address, self._token) as hub:
            return hub.ask(request, seconds)

    def _introduce(self, start: Start) -> None:
        for number, (address, round) in sorted(start.directories.items()):
            if number == start.host:
                continue
            hello = protocol.Announce(start.host, self._address, socket.gethostname(), round)
            for _ in range(3):
                with contextlib.suppress(HubError):
                    self._ask(address, hello, PATIENCE)
                    break

    def _peers(self, start: Start) -> dict[int, protocol.Announce]:
        announced = self._announced.get(start.round, {}).copy()  # which another thread extends
        return {n: a for n, a in announced.items() if n != start.host}

    def _others(self, start: Start) -> gather.OtherHubs:
        return gather.OtherHubs(self._context, self._token, list(self._peers(start).values()), start.hosts)

    def _first_directory(self, start: Start) -> tuple[int, str, str]:
        """Returns number, address and round of the first directory that answers; of this hub if none does."""
        for number, (address, round) in sorted(start.directories.items()):
            if number == start.host:
                break
            with contextlib.suppress(HubError):
                self._ask(address, protocol.Ping(), PATIENCE)
                return number, address, round
        return start.host, self._address, start.round

    def _report(self, start: Start) -> None:
        answer: dict[str, Any] = {"attempt": start.number}
        try:
            here = False
            if (found := start.told) is None:
                number, address, round = self._first_directory(start)
                here = number == start.host
                found = self._gather(start) if here else self._ask(address, protocol.Gather(round), GATHERING)
            answer |= {"say": "gathered", "here": here} | msgspec.structs.asdict(found)
        except Exception as error:
            answer |= {"say": "not gathered", "why": str(error)}
        self._tell(answer)

    def _gather(self, start: Start) -> protocol.Gathered:
        with start.gathering:
            if start.gathered is None:
                end = max(time.monotonic() + PATIENCE, start.began + START_OF_HUBS)
                while len(self._peers(start)) + 1 < start.hosts and time.monotonic() < end:
                    time.sleep(0.02)  # hubs that have just started are about to announce themselves
                start.gathered = gather.gather(
                    start.place, self._others(start), start.round, _TRANSFERS, PATIENCE
                )
            return start.gathered

    def _gather_for(self, who: bytes, start: Start) -> None:
        """All hosts may ask at the same time; one thread answers them all."""
        start.asking.append(who)
        if len(start.asking) == 1:
            self._verdicts.submit(self._gather_for_all, start)

    def _gather_for_all(self, start: Start) -> None:
        answer: AnyAnswer
        try:
            answer = self._gather(start)
        except Exception as error:
            answer = _refusal(error)
        # Who asks when the list is empty gets another thread, so nobody is forgotten.
        with contextlib.suppress(IndexError):
            while True:
                self._put(start.asking.pop(), answer)

    # --- requests --------------------------------------------------------------------------------------

    def _handle(self, request: AnyRequest, start: Start) -> AnyAnswer:
        match request:
            case protocol.Look():
                return self._look(request, start)
            case protocol.Files():
                return protocol.Listing(start.place.files())
            case protocol.Read():
                return start.place.read(request.name, request.offset)
        raise HubError("a request that hubs do not answer")

    def _look(self, request: protocol.Look, start: Start) -> protocol.Rings:
        if not request.everywhere:
            return gather.look(start.place, request.records)
        if start.hosts > 1 and start.host not in start.directories:
            number, address, _ = self._first_directory(start)
            if number != start.host:
                answer = self._ask(address, request, 2 * PATIENCE)
                if isinstance(answer, protocol.Rings):
                    return answer
        return gather.look_everywhere(start.place, request.records, self._others(start), PATIENCE)

    def _received(self, frames: list[bytes]) -> None:
        if len(frames) != 2:
            return
        who, data = frames
        try:
            request = protocol.read_request(data)
        except HubError as error:
            self._answer(who, protocol.Refused(str(error)))
            return
        start = self._start
        match request:
            case protocol.Ping():
                self._answer(who, protocol.Done())
            case protocol.Announce():
                self._answer(who, self._note(request))
            case _ if start is None:
                self._answer(who, protocol.Refused("no ranks were started yet"))
            case protocol.Gather() if request.round == start.round:
                self._gather_for(who, start)
            case protocol.Tell() if start.gathered_by(request.round):
                start.told = request.found
                self._answer(who, protocol.Done())
            case protocol.Look():
                self._begin(who, request, start)
            case protocol.Files() | protocol.Read() if start.gathered_by(request.round):
                self._begin(who, request, start)
            case _:
                self._answer(who, protocol.Refused("its ranks run in another start of the job"))

    def _begin(self, who: bytes, request: AnyRequest, start: Start) -> None:
        if self._busy >= _MOST_AT_ONCE:
            self._answer(who, protocol.Refused("too many requests at once; try again"))
        else:
            self._busy += 1
            self._pool.submit(self._work, who, request, start)

    def _note(self, request: protocol.Announce) -> AnyAnswer:
        if not 0 <= request.host < _MOST_HOSTS:
            return protocol.Refused(f"there is no host number {request.host}")
        known = self._announced.setdefault(request.round[:64], {})
        known[request.host] = request
        while len(self._announced) > _MOST_ROUNDS:
            del self._announced[next(iter(self._announced))]
        return protocol.Done()

    def _work(self, who: bytes, request: AnyRequest, start: Start) -> None:
        try:
            answer = self._handle(request, start)
        except Exception as error:
            answer = _refusal(error)
        self._put(who, answer, 1)

    def _put(self, who: bytes, answer: AnyAnswer, over: int = 0) -> None:
        """Lets the main thread answer; `over` requests of the pool are over with that."""
        self._answers.put((who, answer, over))
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"!")

    def _answer(self, who: bytes, answer: AnyAnswer) -> None:
        assert self._router is not None
        with contextlib.suppress(zmq.ZMQError):  # who does not take it does not get it
            # libzmq drops an answer if its queue for this client is full. That the client has taken earlier
            # ones it learns from commands of its own threads, which sending handles once a millisecond at
            # most. Reading the events handles all of them.
            self._router.get(zmq.EVENTS)
            self._router.send_multipart([who, protocol.encode(answer)], zmq.NOBLOCK)

    # --- the loop --------------------------------------------------------------------------------------

    def run(self, commands: int) -> None:
        """Serves until the launcher is gone. `commands`: a descriptor with a line of JSON per command."""
        poller, opened = zmq.Poller(), False
        os.set_blocking(commands, False)
        for descriptor in (commands, self._wake_read):
            poller.register(descriptor, zmq.POLLIN)
        while True:
            if self._router is not None and not opened:
                poller.register(self._router, zmq.POLLIN)
                opened = True
            ready: dict[Any, int] = dict(poller.poll())
            requests = self._arrived() if self._router is not None and self._router in ready else []
            # After them: a host may ask for a start of the ranks as soon as the launcher has told of it.
            if not self._obey(commands):
                return
            if self._wake_read in ready:
                os.read(self._wake_read, 1 << 12)
                while not self._answers.empty():
                    who, answer, over = self._answers.get()
                    self._busy -= over
                    self._answer(who, answer)
            for frames in requests:
                self._received(frames)

    def _arrived(self) -> list[list[bytes]]:
        found: list[list[bytes]] = []
        with contextlib.suppress(zmq.Again):
            while len(found) < _MOST_TAKEN and self._router is not None:
                found.append(self._router.recv_multipart(zmq.NOBLOCK))
        return found

    def _obey(self, commands: int) -> bool:
        """Follows the commands that are there; returns False when the launcher is gone."""
        while True:
            try:
                data = os.read(commands, 1 << 16)
            except BlockingIOError:
                return True
            if not data:
                return False
            *lines, self._pending = (self._pending + data).split(b"\n")
            for line in lines:
                said = json.loads(line)
                getattr(self, said.pop("do"))(**said)


def _refusal(error: Exception) -> protocol.Refused:
    return protocol.Refused(str(error)[:1000] or type(error).__name__)


def main() -> None:
    live_with_the_launcher()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection of each host
    lock = threading.Lock()

    def tell(message: dict[str, Any]) -> None:
        with lock, contextlib.suppress(OSError):
            os.write(1, json.dumps(message).encode() + b"\n")

    code = 0
    try:
        Hub(tell).run(0)
    except Exception:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # with its threads, and requests that are under way: nobody waits for them any more


if __name__ == "__main__":
    main()
