"""What `unicomm run` does around torchrun's agent: folders for rings, the hub, and who failed first."""

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

from .job_folder import RunFolder, note_hub

_PREFIX = "unicomm/hub/"
_DIRECTORIES = 3  # hosts, the first ones, whose hubs know all others
_LOOKS = (0.05, 5.0)  # seconds between looks for what others write into the store: at first, at last
_STARTING = 30.0  # seconds that a hub may take to start
_ACKNOWLEDGED, _GATHERED = 3.0, 25.0  # seconds for the hub to say that it gathers, and that it has


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
    """One start of this host's ranks. `failure` is why it ended, "" while it has not failed."""

    number: int
    failure: str = ""
    joined: bool = False


@dataclass(frozen=True)
class Evidence:
    """Where the rings of a failed attempt are.

    Attributes:
        folder: of all hosts, or of this one where the others' could not be had.
        elsewhere: the host that has them, with its main finding; "" where it is this one.
        remarks: what is missing, a sentence each.
    """

    folder: Path
    hosts: int = 1
    elsewhere: str = ""
    sentence: str = ""
    remarks: tuple[str, ...] = ()


class Job:
    """This host's part of a job."""

    def __init__(self, folder: RunFolder, hub: HubProcess | None, settings: HubSettings | None) -> None:
        self.folder = folder
        self._hub, self._settings = hub, settings
        self._note: Path | None = None
        self.attempt = Attempt(-1)
        self._ended = threading.Event()

    # --- starting ranks --------------------------------------------------------------------------------

    def starting(self) -> None:
        """Ranks are about to be started: they inherit where to write."""
        self.attempt = Attempt(self.attempt.number + 1)
        rings = self.folder.rings(self.attempt.number)
        rings.mkdir(mode=0o700)
        os.environ["UNICOMM_TRACE_DIR"] = str(rings)

    def started(self, store: Any, host: int, hosts: int) -> None:
        """They run; the hub is introduced to those of other hosts beside that, and without haste."""
        if self._hub is None:
            return
        number = self.attempt.number
        self._hub.forget("gathering", "gathered", "not gathered")
        places = (self.folder.rings(number), self.folder.frozen(number), self.folder.job(number))
        self._hub.tell("attempt", **dict(zip(("rings", "frozen", "job"), map(str, places), strict=True)))
        with contextlib.suppress(AttributeError, RuntimeError):  # not every store can be
            store = store.clone()
        introduction = threading.Thread(
            target=self._introduce, args=(self.attempt, store, host, hosts), name="hubs", daemon=True
        )
        introduction.start()

    def _introduce(self, attempt: Attempt, store: Any, host: int, hosts: int) -> None:
        """The hubs find each other through the store of the rendezvous: one key a host, for the first few."""
        assert self._hub is not None
        assert self._settings is not None
        try:
            token = self._settings.token or self._shared_token(store, host)
            if not token or (here := self._open(token)) is None:
                return
            if host == 0:
                print(f"unicomm: watch it by: unicomm trace top --connect {here[6:]}", file=sys.stderr)
            told: dict[int, tuple[int, str, str]] = {}
            own = secrets.token_hex(8)
            if host < _DIRECTORIES:
                store.set(f"{_PREFIX}{host}", json.dumps([here, own]))
            for number in range(min(_DIRECTORIES, hosts)):
                text = self._look_up(store, f"{_PREFIX}{number}", _STARTING)
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
        return self._look_up(store, key, _STARTING)

    def _look_up(self, store: Any, key: str, seconds: float) -> str:
        """What a key holds as soon as it is there; "" when it does not come. Holds the store only shortly."""
        pause, longest = _LOOKS
        while not store.check([key]):
            seconds -= pause
            if seconds <= 0 or self._ended.wait(pause):
                return ""
            pause = min(2 * pause, longest)
        return bytes(store.get(key)).decode()

    def _open(self, token: str) -> str | None:
        """The hub's address, as soon as it listens."""
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
            print(f"unicomm: no hub: {why}", file=sys.stderr, flush=True)
            return None
        if self._note is None:
            self._note = note_hub(said["address"], said["port"], token, self._hub.pid, self.folder.path)
        from unicomm.launch.hub.protocol import zmq_address

        return zmq_address(said["address"], said["port"])

    # --- ends ----------------------------------------------------------------------------------------------

    def look_at(self, pids: Iterable[int]) -> None:
        """Notes a failed process before the agent does, which ends all others when it sees one."""
        for pid in pids:
            try:
                end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:  # the agent knows
                continue
            if end is not None and (end.si_code != os.CLD_EXITED or end.si_status != 0):
                self.fail("a rank failed")
                return

    def fail(self, why: str, running: Collection[int] = ()) -> None:
        """Keeps the rings as they are. `running`: processes that ran until the agent ended them."""
        if self.attempt.failure or self.attempt.number < 0:
            return
        self.attempt.failure = why
        number = self.attempt.number
        with contextlib.suppress(OSError):
            freeze(self.folder.rings(number), self.folder.frozen(number), running)
        if self._hub is not None:
            self._hub.tell("failed")

    def evidence(self) -> Evidence:
        """Where the rings of the failed attempt are; waits for those of other hosts, but not for ever."""
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
        """Ends the hub, and removes the rings or, with `keep`, those that were kept twice."""
        self._ended.set()
        if self._note is not None:
            with contextlib.suppress(OSError):
                self._note.unlink()
        if self._hub is not None:
            self._hub.close()
        self.folder.close(keep)


def agent_class(job: Job, on_restart: Any) -> type[LocalElasticAgent]:
    """torchrun's agent, which tells `job` what happens. `on_restart`: called when failed ranks start anew."""

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
                job.attempt.failure = "other hosts came or went"
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
