"""How the hubs of a job's hosts find each other, through the rendezvous store, while the launcher goes on.

The launcher looks at its ranks many times a second: each time it also takes the next step here, if that step
need not wait. The store may belong to another host and not answer; the launcher still has to end its ranks
and to heed signals. So the requests to the store have a thread, which cannot outlive the interpreter
(comms/failures/store_requests.py).
"""

from __future__ import annotations

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
from unicomm.launch.hub.hub_process import HubProcess

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


class Listening:
    """Where this host's hub listens; one a job. `note` is the file that tells users of this host."""

    def __init__(self, hub: HubProcess, settings: HubSettings, folder: Path) -> None:
        self.hub, self.settings = hub, settings
        self.note: Path | None = None
        self._folder = folder
        self._asked = False

    def open(self, token: str) -> Generator[None, None, str | None]:
        """Lets the hub listen, and returns its address; None if it cannot."""
        if not self._asked:
            self._asked = True
            self.hub.tell(
                "open",
                token=token,
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
            self.note = note_hub(said["address"], said["port"], token, self.hub.pid, self._folder)
        from unicomm.launch.hub.protocol import zmq_address

        return zmq_address(said["address"], said["port"])


class Introduction:
    """Introduces this host's hub to those of other hosts, for one start of the ranks."""

    def __init__(self, listening: Listening, store: Any, host: int, hosts: int) -> None:
        self._listening, self._store = listening, store
        self._base = base_store(store)
        self._requests = requests_of(self._base)
        self._host, self._hosts = host, hosts
        self._steps: Steps | None = self._introduce()

    @property
    def done(self) -> bool:
        return self._steps is None

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
        hub, settings, store = self._listening.hub, self._listening.settings, self._store
        token = settings.token
        if not token:
            if self._host == 0:
                fresh = secrets.token_hex(16)
                yield from self._ask(lambda: store.set(f"{_PREFIX}token", fresh))
            token = yield from self._look_up(f"{_PREFIX}token")
        if not token or (here := (yield from self._listening.open(token))) is None:
            return
        if self._host == 0:
            print(f"unicomm: to watch the job: unicomm trace top --connect {here[6:]}", file=sys.stderr)
        told: dict[int, tuple[int, str, str]] = {}
        own = secrets.token_hex(8)
        if self._host < _DIRECTORIES:
            said = json.dumps([here, own])
            yield from self._ask(lambda: store.set(f"{_PREFIX}{self._host}", said))
        for number in range(min(_DIRECTORIES, self._hosts)):
            if number == self._host:
                address, round = here, own
            else:
                text = yield from self._look_up(f"{_PREFIX}{number}")
                if not text:
                    continue
                address, round = json.loads(text)
            told[number] = (number, str(address), str(round))
            hub.tell(
                "join",
                host=self._host,
                hosts=self._hosts,
                round=own,
                directories=[told[n] for n in sorted(told)],
            )

    def _look_up(self, key: str) -> Generator[None, None, str]:
        """Polls the store for a key and returns its value; "" if it is not set in time."""
        end, (pause, longest) = time.monotonic() + _STARTING, _PAUSES
        while not (yield from self._ask(lambda: self._store.check([key]))):
            if (now := time.monotonic()) > end:
                return ""
            while time.monotonic() < now + pause:
                yield
            pause = min(2 * pause, longest)
        return bytes((yield from self._ask(lambda: self._store.get(key)))).decode()

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
