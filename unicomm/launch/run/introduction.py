"""How the hubs of a job's hosts find each other, through the rendezvous store, while the launcher goes on.

The launcher looks at its ranks many times a second: each time it also takes the next step here, if that step
need not wait. The store may belong to another host and not answer; the launcher still has to end its ranks
and to heed signals. So the requests to the store have a thread, which cannot outlive the interpreter
(comms/failures/store_requests.py).
"""

from __future__ import annotations

import itertools
import json
import secrets
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unicomm.c10d.compat import base_store
from unicomm.comms.errors import first_line
from unicomm.comms.failures.store_requests import NoAnswerError, host_of, requests_of
from unicomm.launch.hub.hub_process import START_OF_HUBS, HubProcess

from .job_folder import note_hub

_PREFIX = "unicomm/hub/"
_DIRECTORIES = 3  # the number of hosts, the first ones, whose hubs know all others
_PAUSES = (0.05, 5.0)  # seconds between two polls of the store: the first pause, and the longest
_STARTING = 30.0  # seconds in which a hub has to start, and a key has to be set

Steps = Generator[None, None, Any]  # stops where it would have to wait


@dataclass(frozen=True)
class HubSettings:
    """How a hub listens. `several`: whether the job has other hosts."""

    token: str
    address: str
    port: int
    any_port: bool
    several: bool


@dataclass(frozen=True)
class Meeting:
    """The hosts that start their ranks together.

    Attributes:
        host: the number of this host, of `hosts`.
        job: names the job in its store, whatever prefix an attempt has there.
        restarts: tells attempts apart whose prefix in the store is the same.
    """

    host: int
    hosts: int
    job: str = ""
    restarts: int = 0


class Listening:
    """Where this host's hub listens; one a job.

    Attributes:
        token: the job's, "" as long as it is not known.
        note: the file that tells users of this host.
    """

    def __init__(self, hub: HubProcess, settings: HubSettings, folder: Path) -> None:
        self.hub, self.settings = hub, settings
        self.token = settings.token
        self.note: Path | None = None
        self._folder = folder
        self._asked = False

    def open(self) -> Generator[None, None, str | None]:
        """Lets the hub listen, with the token, and returns its address; None if it cannot."""
        if not self._asked:
            self._asked = True
            self.hub.tell(
                "open",
                token=self.token,
                address=self.settings.address,
                port=self.settings.port,
                others=self.settings.any_port,
            )
        end = time.monotonic() + _STARTING
        while (said := self.hub.wait("open", "closed", seconds=0)) is None:
            if self.hub.gone or time.monotonic() > end:
                break
            yield
        if said is None or said["say"] == "closed":
            why = said["why"] if said else "its process does not answer"
            print(f"unicomm: there is no hub: {why}", file=sys.stderr, flush=True)
            return None
        if self.note is None:
            self.note = note_hub(said["address"], said["port"], self.token, self.hub.pid, self._folder)
        from unicomm.launch.hub.protocol import zmq_address

        return zmq_address(said["address"], said["port"])


class Introduction:
    """Introduces this host's hub to those of other hosts, for one start of the ranks."""

    def __init__(self, listening: Listening, store: Any, meeting: Meeting, round: str) -> None:
        """`round`: what the other hubs call this start by, if they come to this one."""
        self._listening, self._store, self._meeting, self._round = listening, store, meeting, round
        self._base = base_store(store)
        self._requests = requests_of(self._base)
        self._began = time.monotonic()
        self._steps: Steps | None = self._introduce()

    @property
    def done(self) -> bool:
        return self._steps is None

    @property
    def starting(self) -> float:
        """The seconds for which hubs of other hosts may still be starting; negative after that."""
        return self._began + START_OF_HUBS - time.monotonic()

    def step(self) -> None:
        """Goes on, up to where it has to wait for the hub or for another host. Raises nothing of its own."""
        if self._steps is None:
            return
        try:
            next(self._steps)
        except StopIteration:
            self._steps = None
        except (RuntimeError, OSError, ValueError, TypeError) as error:
            # A store that is gone or silent, or one that another program writes to.
            self._steps = None
            self._listening.hub.tell("note", what=f"not introduced: {error}")

    def finish(self, seconds: float) -> None:
        """Goes on for a limited time until it is done."""
        end = time.monotonic() + seconds
        self.step()
        while not self.done and time.monotonic() < end:
            time.sleep(_PAUSES[0])
            self.step()

    def _introduce(self) -> Steps:
        """One key of the store for each of the first hosts; all hosts read them."""
        listening, hub, store = self._listening, self._listening.hub, self._store
        host, prefix = self._meeting.host, f"{_PREFIX}{self._meeting.restarts}/"
        if not listening.token:
            listening.token = yield from self._common_token()
        if not listening.token or (here := (yield from listening.open())) is None:
            return
        if host == 0:
            print(f"unicomm: to watch the job: unicomm trace top --connect {here[6:]}", file=sys.stderr)
        wanted = set(range(min(_DIRECTORIES, self._meeting.hosts)))
        told: dict[int, tuple[int, str, str]] = {}

        def join() -> None:
            hub.tell("join", directories=[told[n] for n in sorted(told)])

        if host in wanted:
            wanted.discard(host)
            told[host] = (host, here, self._round)
            join()
            said = json.dumps([here, self._round])
            yield from self._ask(lambda: store.set(f"{prefix}{host}", said))
        end = time.monotonic() + _STARTING
        for turn in itertools.count():
            for number in sorted(wanted):
                key = f"{prefix}{number}"
                if (text := (yield from self._read(store, key))) is not None:
                    address, round = json.loads(text)
                    told[number] = (number, str(address), str(round))
                    wanted.discard(number)
                    join()
            if not wanted or not (yield from self._pause(turn, end)):
                return

    def _common_token(self) -> Generator[None, None, str]:
        """Returns the token that the first launcher makes for the whole job; "" if it does not come.

        Later attempts, and hosts that join later, use it, too: hubs take one token for good.
        """
        base, key = self._base, f"{_PREFIX}token/{self._meeting.job}"
        if (yield from self._ask(lambda: base.add(f"{key}/made", 1))) == 1:
            fresh = secrets.token_hex(16)
            yield from self._ask(lambda: base.set(key, fresh))
            return fresh
        end = time.monotonic() + _STARTING
        for turn in itertools.count():
            if (text := (yield from self._read(base, key))) is not None:
                return text
            if not (yield from self._pause(turn, end)):
                break
        return ""

    def _pause(self, turn: int, end: float) -> Generator[None, None, bool]:
        """Waits before the next look at the store, and returns True; False when it is time to give up."""
        shortest, longest = _PAUSES
        now = time.monotonic()
        most = longest if self.starting < 0 else longest / 10
        while time.monotonic() < now + min(shortest * 2 ** min(turn, 10), most):
            yield
        return now < end

    def _read(self, store: Any, key: str) -> Generator[None, None, str | None]:
        """Returns what is at a key of a store; None if it is not set."""
        if not (yield from self._ask(lambda: store.check([key]))):
            return None
        return bytes((yield from self._ask(lambda: store.get(key)))).decode()

    def _ask(self, job: Callable[[], Any]) -> Generator[None, None, Any]:
        """Returns what `job` does with the store. Raises `OSError` if the store fails or does not answer."""
        if self._requests is None:
            return job()
        try:
            request = self._requests.begin(self._base, job)
        except NoAnswerError as error:
            raise OSError(str(error)) from None
        end = time.monotonic() + _STARTING
        try:
            while not request.answered.acquire(blocking=False):
                if time.monotonic() > end:
                    who = host_of(self._store).words
                    raise TimeoutError(f"the store did not answer within {_STARTING:g} s: waited for {who}")
                yield
        finally:
            self._requests.leave(request)
        if request.error is not None:
            raise OSError(f"the store failed: {first_line(request.error)}")
        return request.result
