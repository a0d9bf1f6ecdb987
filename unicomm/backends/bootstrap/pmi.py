"""A text from rank 0 to all ranks by PMI: over the connection at PMI_FD to the launcher's process manager.

PMI-1 is lines of `key=value`; Hydra (MPICH, Intel MPI) has it. This process sends neither `init` nor
`finalize`, which are left to the MPI library: Hydra takes a process for dead that has sent `init` and ends
without `finalize`.

PMI-2 is `key=value;` after six characters of length; Slurm (`srun --mpi=pmi2`) has it. Slurm answers nothing
before `init`, and accepts `init` once in the life of a process: after it, MPI cannot be initialised here.
"""

from __future__ import annotations

import os
import re
import socket
import time
from types import TracebackType

_MOST = 4096  # characters of an answer
_HEADER = 6  # characters of the length before a PMI-2 message

_used_up: set[int] = set()  # ids of processes that have sent PMI-2's `init`: a forked child has not


def used_up() -> bool:
    """Whether this process has used up the one `init` that its process manager accepts, which MPI needs."""
    return os.getpid() in _used_up


def by_pmi1(descriptor: str, key: str, value: str | None, timeout: float) -> str:
    """Collective: returns what rank 0 passes as `value`.

    Raises `TimeoutError` if not all ranks came, and `OSError`, `ValueError` or `KeyError` if the other end
    does not speak PMI-1.
    """
    with _Manager(descriptor, timeout) as manager:
        name = manager.ask_line("cmd=get_my_kvsname")["kvsname"]
        if value is not None:
            manager.ask_line(f"cmd=put kvsname={name} key={key} value={value}")
        manager.ask_line("cmd=barrier_in")
        return manager.ask_line(f"cmd=get kvsname={name} key={key}")["value"]


def by_pmi2(descriptor: str, job: str, rank: int, key: str, value: str | None, timeout: float) -> str:
    """The same by PMI-2, once in a process. `job`: the manager's name for the job, PMI_JOBID."""
    if used_up():
        raise ValueError("it takes one `init` from each process, and has had it")
    with _Manager(descriptor, timeout) as manager:
        _used_up.add(os.getpid())
        spoken = manager.ask_line("cmd=init pmi_version=2 pmi_subversion=0").get("pmi_version")
        if spoken != "2":
            raise ValueError(f"it speaks version {spoken} of PMI")
        manager.ask_frame("fullinit", pmijobid=job, pmirank=str(rank), threaded="FALSE")
        if value is not None:
            manager.ask_frame("kvs-put", key=key, value=value)
        manager.ask_frame("kvs-fence")
        answer = manager.ask_frame("kvs-get", jobid=job, srcid="-1", key=key)
        if answer.get("found", "TRUE").upper() != "TRUE":
            raise ValueError(f"it does not know {key}, which rank 0 has put there")
        manager.ask_frame("finalize")
        return answer["value"]


class _Manager:
    """The connection to the process manager, with a deadline for everything in a `with` block."""

    def __init__(self, descriptor: str, timeout: float) -> None:
        if not descriptor.isdecimal() or len(descriptor) > 9:
            raise ValueError(f"PMI_FD={descriptor!r} is no file descriptor")
        duplicate = os.dup(int(descriptor))
        try:
            self.socket = socket.socket(fileno=duplicate)
        except OSError:
            os.close(duplicate)
            raise
        self.deadline = time.monotonic() + timeout

    def __enter__(self) -> _Manager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        # A timeout makes the connection non-blocking, for MPI as well.
        self.socket.settimeout(None)
        self.socket.close()

    def ask_line(self, line: str) -> dict[str, str]:
        self._send(line + "\n")
        data = b""
        while not data.endswith(b"\n"):
            if len(data) == _MOST:
                raise ValueError(f"it answered more than {_MOST} characters: {data[:40]!r}...")
            data += self._receive(1)  # no more than the answer: what follows is MPI's
        return _checked(dict(part.split("=", 1) for part in _text(data).split() if "=" in part))

    def ask_frame(self, command: str, **values: str) -> dict[str, str]:
        parts = {"cmd": command, **values}
        body = "".join(f"{name}={value.replace(';', ';;')};" for name, value in parts.items())
        self._send(f"{len(body.encode()):{_HEADER}d}{body}")
        header = _text(self._receive(_HEADER))
        if not header.strip().isdecimal() or int(header) > _MOST:
            raise ValueError(f"it answered {header!r} where the length of a message is due")
        text = _text(self._receive(int(header)))
        # A doubled semicolon belongs to the value; a single one ends it.
        pairs = re.findall(r"([^=;]+)=((?:[^;]|;;)*);(?!;)", text)
        answer = _checked({name: value.replace(";;", ";") for name, value in pairs})
        if answer.get("cmd") != f"{command}-response":
            raise ValueError(f"it answered {text!r} to {command}")
        return answer

    def _send(self, text: str) -> None:
        self._limit()
        self.socket.sendall(text.encode())

    def _receive(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            self._limit()
            more = self.socket.recv(count - len(data))
            if not more:
                raise OSError("it hung up")
            data += more
        return data

    def _limit(self) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self.socket.settimeout(left)


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


def _checked(answer: dict[str, str]) -> dict[str, str]:
    if answer.get("rc", "0") != "0":
        raise ValueError(f"it answered {answer}")
    return answer
