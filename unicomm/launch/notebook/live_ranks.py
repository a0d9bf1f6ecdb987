"""`launch`, and `Ranks`: the processes that it starts."""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from unicomm.c10d.choice import CHOICE
from unicomm.c10d.switch import VARIABLE
from unicomm.comms.errors import BackendError, CommTimeoutError, InvalidArgumentError, NotReadyError
from unicomm.comms.membership.environment import LAUNCHERS, METHOD

from .channel import dump_call, sources
from .output import Listener, RankOutput
from .rank_call import RankCall
from .rank_errors import end_of, names
from .worker_process import Event, WorkerProcess

_CLOSE = 10.0  # seconds in which workers can end by themselves
_SLOW = 5.0  # seconds of start-up between two messages about its progress


def launch(
    n: int,
    *,
    backend: str | None = "auto",
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    grace: float = 5.0,
    start_timeout: float = 120.0,
    modules: Sequence[str] = ("torch",),
    output: bool | Listener = True,
) -> Ranks:
    """Starts `n` ranks on this host and returns when all are ready; `Ranks.run` calls functions on them.

    In each rank `unicomm.new_comm` and `torch.distributed.init_process_group` find the other ranks by the
    environment. The ranks end with the `with` block, with `Ranks.close`, and whenever this process ends.

    Args:
        n: the number of ranks.
        backend: the backend behind torch.distributed, by the switch: "auto", "shm", "gloo" or another name
            that `new_comm` accepts. None leaves torch.distributed as it is.
        env: additional environment variables, which override all others.
        timeout: seconds that a `run` without a `timeout` of its own may take; None: no limit.
        grace: seconds in which ranks can end by themselves when another one has failed, and again after
            they were interrupted; then they are killed.
        start_timeout: seconds in which all ranks have to start.
        modules: the modules that the ranks import before they are ready.
        output: True shows what the ranks print, with the rank before each line; False drops it; a function
            gets each line as (rank, "stdout" or "stderr", line). Shown while a call runs, and at the end.

    Raises `InvalidArgumentError` before anything is started, `BackendError` when a rank fails to start,
    `CommTimeoutError` when it takes too long.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise InvalidArgumentError(f"n={n!r} is not a number of ranks", hint="pass 1 or more")
    for name, seconds in (("timeout", timeout), ("grace", grace), ("start_timeout", start_timeout)):
        if seconds is not None and not seconds > 0:
            raise InvalidArgumentError(f"{name}={seconds!r} is not positive", hint="pass seconds")
    if backend is not None:
        from unicomm.backends.registry import find_backend

        find_backend(backend)
    return Ranks(n, backend, dict(env or {}), timeout, grace, start_timeout, tuple(modules), output)


class Ranks:
    """Live ranks, which `launch` starts. Only one thread may use them at a time.

    Attributes:
        size: the number of ranks.
        pids: the process ids, by rank.
    """

    def __init__(
        self,
        size: int,
        backend: str | None,
        env: dict[str, str],
        timeout: float | None,
        grace: float,
        start_timeout: float,
        modules: Sequence[str],
        output: bool | Listener,
    ) -> None:
        self.size = size
        self.pids: tuple[int, ...] = ()
        self._backend, self._env, self._modules = backend, env, modules
        self._timeout, self._grace, self._start_timeout = timeout, grace, start_timeout
        drop: Listener = lambda rank, stream, line: None  # noqa: E731
        self._output = RankOutput(size, None if output is True else output or drop)
        self._busy = threading.Lock()
        self._runs = 0
        self._start()

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        ranks: Iterable[int] | None = None,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Calls `fn(*args, **kwargs)` on all ranks, or on `ranks`; returns the results in order of rank.

        `fn` may be a lambda or a function of this notebook or script. It may use the notebook's variables, of
        which it gets copies. Keep values for later calls in `state`.

        Ctrl-C ends the call, not the ranks. A rank that does not react within the grace period is killed; a
        second Ctrl-C kills at once.

        Raises `RankError` when ranks raise, end, or are not done within `timeout` seconds;
        `InvalidArgumentError` for a call that cannot be sent; `NotReadyError` after `close` and during
        another run.
        """
        chosen = self._choose(ranks)
        limit = self._timeout if timeout is None else timeout
        if limit is not None and not limit > 0:
            raise InvalidArgumentError(f"timeout={timeout!r} is not positive", hint="pass seconds")
        if os.getpid() != self._owner:
            raise NotReadyError(
                "these ranks belong to the process that forked this one", hint="launch new ones here"
            )
        if not self._workers:
            raise NotReadyError("these ranks are closed", hint="launch new ones, or restart()")
        call = dump_call(fn, args, kwargs)
        if not self._busy.acquire(blocking=False):
            raise NotReadyError("another thread runs a call on these ranks", hint="make one call at a time")
        try:
            self._runs += 1
            running = RankCall(self._workers, chosen, self._runs, self._events, self._output, self._grace)
            running.start(call, sources(self._known), limit)
            results = running.wait()
        finally:
            self._output.flush()
            self._busy.release()
        return [results[rank] for rank in chosen]

    def restart(self) -> None:
        """Replaces all processes by new ones: after one was killed, or to import changed modules."""
        self.close()
        self._start()

    def close(self) -> None:
        """Ends the ranks. Ranks that still run a call after 10 seconds are killed."""
        self._end()
        self._workers: list[WorkerProcess] = []
        with contextlib.suppress(queue.Empty):
            while True:
                rank, what, *more = self._events.get_nowait()
                if what == "text":
                    self._output.add(rank, *more)
        self._output.flush()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        ended = [worker.rank for worker in self._workers if worker.ended is not None]
        how = f", {names(ended)} ended" if ended else ""
        return f"<{self.size} ranks{how}>" if self._workers else f"<{self.size} ranks, closed>"

    def __reduce__(self) -> Any:
        raise TypeError("a `Ranks` object cannot be sent to its ranks: leave it out of the function")

    def _choose(self, ranks: Iterable[int] | None) -> list[int]:
        chosen = list(range(self.size)) if ranks is None else list(ranks)
        good = all(type(r) is int and 0 <= r < self.size for r in chosen) and len(set(chosen)) == len(chosen)
        if not chosen or not good:
            raise InvalidArgumentError(
                f"ranks={chosen} are not ranks of these", hint=f"pass each once, from 0 to {self.size - 1}"
            )
        return sorted(chosen)

    def _start(self) -> None:
        self._known: set[str] = set()  # the names of sources that the workers have
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._workers = []
        self._owner = os.getpid()
        store = _host_store()
        environment = self._environment(store.port)
        # Also runs at the end of the interpreter, and when this object is collected.
        self._end = weakref.finalize(self, _end, self._owner, self._workers, store)
        try:
            for rank in range(self.size):
                places = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                env = environment | places | self._env
                self._workers.append(WorkerProcess(rank, env, self._modules, self._events))
            self._await_start()
        except BaseException:
            for worker in self._workers:
                worker.kill()
            self.close()
            raise
        self.pids = tuple(worker.pid for worker in self._workers)

    def _environment(self, port: int) -> dict[str, str]:
        """Returns the ranks' environment: torchrun's variables, without those of this process's launcher."""
        foreign = {METHOD} | {name for row in LAUNCHERS for name in (row.rank, *row.sizes)}
        inherited = {name: value for name, value in os.environ.items() if name not in foreign}
        cores = len(os.sched_getaffinity(0))
        settings = {
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(self.size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": f"notebook-{secrets.token_hex(4)}",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        if self._backend is not None:
            settings |= {VARIABLE: "1", CHOICE: self._backend}
        return {"OMP_NUM_THREADS": str(max(1, cores // self.size))} | inherited | settings

    def _await_start(self) -> None:
        missing = set(range(self.size))
        began = now = time.monotonic()
        reported = began
        while missing:
            try:
                rank, what, *more = self._events.get(timeout=0.5)
            except queue.Empty:
                what = ""
            now = time.monotonic()
            if what == "text":
                self._output.add(rank, *more)
            elif what == "ready":
                missing.discard(rank)
            elif what in ("broken", "ended"):
                self._output.flush()
                why = more[1].rstrip() if what == "broken" else end_of(more[0])
                raise BackendError(
                    f"rank {rank} did not start: {why}", culprits=[rank], hint="look at its output"
                )
            if missing and now - began > self._start_timeout:  # ranks that wait print all the same
                raise CommTimeoutError(
                    f"{names(missing)} did not start within {self._start_timeout:g} s",
                    culprits=sorted(missing),
                    hint="check what else runs on this machine, or raise start_timeout=",
                )
            if missing and now - reported > _SLOW:
                reported = now
                count = self.size - len(missing)
                self._output.say(f"{count} of {self.size} ranks are ready after {now - began:.0f} s")


def _host_store() -> Any:
    """Creates the ranks' store in this process, on loopback; its port is bound when it is chosen."""
    from unicomm.c10d.compat import TCPStore

    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    port = listener.getsockname()[1]
    return TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _end(owner: int, workers: Sequence[WorkerProcess], store: Any) -> None:
    if os.getpid() != owner:
        return  # a forked child that ends
    for worker in workers:
        if worker.ended is None:
            worker.send("close")
    deadline = time.monotonic() + _CLOSE
    for worker in workers:
        if not worker.join(max(0.0, deadline - time.monotonic())):
            worker.kill()
    for worker in workers:
        worker.join()
