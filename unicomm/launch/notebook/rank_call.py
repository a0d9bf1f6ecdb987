"""One call on live ranks, from sending it to its results: deadlines, interrupts and failures."""

from __future__ import annotations

import contextlib
import queue
import re
import time
from collections.abc import Sequence
from typing import Any, Literal

from .channel import load
from .output import RankOutput
from .rank_errors import RankError, RankFailure, end_of, names
from .worker_process import Event, WorkerProcess


class RankCall:
    """One call on some ranks, until all of them have answered or ended."""

    def __init__(
        self,
        workers: Sequence[WorkerProcess],
        ranks: Sequence[int],
        number: int,
        events: queue.SimpleQueue[Event],
        output: RankOutput,
        grace: float,
    ) -> None:
        self._workers, self._ranks, self._number = workers, ranks, number
        self._events, self._output, self._grace = events, output, grace
        self._pending = set(ranks)
        self._results: dict[int, Any] = {}
        self._failures: dict[int, RankFailure] = {}
        self._where: dict[int, str] = {}
        # The next step against ranks that still run the call, and its time: "interrupt" them, then "kill".
        self._next: Literal["", "timeout", "interrupt", "kill"] = ""
        self._at: float | None = None
        self._reason: Literal["timeout", "interrupted"] = "interrupted"
        self._stopped = False  # by Ctrl-C

    def start(self, call: bytes, source: dict[str, list[str]], limit: float | None) -> None:
        """Sends the call. Raises `RankError` if one of the ranks has ended before."""
        for rank in self._ranks:
            if (code := self._workers[rank].ended) is not None:
                self._failures[rank] = RankFailure(
                    rank, "ended", f"{end_of(code)} before; restart() makes new ones"
                )
        if self._failures:
            raise RankError(self._failures, {})
        if limit is not None:
            self._next, self._at, self._limit = "timeout", time.monotonic() + limit, limit
        try:
            for rank, worker in enumerate(self._workers):
                if rank in self._pending:
                    worker.send("run", self._number, call, source)
                elif source:
                    worker.send("learn", source)
        except KeyboardInterrupt:
            # Ranks that got the call are interrupted; a rank that got a part of it was killed.
            self._interrupt_by_user()

    def wait(self) -> dict[int, Any]:
        """Returns the results by rank. Raises the errors of `Ranks.run`."""
        while self._pending:
            try:
                left = None if self._at is None else max(0.0, self._at - time.monotonic())
                # Ranks that print faster than this side shows it would keep the queue full past any deadline.
                for _ in range(self._events.qsize() if left == 0 else 1):
                    with contextlib.suppress(queue.Empty):
                        self._hear(*self._events.get(timeout=left))
                if self._pending and self._at is not None and time.monotonic() >= self._at:
                    self._escalate()
            except KeyboardInterrupt:
                self._interrupt_by_user()
        if self._stopped:
            raise KeyboardInterrupt
        if self._failures:
            raise RankError(self._failures, self._results)
        return self._results

    def _hear(self, rank: int, what: str, *more: Any) -> None:
        if what == "text":
            self._output.add(rank, *more)
        elif what == "ended":
            if rank in self._pending:
                self._fail_ended(rank, more[0])
        elif more and more[0] == self._number:
            self._take(rank, what, more[1:])

    def _take(self, rank: int, what: str, more: Sequence[Any]) -> None:
        if what == "where":
            self._where[rank] = more[0]
            return
        self._pending.discard(rank)
        if what == "done":
            try:
                self._results[rank] = load(more[0])
                return
            except Exception as error:
                line = f"its result cannot be read here: {type(error).__name__}: {error}"
                self._fail(RankFailure(rank, "raised", line))
                return
        line, trace, pickled = more
        exception = None
        if pickled is not None:
            with contextlib.suppress(Exception):
                exception = load(pickled)
        if self._next == "kill":  # it was interrupted, which is why it failed
            where = self._where.get(rank, "")
            summary = (
                f"{self._why()}, and interrupted at {_last_place(where)}"
                if where
                else f"{self._why()}; {line}"
            )
            self._fail(RankFailure(rank, self._reason, summary, trace, exception))
        else:
            self._fail(RankFailure(rank, "raised", line, trace, exception))

    def _fail_ended(self, rank: int, code: int) -> None:
        self._pending.discard(rank)
        if self._next == "kill":
            summary = f"{self._why()}; it did not react to an interrupt and was killed"
            self._fail(RankFailure(rank, self._reason, summary, self._where.get(rank, "")))
        else:
            self._fail(RankFailure(rank, "ended", end_of(code)))

    def _why(self) -> str:
        return f"not done after {self._limit:g} s" if self._reason == "timeout" else "still running"

    def _fail(self, failure: RankFailure) -> None:
        self._failures[failure.rank] = failure
        if self._pending and self._next not in ("interrupt", "kill"):
            # Ranks that wait for it usually fail by themselves, because their communicator notices.
            self._next, self._at = "interrupt", time.monotonic() + self._grace
            self._output.say(f"rank {failure.rank} failed: {failure.summary.splitlines()[0]}")

    def _escalate(self) -> None:
        if self._next == "timeout":
            self._reason = "timeout"
        if self._next in ("timeout", "interrupt"):
            self._interrupt()
        elif self._next == "kill":
            self._kill()

    def _interrupt(self) -> None:
        self._next, self._at = "kill", time.monotonic() + self._grace
        for rank in sorted(self._pending):
            self._workers[rank].send("interrupt", self._number)

    def _kill(self) -> None:
        self._at = None
        self._output.say(f"{names(self._pending)} did not react and will be killed; restart() makes new ones")
        for rank in sorted(self._pending):
            self._workers[rank].kill()

    def _interrupt_by_user(self) -> None:
        if self._stopped:
            self._next = "kill"
            self._kill()
        else:
            self._stopped = True
            self._interrupt()


def _last_place(stack: str) -> str:
    """Returns the innermost frame of a stack, as file:line in function."""
    frames = re.findall(r'^  File "(.*)", line (\d+), in (.*)$', stack, re.MULTILINE)
    return "{}:{} in {}".format(*frames[-1]) if frames else "an unknown place"
