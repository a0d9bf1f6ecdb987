"""The base class of backends with out-of-band connections."""

from __future__ import annotations

import contextlib
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

from unicomm._core import FaultCode
from unicomm.comms.backend import (
    Backend,
    ChecksPeers,
    ExtendsDeadlines,
    RunsCollectives,
    Setup,
    SurvivesFork,
)
from unicomm.comms.errors import CommError, first_line
from unicomm.comms.failures.faults import Fault
from unicomm.comms.operations.call import PART, Call, Message
from unicomm.comms.options import Hint, parse_bool

from .channel_thread import FOREVER
from .fault_channel import FaultChannel
from .fault_errors import error_of, guess
from .operation import Awaited, Operation
from .signatures import SignatureCheck, SocketSignatureCheck
from .sockets import Sockets

_MOST_CHECKED = 16  # ranks of a communicator that compares signatures by default


def _parse_check(text: str) -> bool | None:
    return None if text.lower() == "auto" else parse_bool(text)


CHECK_HINT = Hint(
    "check_mismatch",
    _parse_check,
    None,
    "Ranks compare what they call before a collective: true, false, or auto, which is for up to"
    f" {_MOST_CHECKED} ranks.",
)


def checks_signatures(setup: Setup) -> bool:
    """Whether this communicator's ranks compare what they call."""
    wanted = setup.hints.get(CHECK_HINT.name)
    return setup.size <= _MOST_CHECKED if wanted is None else bool(wanted)


class OutOfBandBackend(Backend, RunsCollectives, ExtendsDeadlines, ChecksPeers, SurvivesFork):
    """A backend over a library that cannot be interrupted and blames nobody.

    Attributes:
        library: the library's name in errors.
        channel: the fault channel.
    """

    protocol_version = 1
    library: ClassVar[str]

    def __init__(self, setup: Setup, sockets: Sequence[Sockets], check: SignatureCheck | None = None) -> None:
        """`sockets`: those of the fault channel, then those by which the ranks compare signatures, unless
        they do not, or do it by another `check`."""
        if check is None and len(sockets) > 1:
            check = SocketSignatureCheck(sockets[1], setup.rank)
        self._check = check
        self._current: Operation | None = None
        compares = checks_signatures(setup) if setup.size == 1 else check is not None
        self.capabilities = replace(type(self).capabilities, checks_mismatch=compares)
        self.channel = FaultChannel(sockets[0], setup.rank, self._interrupt)

    def _interrupt(self) -> None:
        """Ends whatever waits for another rank with an error. Called once, by any thread; must not wait."""
        if self._check is not None:
            self._check.interrupt()

    @abstractmethod
    def _drop(self) -> None:
        """Lets go of the library's communicator, which is of no more use."""

    def close(self) -> None:
        self.channel.close()
        if self._check is not None:
            self._check.close()

    def forget(self) -> None:
        self.channel.forget()
        if self._check is not None:
            self._check.close()

    def abort(self) -> None:
        self.channel.give_up(Fault(FaultCode.ABORTED, self.channel.rank, (self.channel.rank,)))

    def expect_slow(self, name: str, seconds: float) -> None:
        self.channel.expect_slow(name, seconds)

    # --- operations ----------------------------------------------------------------------------------------

    def collective(self, call: Call, run: Callable[[], None]) -> None:
        with self._in_collective(call) as number:
            if self._check is not None:
                self._check.check(call, number)
            run()

    def all_gather_bytes(self, call: Call, mine: bytes) -> list[bytes]:
        """Returns every rank's bytes, some kilobytes of one length, with little latency; counts as `call`."""
        assert self._check is not None
        with self._in_collective(call):
            return self._check.all_gather(mine)

    @contextlib.contextmanager
    def _in_collective(self, call: Call) -> Iterator[int]:
        number = self.channel.counts.entered + 1
        deadline = call.deadline or time.monotonic() + call.timeout
        with self._in_operation(Operation(call.name, number, call.timeout, deadline)):
            yield number

    @contextlib.contextmanager
    def _in_messages(
        self, messages: Sequence[Message], timeout: float, compare: float = FOREVER
    ) -> Iterator[list[Awaited]]:
        """Runs messages as one operation. `compare`: seconds until the peers' sizes are asked for."""
        name = "batch" if len(messages) > 1 else "send" if messages[0].send else "recv"
        awaits = [self.awaited(m) for m in messages]
        now = time.monotonic()
        with self._in_operation(Operation(name, 0, timeout, now + timeout, awaits, now + compare)):
            yield awaits

    @contextlib.contextmanager
    def _in_operation(self, operation: Operation) -> Iterator[None]:
        """Runs an operation under its deadline; a library's error becomes that of the fault behind it."""
        # Works hold Gloo's group open, and an error's traceback holds names: none in these frames is a work.
        if self._current is not None:  # this is a part of it
            yield
            return
        self.check_fault()
        self._current = operation
        try:
            self.channel.begin(operation)
            self.check_fault()
            yield
        except CommError:
            raise
        except (RuntimeError, OSError) as error:
            raise self.failure(error, operation.awaits) from error
        finally:
            self.channel.end()
            self._current = None

    def awaited(self, message: Message) -> Awaited:
        """Returns what the fault channel has to know of a message that begins now.

        Only messages without a tag are numbered, and parts of collectives: the others need not arrive in the
        order of the calls.
        """
        send, peer, tensor, tag = message
        numbered = peer >= 0 and tag in (0, PART)
        number = self.count(peer, send, tag == PART) if numbered else 0
        return Awaited(peer, send, number, tensor.nbytes, tag)

    def count(self, peer: int, send: bool, part: bool = False) -> int:
        """Returns the number of the next message to or from `peer`, counting it. `part`: of a collective."""
        return self.channel.counts.next(peer, send, part)

    # --- failures ------------------------------------------------------------------------------------------

    def check_peers(self, ranks: Sequence[int]) -> None:
        if (error := self.fault()) is not None:
            raise error

    def left(self, ranks: Sequence[int]) -> list[int]:
        return self.channel.left(ranks)

    def check_fault(self) -> None:
        """Raises the communicator's fault, if it has one."""
        if (error := self.fault()) is not None:
            self._drop()
            raise error

    def fault(self) -> CommError | None:
        """Returns why the communicator is broken, as far as this rank knows."""
        fault = self.channel.fault
        return None if fault is None else self._error_of(fault)

    def failure(self, error: Exception, awaits: Sequence[Awaited]) -> CommError:
        """Returns the error behind one of the library's: it knows that a connection has ended, and the fault
        channel knows why. `awaits`: the messages that were under way."""
        fault = self.channel.fault or self.channel.explain(awaits)
        if fault is None:
            fault = self.channel.give_up(guess(first_line(error), self.channel.rank))
        self._drop()
        return self._error_of(fault)

    def overdue(self, operation: Operation) -> CommError:
        """Returns the error of an operation whose deadline has passed."""
        self.channel.overdue(operation)
        self.channel.end()
        self._drop()
        assert self.channel.fault is not None
        return self._error_of(self.channel.fault)

    def _error_of(self, fault: Fault) -> CommError:
        return error_of(fault, self.channel.rank, self.library)
