"""The folders of a job of `unicomm run` on one host, and the notes that say where its hub listens.

run-DATE-PID-.../       one call of `unicomm run`; locked while it runs
    0/ 1/ ...           the rings of the first attempt, of the second, ...
    failed-0/ ...       copies of this host's rings, made when a rank failed
    job-0/ ...          the rings of all hosts
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from unicomm.flight_recorder.ring.files import MOST_SIDE_BYTES, open_file, read_file, trusted_owners
from unicomm.flight_recorder.ring.folder import pid_namespace, private_folder, process_start_ticks

DEFAULT_PORT = 29401  # of hubs: the port after that of torch's rendezvous
_OLDEST = 3 * 86400.0  # seconds that a job's rings are kept
_MOST = 8  # the number of ended jobs whose rings are kept
_LOCK, _LOG, _EXPORTER_LOG = ".lock", "hub.log", "exporter.log"


class JobFolder:
    """The folder of a new job, created in `base`. Raises `OSError`."""

    def __init__(self, base: Path) -> None:
        name = f"run-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{secrets.token_hex(3)}"
        self.path = base / name
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path.mkdir(mode=0o700)
        self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    @property
    def hub_log(self) -> Path:
        return self.path / _LOG

    @property
    def exporter_log(self) -> Path:
        return self.path / _EXPORTER_LOG

    def rings(self, attempt: int) -> Path:
        return self.path / str(attempt)

    def frozen(self, attempt: int) -> Path:
        return self.path / f"failed-{attempt}"

    def job(self, attempt: int) -> Path:
        return self.path / f"job-{attempt}"

    def close(self, keep: bool) -> None:
        """Unlocks the folder, and removes it unless `keep`."""
        if not keep:
            shutil.rmtree(self.path, ignore_errors=True)
        else:
            for log in (self.hub_log, self.exporter_log):
                with contextlib.suppress(OSError):
                    if not log.stat().st_size:
                        log.unlink()
        os.close(self._lock)


def _ended(folder: Path) -> bool:
    """Whether the job of a folder has ended."""
    try:
        lock = open_file(folder / _LOCK, trusted_owners(folder), flags=os.O_RDWR)[0]
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True


def clean(base: Path) -> None:
    """Removes the folders of ended jobs, except the few latest that are not old."""
    past = sorted((f for f in base.glob("run-*") if _ended(f)), reverse=True)
    for number, folder in enumerate(past):
        with contextlib.suppress(OSError):
            if number >= _MOST or time.time() - folder.stat().st_mtime > _OLDEST:
                shutil.rmtree(folder, ignore_errors=True)


# --- hubs of this host ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class HubNote:
    """Where the hub of a job listens, and its token; a file that only this user can read.

    `numbers` identifies the process namespace of `pid`: containers may share the folder, but not their pids.
    """

    address: str
    port: int
    token: str
    pid: int
    numbers: str
    ticks: int  # when the process started, to recognize another process with the same number
    folder: str


def note_hub(address: str, port: int, token: str, pid: int, folder: Path) -> Path:
    """Writes a note and returns its file. Raises `OSError`."""
    path = private_folder() / f"hub-{pid}-{secrets.token_hex(3)}.json"
    note = HubNote(address, port, token, pid, pid_namespace(), process_start_ticks(pid) or 0, str(folder))
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(asdict(note), file)
    return path


def running_hubs() -> Iterator[HubNote]:
    """Yields the notes of this user's running hubs on this host, and removes those of ended hubs."""
    for file in sorted(private_folder().glob("hub-*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError):
            note = HubNote(**json.loads(read_file(file, (os.geteuid(),), MOST_SIDE_BYTES)))
            if note.numbers != pid_namespace():
                continue
            if process_start_ticks(note.pid) == note.ticks:
                yield note
            else:
                file.unlink()
