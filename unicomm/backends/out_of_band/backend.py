"""What backends have in common whose library cannot be interrupted and blames nobody for what goes wrong.

Beside the library's, each rank has connections of our own to the others (mesh.py): the watch's, on which the
ranks tell each other what goes wrong (watch.py). Collectives compare what the ranks call first (agree.py).
"""

from __future__ import annotations

import contextlib
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

from unicomm.comms.backend import (
    Backend,
    ChecksPeers,
    ExtendsDeadlines,
    RunsCollectives,
    Setup,
    SurvivesFork,
)
from unicomm.comms.errors import CommError
from unicomm.comms.operations.call import Call
from unicomm.comms.options import Hint, parse_bool

from .fault_channel import Awaited, Operation, Watch
from .fault_errors import error_of, first_line, guess
from .signatures import Agreement
from .sockets import Sockets
from .wire import Fault

_MOST_CHECKED = 16  # ranks of a world that is small


def _parse_check(text: str) -> bool | None:
    return None if text.lower() == "auto" else parse_bool(text)


CHECK_HINT = Hint(
    "check_mismatch",
    _parse_check,
    None,
    "Ranks compare what they call before a collective: true, false, or auto, which is for up to"
    f" {_MOST_CHECKED} ranks.",
)


def checks(setup: Setup) -> bool:
    """Whether this communicator's ranks compare what they call."""
    wanted = setup.hints.get(CHECK_HINT.name)
    return setup.size <= _MOST_CHECKED if wanted is None else bool(wanted)


class WatchedBackend(Backend, RunsCollectives, ExtendsDeadlines, ChecksPeers, SurvivesFork):
    """`library`: what the errors call it. `_agreement` is None where the ranks do not compare."""

    library: ClassVar[str]
    protocol_version = 1

    def __init__(self, setup: Setup, sockets: Sockets, agreement: Agreement | None) -> None:
        self._current: Operation | None = None
        self._agreement = agreement
        self.capabilities = replace(type(self).capabilities, checks_mismatch=checks(setup))
        self._watch = Watch(sockets, setup.rank, self._interrupt)

    @abstractmethod
    def _interrupt(self) -> None:
        """Whatever waits for another rank ends with an error. Called by the watch, from any thread."""

    @abstractmethod
    def _drop(self) -> None:
        """The communicator is of no more use."""

    def check_peers(self, ranks: Sequence[int]) -> None:
        self._watch.check_left(ranks)
        if (error := self.fault()) is not None:
            raise error

    def fault(self) -> CommError | None:
        """Why it is broken, as far as this rank knows."""
        fault = self._watch.fault
        return None if fault is None else self._error_of(fault)

    def collective(self, call: Call, run: Callable[[], None]) -> None:
        with self._collective(call) as number:
            if self._agreement is not None:
                self._agreement.check(call, number)
            run()

    @contextlib.contextmanager
    def _collective(self, call: Call) -> Iterator[int]:
        number = self._watch.entered + 1
        deadline = call.deadline or time.monotonic() + call.timeout
        with self._watched(Operation(call.name, number, call.timeout, deadline)):
            yield number

    def _count(self, peer: int, send: bool) -> int:
        """Numbers a message of a pair."""
        counts = self._watch.sent if send else self._watch.taken
        counts[peer] = number = counts.get(peer, 0) + 1
        return number

    @contextlib.contextmanager
    def _watched(self, operation: Operation) -> Iterator[None]:
        # Works hold Gloo's group open, and an error's traceback holds names: none in these frames is a work.
        if self._current is not None:  # this is a part of it
            yield
            return
        self._check()
        self._current = operation
        try:
            self._watch.begin(operation)
            self._check()
            yield
        except CommError:
            raise
        except (RuntimeError, OSError) as error:
            raise self._failure(error, operation.awaits) from error
        finally:
            self._watch.end()
            self._current = None

    def _check(self) -> None:
        if (fault := self._watch.fault) is not None:
            self._drop()
            raise self._error_of(fault)

    def _error_of(self, fault: Fault) -> CommError:
        return error_of(fault, self._watch.rank, self.library)

    def _failure(self, error: Exception, awaits: Sequence[Awaited]) -> CommError:
        """What the library's own error means: it knows that a connection has ended, the watch knows why."""
        fault = self._watch.fault or self._watch.explain([message.peer for message in awaits])
        if fault is None:
            fault = self._watch.give_up(guess(first_line(error), self._watch.rank))
        self._drop()
        return self._error_of(fault)

    def _overdue(self, operation: Operation) -> CommError:
        self._watch.overdue(operation)
        self._watch.end()
        self._drop()
        assert self._watch.fault is not None
        return self._error_of(self._watch.fault)

    def expect_slow(self, name: str, seconds: float) -> None:
        self._watch.expect_slow(name, seconds)

    def abort(self) -> None:
        self._watch.give_up(Fault("aborted", self._watch.rank))
