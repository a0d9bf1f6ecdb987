"""This host's part of a job of `unicomm run`: rings and hub of each attempt, and how an attempt failed.

An attempt is one start of the ranks. torchrun's agent, in a subclass (agent.py), reports what happens.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unicomm.flight_recorder.ring.copies import copy_side_files, freeze
from unicomm.flight_recorder.ring.endings import EXITS, LAUNCHER, describe_exits
from unicomm.flight_recorder.ring.folder import SUFFIX, ring_name
from unicomm.launch.exporter.exporter_process import ExporterProcess
from unicomm.launch.hub.hub_process import HubProcess

from .introduction import HubSettings, Introduction, Listening, Meeting
from .job_folder import JobFolder
from .memory_kills import MemoryKills

_INTRODUCED = 3.0  # seconds that a failed host gives the others to introduce their hubs, if they had time to
_ACKNOWLEDGED, _GATHERED = 3.0, 45.0  # seconds until the hub says that it gathers, and that it is done


@dataclass
class Attempt:
    """One start of this host's ranks.

    Attributes:
        number: counts from 0.
        failure: why it failed, "" if it has not.
        failed_at: when, by `time.monotonic()`.
        ended: the ranks that had failed before the launcher ended the others: exit code, or minus the signal.
        pids: the processes of this host's ranks.
        unstartable: why a rank's process could not be started.
        last: whether no restart is left.
        replaced: whether it ended only because hosts joined or left the job, so that nobody is to blame.
    """

    number: int
    failure: str = ""
    failed_at: float = 0.0
    ended: dict[int, int] = field(default_factory=dict)
    pids: dict[int, int] = field(default_factory=dict)
    unstartable: OSError | None = None
    last: bool = True
    replaced: bool = False


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

    def __init__(
        self,
        folder: JobFolder,
        hub: HubProcess | None,
        settings: HubSettings | None,
        exporter: ExporterProcess | None = None,
    ) -> None:
        self.folder = folder
        self._hub, self._exporter = hub, exporter
        self._several = settings is not None and settings.several
        self._listening = Listening(hub, settings, folder.path) if hub and settings else None
        self._introduction: Introduction | None = None
        self._asked = False  # whether the hub was told of the failure
        self.attempt = Attempt(-1)
        self._kills = MemoryKills()
        os.environ[LAUNCHER] = str(os.getpid())

    # --- starting ranks --------------------------------------------------------------------------------

    def starting(self) -> None:
        """Begins an attempt: the ranks, which are about to be started, inherit the folder for their rings."""
        self.attempt = Attempt(self.attempt.number + 1)
        rings = self.folder.rings(self.attempt.number)
        rings.mkdir(mode=0o700)
        os.environ["UNICOMM_TRACE_DIR"] = str(rings)
        if self._exporter is not None:
            self._exporter.follow(rings)

    def started(self, store: Any, meeting: Meeting) -> None:
        """Notes that the ranks run, and begins to introduce the hub to those of other hosts."""
        if self._hub is None or self._listening is None:
            return
        number = self.attempt.number
        self._asked = False
        places = (self.folder.rings(number), self.folder.frozen(number), self.folder.job(number))
        folders = dict(zip(("rings", "frozen", "job"), map(str, places), strict=True))
        round = secrets.token_hex(8)
        self._hub.tell(
            "attempt", number=number, **folders, host=meeting.host, hosts=meeting.hosts, round=round
        )
        self._introduction = Introduction(self._listening, store, meeting, round)
        self._introduction.step()

    def step(self) -> None:
        """Goes on with what need not wait; called whenever the launcher looks at its ranks."""
        if self._introduction is not None:
            self._introduction.step()

    # --- failures ------------------------------------------------------------------------------------------

    def look_at(self, pids: Mapping[int, int]) -> None:
        """Notes failed ranks before the agent sees one and ends all others. `pids`: by rank."""
        self.attempt.pids = dict(pids)
        self._kills.watch(pids.values())
        for rank, pid in pids.items():
            try:
                end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:  # the agent has seen it already
                continue
            if end is not None and (end.si_code != os.CLD_EXITED or end.si_status != 0):
                self.attempt.ended[rank] = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        if self.attempt.ended:
            self.fail("a rank failed")

    def fail(self, why: str, running: Collection[int] = ()) -> None:
        """Notes a failure and copies the rings. `running`: processes that ran until the agent ended them."""
        if self.attempt.failure or self.attempt.number < 0:
            return
        self.attempt.failure, self.attempt.failed_at = why, time.monotonic()
        rings, frozen = (of(self.attempt.number) for of in (self.folder.rings, self.folder.frozen))
        with contextlib.suppress(OSError):
            self._note_exits(rings)
            if not freeze(rings, frozen, running):  # the hub has copied them, for another host
                copy_side_files(rings, frozen)
        if not self._several or self._introduction is None or self._introduction.done:
            self._ask_hub()

    def _note_exits(self, folder: Path) -> None:
        """Writes the exit codes of ranks that ended by themselves beside their rings. Raises `OSError`."""
        attempt = self.attempt
        killed = [r for r, code in attempt.ended.items() if code == -signal.SIGKILL]
        evidence = {rank: self._kills.evidence(attempt.pids.get(rank, 0)) for rank in killed}
        host = socket.gethostname()
        name = f"{ring_name(-1, os.getpid()).removesuffix(SUFFIX)}{EXITS}"
        text = describe_exits(host, attempt.ended, attempt.pids, evidence, time.time_ns())
        (folder / name).write_text(text)

    def _ask_hub(self) -> None:
        if self._hub is not None and not self._asked:
            self._asked = True
            self._hub.tell("failed", number=self.attempt.number)

    def evidence(self) -> Evidence:
        """Returns the rings of the failed attempt; waits a limited time for those of other hosts."""
        own = self.folder.frozen(self.attempt.number)
        if self._hub is None:
            return Evidence(own)
        if self._several and self._introduction is not None:
            self._introduction.finish(max(_INTRODUCED, self._introduction.starting))
        self._ask_hub()
        number = self.attempt.number
        said = self._hub.wait("gathering", seconds=_ACKNOWLEDGED, attempt=number)
        if said is not None:
            said = self._hub.wait("gathered", "not gathered", seconds=_GATHERED, attempt=number)
        if said is None or said["say"] == "not gathered":
            why = said["why"] if said else "this host's hub does not answer"
            return Evidence(own, remarks=(f"only the rings of this host: {why}",) if self._several else ())
        found = Evidence(Path(said["folder"]), said["hosts"], remarks=tuple(said["missing"]))
        if said["here"]:
            return found
        return Evidence(found.folder, found.hosts, said["host"], said["sentence"], found.remarks)

    def abandon(self) -> None:
        """Kills the ranks of this host; for an end without a verdict, in a signal handler."""
        for pid in filter(runs, self.attempt.pids.values()):
            with contextlib.suppress(OSError):  # a rank that torchrun has started leads a group of its own
                os.killpg(pid, signal.SIGKILL) if os.getpgid(pid) == pid else os.kill(pid, signal.SIGKILL)

    def close(self, keep: bool) -> None:
        """Ends the hub, and removes the rings unless `keep`."""
        if self._listening is not None and self._listening.note is not None:
            with contextlib.suppress(OSError):
                self._listening.note.unlink()
        for beside in (self._hub, self._exporter):
            if beside is not None:
                beside.close()
        self._kills.close()
        self.folder.close(keep)


def runs(pid: int) -> bool:
    """Whether a rank's process runs. The number may be another process's once the agent has reaped it."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False
