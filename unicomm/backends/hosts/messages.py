"""Messages within the host and between hosts, by two backends at the same time."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial

from unicomm.backends.out_of_band import Awaited, awaited_in
from unicomm.comms.backend import Completed, Exchange
from unicomm.comms.errors import CommError, CommTimeoutError
from unicomm.comms.failures.daemon_pool import DaemonPool
from unicomm.comms.failures.faults import SEE_LATE_RANKS, interrupts, rank_list
from unicomm.comms.operations.call import Message

_LONG = 1e6  # seconds
_LOOK = 0.5  # seconds until another look, and in which memory finds who is missing in an overdue message
_threads = DaemonPool("unicomm-hosts")


def beside(job: Callable[[], None], main: Callable[[], None], stop: Callable[[], None]) -> None:
    """Runs `job` in another thread while `main` runs in this one; returns when both have ended.

    After a `CommError` of one the other ends by itself, or is not concerned; after any other exception, and
    after that of a signal handler, `stop` ends it. Raises the first exception.
    """
    errors: list[BaseException] = []
    over = threading.Event()

    def guarded(act: Callable[[], None]) -> None:
        try:
            act()
        except BaseException as error:
            errors.append(error)
            if interrupts(error):
                stop()

    def run() -> None:
        guarded(job)
        over.set()

    _threads.run(run)
    guarded(main)
    over.wait()
    if errors:
        raise errors[0]


# Opens a part's exchange; and makes the communicator's error of the part's error and the peers of the part's
# unfinished messages.
Part = tuple[Callable[[], Exchange], Callable[[CommError, Collection[int]], CommError]]


class BothExchange(Exchange):
    """The exchanges of two parts, near and far, as one.

    While only one part has messages the caller's thread runs it; else another thread runs the far one.
    """

    def __init__(
        self,
        near: Part,
        far: Part,
        place: Callable[[Message], tuple[bool, Message]],
        limited: Callable[[float], None],
        counted: Callable[[Message], Awaited],
        beside: Callable[[Callable[[], list[Awaited]]], None],
        patience: Callable[[], float],
    ) -> None:
        """`place` returns whether a message goes to the far part, and the message for its part.

        `limited` is told the timeout of the message that is due first, for errors; `counted` counts a message
        within the host, and returns what others hear of it; `beside` is told how to find those that the
        program waits for. `patience` returns until when the ranks ask each other to wait.
        """
        self._parts, self._place, self._limited = (near, far), place, limited
        self._counted, self._beside, self._patience = counted, beside, patience
        self._awaits: dict[int, Awaited] = {}  # by a near message's number here
        self._open: list[Exchange | None] = [None, None]
        # By part and by a message's number in it: the message's number here, and its peer.
        self._waiting: tuple[dict[int, tuple[int, int]], dict[int, tuple[int, int]]] = ({}, {})
        self._counts = [0, 0]
        self._added = 0
        self._driver: _Driver | None = None
        self._attended = True
        # An interrupt while `add` opens a part reaches no part, so the next `run` has to find it here.
        self._interrupted = False

    def add(self, messages: Sequence[Message]) -> None:
        for message in messages:
            is_far, placed = self._place(message)
            self._waiting[is_far][self._counts[is_far]] = (self._added, message.peer)
            self._counts[is_far] += 1
            if not is_far:
                self._awaits[self._added] = self._counted(message)
            self._added += 1
            if is_far and self._driver is not None:
                self._driver.add(placed)
                continue
            part = self._open[is_far]
            if part is None:
                part = self._open[is_far] = self._parts[is_far][0]()
                part.waited_for = partial(self._waited_in, is_far)
                part.attend(self._attended)
            part.add([placed])

    def run(self, timeout: float, limit: float, given: float) -> list[Completed]:
        if self._interrupted:
            self._interrupted = False
            return []
        self._limited(given)
        self._beside(self._near_awaited)
        near, far = self._waiting
        if self._driver is None and not (near and far):
            return self._run_part(bool(far), timeout, limit, given)
        if self._driver is None:
            opened = self._open[True]
            assert opened is not None
            self._driver = _Driver(opened, len(far), self._near_interrupt)
        now = time.monotonic()
        end = max(now + timeout, self._patience())
        # A rank that has asked for time may need less of it: looks again.
        within = min(limit, max(timeout, min(_LOOK, end - now)), _LONG)
        over = []
        if near:
            over, within = self._run_part(False, _LONG, within, given), 0.0
        try:
            over += self._take(True, self._driver.take(within))
        except CommError as error:
            raise self._error(True, error) from error
        if not over and time.monotonic() >= max(end, self._patience()):
            over = self._late(given)
        return over

    def _waited_in(self, is_far: bool) -> list[int]:
        awaited = self.waited_for()
        return [number for number, (at, _) in self._waiting[is_far].copy().items() if at in awaited]

    def _near_awaited(self) -> list[Awaited]:
        return awaited_in(self, self._awaits)

    def _late(self, given: float) -> list[Completed]:
        """Raises the error of the message that is due, unless messages have just completed."""
        far = dict(self._waiting[True].values())
        if self.due not in far:
            return self._run_part(False, 0.0, _LOOK, given)  # memory knows who is missing
        peer = far[self.due]
        late = CommTimeoutError(
            f"messages with {rank_list([peer])} were not over after {given:g} s", hint=SEE_LATE_RANKS
        )
        raise self._parts[True][1](late, {peer})

    def _run_part(self, is_far: bool, timeout: float, limit: float, given: float) -> list[Completed]:
        part = self._open[is_far]
        assert part is not None
        try:
            return self._take(is_far, part.run(timeout, limit, given))
        except CommError as error:
            raise self._error(is_far, error) from error

    def _error(self, is_far: bool, error: CommError) -> CommError:
        return self._parts[is_far][1](error, {peer for _, peer in self._waiting[is_far].values()})

    def _take(self, is_far: bool, over: list[Completed]) -> list[Completed]:
        taken: list[Completed] = []
        for number, _, error in over:
            failed = None if error is None else self._error(is_far, error)
            index, peer = self._waiting[is_far].pop(number)
            self._awaits.pop(index, None)
            taken.append((index, peer, failed))
        return taken

    def _near_interrupt(self) -> None:
        if (near := self._open[False]) is not None:
            near.interrupt()

    def interrupt(self) -> None:
        self._interrupted = True  # first: whichever part opens after this line is run after the next check
        self._near_interrupt()
        if (driver := self._driver) is not None:
            driver.results.put([])
        elif (far := self._open[True]) is not None:
            far.interrupt()

    def attend(self, attended: bool) -> None:
        self._attended = attended
        for part in self._open:
            if part is not None:
                part.attend(attended)

    def close(self) -> None:
        self._beside(list)  # none
        near, far = self._open
        for part in (near, far):
            if part is not None:
                part.waited_for = tuple  # it refers to this object
        if near is not None:
            near.close()
        if self._driver is not None:
            self._driver.close()
        elif far is not None:
            far.close()


class _Driver:
    """Runs the far exchange in a thread of its own, and calls `rouse` when a message has completed."""

    def __init__(self, far: Exchange, under_way: int, rouse: Callable[[], None]) -> None:
        """`under_way`: how many messages the exchange has already."""
        self.results: queue.SimpleQueue[list[Completed] | CommError] = queue.SimpleQueue()
        self._far, self._under_way, self._rouse = far, under_way, rouse
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()  # None: it closes
        self._closing = False
        self._left = threading.Event()
        _threads.run(self._loop)

    def add(self, message: Message) -> None:
        self._inbox.put(message)
        self._far.interrupt()

    def take(self, seconds: float) -> list[Completed]:
        """Returns the messages completed since the last call; waits up to `seconds` for one. Raises the
        error that ended all messages."""
        over: list[Completed] = []
        while True:
            try:
                got = self.results.get(timeout=seconds) if seconds else self.results.get_nowait()
            except queue.Empty:
                return over
            seconds = 0.0
            if isinstance(got, CommError):
                raise got
            over += got

    def close(self) -> None:
        """Returns when the thread no longer uses the exchange: another thread may use its backend next."""
        self._closing = True
        self._inbox.put(None)
        self._far.interrupt()
        self._left.wait()

    def _loop(self) -> None:
        try:
            self._drive()
        finally:
            self._far.close()
            self._left.set()

    def _drive(self) -> None:
        while not self._closing:
            # An exchange without messages would return at once, again and again.
            while self._under_way == 0 or not self._inbox.empty():
                if (message := self._inbox.get()) is None:
                    return
                self._far.add([message])
                self._under_way += 1
            try:
                over = self._far.run(_LONG, _LONG, _LONG)
            except CommError as error:
                self.results.put(error)
                self._rouse()
                return
            if over:
                self._under_way -= len(over)
                self.results.put(over)
                self._rouse()
