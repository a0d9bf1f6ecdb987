"""This host's part of a job of `unicomm run`: rings and hub of each attempt, and how an attempt failed.

An attempt is one start of the ranks. torchrun's agent, in a subclass, reports to `Job` what happens.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
import threading
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from unicomm.flight_recorder.ring.copies import freeze
from unicomm.launch.hub.hub_process import HubProcess

from .job_folder import JobFolder, note_hub

_PREFIX = "unicomm/hub/"
_DIRECTORIES = 3  # the number of hosts, the first ones, whose hubs know all others
_PAUSES = (0.05, 5.0)  # seconds between two polls of the store: the first pause, and the longest
_STARTING = 30.0  # seconds in which a hub has to start
_ACKNOWLEDGED, _GATHERED = 3.0, 25.0  # seconds until the hub says that it gathers, and that it is done


@dataclass(frozen=True)
class HubSettings:
    """How a hub listens. `several`: whether the job has other hosts."""

    token: str
    address: str
    port: int
    any_port: bool
    several: bool


@dataclass
class Attempt:
    """One start of this host's ranks. `failure` says why it failed, "" if it has not."""

    number: int
    failure: str = ""


@dataclass(frozen=True)
class Evidence:
    """The rings of a failed attempt.

    Attributes:
        folder: the folder with the rings of `hosts` hosts: of all, or of this one alone.
        elsewhere: the host of that folder, "" if it is this one; `sentence` is then its main finding.
        remarks: what is missing, a sentence each.
    """

    folder: Path
    hosts: int = 1
    elsewhere: str = ""
    sentence: str = ""
    remarks: tuple[str, ...] = ()


class Job:
    """This host's part of a job."""

    def __init__(self, folder: JobFolder, hub: HubProcess | None, settings: HubSettings | None) -> None:
        self.folder = folder
        self._hub, self._settings = hub, settings
        self._note: Path | None = None
        self.attempt = Attempt(-1)
        self._ended = threading.Event()

    # --- starting ranks --------------------------------------------------------------------------------

    def starting(self) -> None:
        """Begins an attempt: the ranks, which are about to be started, inherit the folder for their rings."""
        self.attempt = Attempt(self.attempt.number + 1)
        rings = self.folder.rings(self.attempt.number)
        rings.mkdir(mode=0o700)
        os.environ["UNICOMM_TRACE_DIR"] = str(rings)

    def started(self, store: Any, host: int, hosts: int) -> None:
        """Notes that the ranks run, and introduces the hub to those of other hosts in the background."""
        if self._hub is None:
            return
        number = self.attempt.number
        self._hub.forget("gathering", "gathered", "not gathered")
        places = (self.folder.rings(number), self.folder.frozen(number), self.folder.job(number))
        self._hub.tell("attempt", **dict(zip(("rings", "frozen", "job"), map(str, places), strict=True)))
        with contextlib.suppress(AttributeError, RuntimeError):  # not every store can be cloned
            store = store.clone()
        introduction = threading.Thread(
            target=self._introduce, args=(self.attempt, store, host, hosts), name="hubs", daemon=True
        )
        introduction.start()

    def _introduce(self, attempt: Attempt, store: Any, host: int, hosts: int) -> None:
        """Lets the hubs find each other through the rendezvous store: one key for each of the first hosts."""
        assert self._hub is not None
        assert self._settings is not None
        try:
            token = self._settings.token or self._shared_token(store, host)
            if not token or (here := self._open(token)) is None:
                return
            if host == 0:
                print(f"unicomm: to watch the job: unicomm trace top --connect {here[6:]}", file=sys.stderr)
            told: dict[int, tuple[int, str, str]] = {}
            own = secrets.token_hex(8)
            if host < _DIRECTORIES:
                store.set(f"{_PREFIX}{host}", json.dumps([here, own]))
            for number in range(min(_DIRECTORIES, hosts)):
                text = self._look_up(store, f"{_PREFIX}{number}")
                if not text or self.attempt is not attempt:
                    continue
                address, round = (here, own) if number == host else json.loads(text)
                told[number] = (number, str(address), str(round))
                self._hub.tell(
                    "join", host=host, hosts=hosts, round=own, directories=[told[n] for n in sorted(told)]
                )
        except Exception as error:  # a store that is gone, or one that another program writes to
            self._hub.tell("note", what=f"not introduced: {error}")

    def _shared_token(self, store: Any, host: int) -> str:
        key = f"{_PREFIX}token"
        if host == 0:
            store.set(key, secrets.token_hex(16))
        return self._look_up(store, key)

    def _look_up(self, store: Any, key: str) -> str:
        """Polls the store for a key and returns its value; "" if it is not set in time."""
        seconds, (pause, longest) = _STARTING, _PAUSES
        while not store.check([key]):
            seconds -= pause
            if seconds <= 0 or self._ended.wait(pause):
                return ""
            pause = min(2 * pause, longest)
        return bytes(store.get(key)).decode()

    def _open(self, token: str) -> str | None:
        """Lets the hub listen, and returns its address; None if it cannot."""
        assert self._hub is not None
        assert self._settings is not None
        if self._note is None:
            settings = self._settings
            self._hub.tell(
                "open", token=token, address=settings.address, port=settings.port, others=settings.any_port
            )
        said = self._hub.wait("open", "closed", seconds=_STARTING)
        if said is None or said["say"] == "closed":
            why = said["why"] if said else "its process does not answer"
            print(f"unicomm: there is no hub: {why}", file=sys.stderr, flush=True)
            return None
        if self._note is None:
            self._note = note_hub(said["address"], said["port"], token, self._hub.pid, self.folder.path)
        from unicomm.launch.hub.protocol import zmq_address

        return zmq_address(said["address"], said["port"])

    # --- failures ------------------------------------------------------------------------------------------

    def look_at(self, pids: Iterable[int]) -> None:
        """Notes a failed process before the agent sees it and ends all others."""
        for pid in pids:
            try:
                end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:  # the agent has seen it already
                continue
            if end is not None and (end.si_code != os.CLD_EXITED or end.si_status != 0):
                self.fail("a rank failed")
                return

    def fail(self, why: str, running: Collection[int] = ()) -> None:
        """Notes a failure and copies the rings. `running`: processes that ran until the agent ended them."""
        if self.attempt.failure or self.attempt.number < 0:
            return
        self.attempt.failure = why
        number = self.attempt.number
        with contextlib.suppress(OSError):
            freeze(self.folder.rings(number), self.folder.frozen(number), running)
        if self._hub is not None:
            self._hub.tell("failed")

    def evidence(self) -> Evidence:
        """Returns the rings of the failed attempt; waits a limited time for those of other hosts."""
        own = self.folder.frozen(self.attempt.number)
        if self._hub is None:
            return Evidence(own)
        said = self._hub.wait("gathering", seconds=_ACKNOWLEDGED)
        if said is not None:
            said = self._hub.wait("gathered", "not gathered", seconds=_GATHERED)
        if said is None or said["say"] == "not gathered":
            why = said["why"] if said else "this host's hub does not answer"
            several = self._settings is not None and self._settings.several
            return Evidence(own, remarks=(f"only the rings of this host: {why}",) if several else ())
        found = Evidence(Path(said["folder"]), said["hosts"], remarks=tuple(said["missing"]))
        if said["here"]:
            return found
        return Evidence(found.folder, found.hosts, said["host"], said["sentence"], found.remarks)

    def close(self, keep: bool) -> None:
        """Ends the hub, and removes the rings unless `keep`."""
        self._ended.set()
        if self._note is not None:
            with contextlib.suppress(OSError):
                self._note.unlink()
        if self._hub is not None:
            self._hub.close()
        self.folder.close(keep)


def agent_class(job: Job, on_restart: Any) -> type[LocalElasticAgent]:
    """Returns a subclass of torchrun's agent that reports to `job`, and calls `on_restart` at restarts."""

    class Agent(LocalElasticAgent):
        def _start_workers(self, worker_group: Any) -> dict[int, Any]:
            job.starting()
            ids: dict[int, Any] = super()._start_workers(worker_group)
            job.started(worker_group.store, worker_group.group_rank, worker_group.group_world_size)
            return ids

        def _process_ids(self) -> set[int]:
            return set(self._pcontext.pids().values()) if self._pcontext else set()

        def _monitor_workers(self, worker_group: Any) -> Any:
            pids = self._process_ids()
            job.look_at(pids)
            result = super()._monitor_workers(worker_group)
            if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
                job.fail("a rank failed", pids - {failure.pid for failure in result.failures.values()})
            return result

        def _restart_workers(self, worker_group: Any) -> None:
            if job.attempt.failure:
                on_restart()
            else:
                job.attempt.failure = "hosts joined or left the job"
            super()._restart_workers(worker_group)

        def _shutdown(self, *arguments: Any, **more: Any) -> None:
            if any(_runs(pid) for pid in self._process_ids()):
                job.fail("the launcher was told to stop")
            super()._shutdown(*arguments, **more)

    return Agent


def _runs(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False
