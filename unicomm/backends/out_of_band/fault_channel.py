"""A communicator's fault channel: what its ranks tell each other when something goes wrong.

A thread of the process serves the connections to all other ranks of each communicator. It notices when a
rank's process ends, because the connection ends with it. It tells the others when this rank gives up. When an
operation is overdue it asks all others where they are; their threads answer at once, whatever their ranks are
doing. The first fault that a rank learns of stays its fault, so all ranks raise the same error, unless two
ranks find different faults at the same time.

Nothing here needs the store, which may be gone with the rank that hosts it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from unicomm._core import Counts, FaultCode
from unicomm.comms.failures.faults import FINALIZED, SIZES, Claim, Fault
from unicomm.comms.operations.table import OPERATIONS

from . import channel_thread, wire
from .channel_thread import FOREVER
from .circles import Circles, lacks, links, misses
from .operation import Awaited, Operation, is_collective, needed
from .sockets import Sockets
from .user_frame import where_is
from .wire import Here

ANSWER = 1.0  # seconds in which a rank has to say where it is; one that cannot is named
COMPARE = 0.5  # seconds after which a rank asks what the peers of its messages wait for
_LOOK = 0.01  # seconds between two looks


class Question:
    """What a rank has asked some others, and what they have answered.

    Attributes:
        about: its number. by: until when it waits for answers, by this process's monotonic clock.
        of: the ranks that it asks, each with that whose messages it asks about.
    """

    def __init__(self, about: int, of: Mapping[int, int], by: float) -> None:
        self.about, self.of, self.by = about, of, by
        self.answers: dict[int, Here] = {}

    def hear(self, peer: int, answer: Here) -> None:
        if answer.about == self.about and peer in self.of:
            self.answers[peer] = answer

    def over(self, now: float, here: set[int]) -> bool:
        """Whether the time is over, or all ranks that can answer have answered. `here`: those ranks."""
        return now >= self.by or self.of.keys() & here <= self.answers.keys()


class FaultChannel:
    """One rank's end of a communicator's fault channel.

    Attributes:
        counts: the operations that this rank has begun. Native code counts its own.
        messages: returns the messages that the rank waits for outside of operations.
        beside: returns those that it waits for by other ways than this communicator's. They are counted here.
        fault: why the communicator is broken. fault_at: since when, by this process's monotonic clock.
    """

    def __init__(self, sockets: Sockets, rank: int, on_fault: Callable[[], None]) -> None:
        """`on_fault` is called once, by any thread, at the first fault; it must not wait."""
        self.rank = rank
        self.counts = Counts(max(rank, *sockets, 0) + 1)
        self.messages: Callable[[], list[Awaited]] = list
        self.beside: Callable[[], list[Awaited]] = list
        self.fault: Fault | None = None
        self.fault_at = 0.0
        self._sockets = dict(sorted(sockets.items()))
        self._on_fault = on_fault
        self._known = threading.Event()  # set once there is a fault
        self._closed = False
        self._lock = threading.Lock()
        self._operation: Operation | None = None
        self._thread = threading.get_ident()  # which shows where the rank is, outside operations
        self._inbox = {peer: wire.Inbox() for peer in sockets}
        self._left: dict[int, wire.Bye] = {}  # what ranks have said that have finalized
        self._gone: dict[int, str] = {}  # ranks whose connection has ended, with the reason
        self._slow: dict[int, tuple[float, str]] = {}  # until when ranks ask to be waited for, and why
        self._on_slow: Callable[[], object] = list  # nothing
        self._questions = 0  # how often this rank has asked
        self._own_question = Question(0, {}, 0.0)  # the last one of the rank's own thread
        self._overdue: Operation | None = None  # about which the others are asked, in this question
        self._question = Question(0, {}, 0.0)
        self._circles: Circles | None = None  # what is known since they have answered
        for s in sockets.values():
            s.setblocking(False)
        if sockets:
            channel_thread.current.add(self)

    # --- the rank's own threads ------------------------------------------------------------------------

    def begin(self, operation: Operation) -> None:
        """The rank enters an operation. Call `end` when it is over."""
        with self._lock:
            self._operation = operation
            if operation.number:
                self.counts.entered = operation.number
            missing = self._left_without(operation)
        if missing:  # the channel's thread may know of an earlier fault, because of which they left
            channel_thread.current.due(0.0)
            self._known.wait(10 * ANSWER)
        channel_thread.current.due(min(operation.deadline, operation.compare))

    def end(self) -> None:
        with self._lock:
            self._operation = None

    def expect_slow(self, name: str, seconds: float, tell: bool = True) -> None:
        """Asks the others to wait `seconds` longer; replaces what this rank asked for before.

        Without `tell` the others are not asked: only this rank waits longer, for a rank that is not here.
        """
        with self._lock:
            self._slow[self.rank] = (time.monotonic() + seconds, name)
            if tell:
                self._tell(wire.Slow(name, seconds))
            self._on_slow()
        channel_thread.current.look()

    def call_when_slow(self, act: Callable[[], None]) -> None:
        """Has `act` called whenever a rank has asked to be waited for, and now if one has; it must not wait.

        One call at a time: what the last one finds is what counts.
        """
        with self._lock:
            self._on_slow = act
            if self._slow:
                act()

    def patience(self) -> float:
        """Returns until when the ranks ask each other to wait."""
        return max((until for until, _ in self._slow.copy().values()), default=0.0)

    def overdue(self, operation: Operation) -> None:
        """Finds the fault of an operation whose deadline has passed; returns when it is known."""
        operation.deadline = 0.0
        self.begin(operation)
        if not self._sockets or not self._known.wait(10 * ANSWER):
            self.give_up(Fault(FaultCode.TIMEOUT, self.rank, timeout=operation.timeout))

    def give_up(self, fault: Fault) -> Fault:
        """Sets this rank's fault, unless it has one, and tells the others. Returns the fault it has."""
        with self._lock:
            return self._set(fault)

    def explain(self, awaits: Sequence[Awaited]) -> Fault | None:
        """Returns why a connection has ended, as the others say; waits for that. `awaits`: what needed it."""
        end = time.monotonic() + 2 * ANSWER
        while not self._known.wait(_LOOK) and time.monotonic() < end:
            # A message may be complete although it is in the list, and its peer may have left since.
            if lacking := [m for m in awaits if m.peer in self._left and lacks(m, self._left[m.peer])]:
                self._check_left([m.peer for m in lacking])
        self._check_left([m.peer for m in awaits])
        return self.fault

    def _check_left(self, ranks: Sequence[int]) -> None:
        with self._lock:
            self._lose(sorted(self.left(ranks)))

    def left(self, ranks: Sequence[int]) -> list[int]:
        """Returns those of `ranks` that have finalized."""
        return [r for r in ranks if r in self._left]

    def check_finalized(self, awaits: Iterable[Awaited]) -> None:
        """Sets the fault of ranks that have finalized without their side of one of these messages.

        What a rank sent before it finalized arrives first: until then no other receive misses that rank.
        """
        if not self._left:
            return
        awaits = [m for m in awaits if m.number and m.peer in self._left]
        coming = {m.peer for m in awaits if not m.send and not lacks(m, self._left[m.peer])}
        awaits = [m for m in awaits if m.send or m.peer not in coming]
        with self._lock:
            self._lose(self._left_without(Operation("", 0, 0.0, 0.0, awaits)))

    def catch_up(self) -> None:
        """Returns when the channel's thread has read what other ranks have told by now."""
        end = time.monotonic() + ANSWER
        while self._unread() and self.fault is None and time.monotonic() < end:
            time.sleep(_LOOK / 10)
        with self._lock:
            pass  # the thread has noted what it was reading

    def _unread(self) -> bool:
        look = select.poll()
        for _, s in self.sockets():  # those of ranks that are gone stay readable
            look.register(s, select.POLLIN)
        return bool(look.poll(0))

    def elsewhere(self, ranks: Collection[int]) -> list[int]:
        """Returns those of `ranks` that are in no operation or do not answer; waits for their answers."""
        answers = self._ask_for(dict.fromkeys(ranks, self.rank), 2 * ANSWER)
        inside = {r for r, answer in answers.items() if answer.inside}
        return [r for r in ranks if r not in inside]

    def circle(self, timeout: float) -> bool:
        """Finds out whether this rank waits for ranks that wait for each other; waits for their answers.

        Called when something failed that is no operation of this communicator: a collective that is
        `counts.inside`, or messages `beside`. If there is a circle it becomes the fault.

        Args:
            timeout: seconds that the operation could take.
        """
        answers = self._ask_for(dict.fromkeys(self._sockets, self.rank), ANSWER)
        with self._lock:
            operation = self._whole(Operation("", 0, timeout, 0.0))
            circles = Circles(self.rank, self.counts, operation, answers)
        circle = circles.find()
        while self.fault is None and (unsure := circles.uncertain(circle)):
            circles.hear(unsure, self._ask_for(unsure, ANSWER))
            circle = circles.find()
        with self._lock:
            if circle:
                self._set(self._deadlock(circles, circle))
            return self.fault is not None and self.fault.code is FaultCode.DEADLOCK

    def _ask_for(self, of: Mapping[int, int], seconds: float) -> dict[int, Here]:
        """Returns what the ranks say in that time. `of`: as of a `Question`."""
        with self._lock:
            question = self._own_question = self._ask(of, seconds)
        while not question.over(time.monotonic(), self._reachable()):
            time.sleep(_LOOK)
        return question.answers.copy()

    def close(self) -> None:
        """Tells the others that this rank leaves, and closes the connections; waits for no other rank."""
        with self._lock:
            if self.fault is not None and self.fault.by != self.rank:
                # A rank that has not heard of the fault yet must not take this rank's leaving for the cause.
                self._tell(self.fault)
            for peer in self._sockets:
                bye = wire.Bye(self.counts.entered, *self._begun(peer))
                self._tell(bye, [peer])
            self._closed = True
        channel_thread.current.remove(self)

    def forget(self) -> None:
        """Called in a forked child: closes its copies of the parent's connections."""
        self.close_sockets()
        self._sockets.clear()

    # --- called with the lock held -------------------------------------------------------------------------

    def _set(self, fault: Fault, tell: bool = True) -> Fault:
        if self.fault is not None:
            return self.fault
        self.fault_at = time.monotonic()
        if fault.by == self.rank:
            operation, counts = self._operation, self.counts
            running = bool(counts.running) if operation is None else operation.number > 0
            fault = dataclasses.replace(fault, after=counts.entered - running)
        self.fault = fault
        if tell:
            self._tell(fault)
        self._known.set()
        self._on_fault()
        return fault

    def _lose(self, left: Sequence[int]) -> None:
        """Sets the fault of ranks that have finalized, if there are any."""
        if left:
            self._set(Fault(FaultCode.PEER_LOST, self.rank, dead=tuple(left), detail=FINALIZED))

    def _tell(self, message: wire.Message, peers: Sequence[int] | None = None) -> None:
        data = wire.encode(message)
        for peer in self._sockets if peers is None else peers:
            # Some hundred bytes, which always fit: a rank that reads nothing for that long is stopped.
            with contextlib.suppress(OSError):
                self._sockets[peer].send(data)

    def _ask(self, of: Mapping[int, int], seconds: float) -> Question:
        """Asks ranks where they are. `of`: as of a `Question`. `seconds`: in which they have to answer."""
        self._questions += 1
        here = self._reachable()
        for peer, other in of.items():
            if peer in here:
                self._tell(wire.Ask(self._questions, other), [peer])
        return Question(self._questions, of, time.monotonic() + seconds)

    def _reachable(self) -> set[int]:
        return {peer for peer in self._sockets if peer not in self._left and peer not in self._gone}

    # --- called by the channel's thread --------------------------------------------------------------------

    def close_sockets(self) -> None:
        for s in self._sockets.values():
            s.close()

    def sockets(self) -> list[tuple[int, socket.socket]]:
        return [(peer, s) for peer, s in self._sockets.items() if peer not in self._gone]

    def next_time(self) -> float:
        operation = self._operation
        if operation is None or self.fault is not None:
            return FOREVER
        if self._overdue is operation:
            return self._question.by
        return min(operation.compare, max(operation.deadline, self.patience()))

    def readable(self, peer: int) -> None:
        with self._lock:
            # Under the lock: a socket that is closed while it is read may have another's number by then.
            if self._closed:
                return
            self.counts.hearing = True
            try:
                self._read(peer)
            finally:
                self.counts.hearing = False

    def _read(self, peer: int) -> None:
        try:
            data = self._sockets[peer].recv(1 << 16)
        except BlockingIOError:
            return
        except OSError as error:
            data, self._gone[peer] = b"", error.strerror or str(error)
        if not data:
            self._gone.setdefault(peer, "")
            return
        try:
            for message in self._inbox[peer].feed(data):
                self._hear(peer, message)
        except ValueError as error:
            self._gone[peer] = f"it sent an unreadable message ({error})"

    def _hear(self, peer: int, message: wire.Message) -> None:
        if isinstance(message, wire.Ask):
            if message.of in self._inbox or message.of == self.rank:
                self._tell(self._here(message.of, message.about), [peer])
        elif isinstance(message, Here):
            self._own_question.hear(peer, message)
            self._question.hear(peer, message)
            self._compare(peer, message)
        elif isinstance(message, wire.Slow):
            self._slow[peer] = (time.monotonic() + message.seconds, message.name)
            self._on_slow()
        elif isinstance(message, wire.Bye):
            # `on_time` draws the conclusion, when everything that came has been read: the peer may have left
            # because of a fault that another rank has reported.
            self._left[peer] = message
            self.counts.left = True
        elif message.by != self.rank:  # it is from `peer`, or passed on by it
            self._set(message, tell=False)

    def _compare(self, peer: int, answer: Here) -> None:
        """Compares the sizes of a message at its two ends."""
        operation = self._operation
        for mine in [] if operation is None else operation.awaits.copy():
            for theirs in answer.awaits:
                two_ends = (mine.peer, theirs.peer) == (peer, self.rank) and mine.send != theirs.send
                one_message = two_ends and (mine.part, mine.number) == (theirs.part, theirs.number)
                if one_message and mine.number and mine.nbytes != theirs.nbytes:
                    sender, receiver = (self.rank, peer) if mine.send else (peer, self.rank)
                    sent, expected = (mine, theirs) if mine.send else (theirs, mine)
                    claim = Claim(receiver, root=sender, amount=expected.nbytes, extra=sent.nbytes)
                    both = (sender, receiver)
                    self._set(Fault(FaultCode.MISMATCH, self.rank, both, detail=SIZES, claims=(claim,)))
                    return

    def _begun(self, peer: int) -> tuple[int, int, int, int]:
        """How many messages to `peer` and from it this rank has begun, and how many parts of collectives."""
        of = self.counts.of
        return of(peer, True), of(peer, False), of(peer, True, True), of(peer, False, True)

    def _here(self, of: int, about: int = 0) -> Here:
        operation = self._operation
        awaits = self.messages() if operation is None else operation.awaits.copy()
        awaits += self.beside()
        inside = operation.name if operation is not None else awaits[0].name if awaits else ""
        return Here(
            self.counts.entered,
            self.counts.inside or inside or self.counts.running,
            *self._begun(of),
            where_is(self._thread),
            tuple(sorted(awaits, key=lambda m: (m.peer >= 0, m.peer != of))),
            about,
            self.counts.whole,
        )

    def on_time(self, now: float) -> None:
        with self._lock:
            if self._closed:
                return
            gone = {peer: why for peer, why in self._gone.items() if peer not in self._left}
            if gone and self.fault is None:
                why = "; ".join(dict.fromkeys(filter(None, gone.values())))
                self._set(Fault(FaultCode.PEER_LOST, self.rank, dead=tuple(sorted(gone)), detail=why))
            operation = self._operation
            if self.fault is None and operation is not None:
                self._lose(self._left_without(operation))
            if operation is not None and self.fault is None and now >= operation.compare:
                operation.compare = FOREVER
                self._tell(
                    wire.Ask(of=self.rank), [m.peer for m in operation.awaits if m.peer in self._sockets]
                )
            if operation is None or self.fault is not None or now < max(operation.deadline, self.patience()):
                self._overdue = None
                return
            if self._overdue is not operation:
                # Its time counts from now on, not from `now`: this process may have been stopped since then.
                self._overdue, self._circles = operation, None
                self._question = self._ask(dict.fromkeys(self._sockets, self.rank), ANSWER)
            if self._question.over(now, self._reachable()):
                self._judge(operation)

    def _left_without(self, operation: Operation) -> tuple[int, ...]:
        """Returns the ranks that have finalized without their part in the operation, as they said."""
        if operation.number:
            return tuple(p for p, bye in sorted(self._left.items()) if bye.entered < operation.number)
        # Their count does not tell of messages with tags.
        awaits = [m for m in operation.awaits.copy() if m.number and m.peer in self._left]
        return tuple(sorted({m.peer for m in awaits if lacks(m, self._left[m.peer])}))

    def _judge(self, operation: Operation) -> None:
        """Sets the fault of an overdue operation, unless ranks of a circle have to be asked first."""
        question, circles = self._question, self._circles
        if circles is None:
            whole = self._whole(operation)
            circles = self._circles = Circles(self.rank, self.counts, whole, question.answers)
        else:
            circles.hear(question.of, question.answers)
        circle = circles.find()
        if circle and (unsure := circles.uncertain(circle)):
            self._question = self._ask(unsure, ANSWER)
        elif circle:
            self._set(self._deadlock(circles, circle))
        else:
            self._set(self._verdict(operation, circles.answers))

    def _verdict(self, operation: Operation, answers: Mapping[int, Here]) -> Fault:
        """Returns the fault of an overdue operation: the ranks that it waits for."""
        absent: list[int] = []
        late: list[int] = []
        where: dict[int, str] = {}
        dead = [p for p in self._sockets if p in self._left and misses(operation, p, self._left[p])]
        for peer in self._sockets:
            if peer in self._left:
                continue
            answer = answers.get(peer)
            if answer is None:
                absent.append(peer)
                where[peer] = "does not answer: it is stopped, or something in it holds Python's lock"
            elif misses(operation, peer, answer):
                (late if answer.inside else absent).append(peer)
                if answer.where:
                    inside = f", in {answer.inside}" if answer.inside else ""
                    where[peer] = f"is at {answer.where}{inside}"
                if peer in self._slow:
                    asked = f" (it had asked for time, for '{self._slow[peer][1]}')"
                    where[peer] = where.get(peer, "") + asked
        if dead or absent:
            waiting = _wait_for({*dead, *absent}, {peer: answers[peer] for peer in late})
            late = [peer for peer in late if peer not in waiting]
            where = {peer: text for peer, text in where.items() if peer not in waiting}
        return Fault(
            FaultCode.TIMEOUT,
            self.rank,
            dead=tuple(dead),
            absent=tuple(absent),
            late=tuple(late),
            where=where,
            timeout=operation.timeout,
        )

    def _whole(self, operation: Operation) -> Operation:
        """Returns what the rank is in, of which an operation of this communicator may be a part."""
        if inside := self.counts.inside:
            return Operation(inside, self.counts.whole, operation.timeout, operation.deadline, whole=True)
        if beside := self.beside():
            awaits = operation.awaits + beside
            return dataclasses.replace(operation, name=operation.name or beside[0].name, awaits=awaits)
        return operation

    def _deadlock(self, circles: Circles, circle: list[int]) -> Fault:
        """Returns the fault of an operation that waits for a circle of ranks that wait for each other."""
        operation, answers = circles.operation, circles.answers
        claims = []
        for rank, to in links(circle):
            answer = answers.get(rank)
            name = operation.name if answer is None else answer.inside
            place = where_is(self._thread) if answer is None else answer.where
            row = OPERATIONS.get(name)
            collective = is_collective(name)
            entered = operation.number if answer is None else answer.whole or answer.entered
            number = entered if collective else 0
            line = os.path.basename(place.partition(" in ")[0])
            claims.append(Claim(rank, 0 if row is None else row.code, root=to, amount=number, line=line))
        return Fault(
            FaultCode.DEADLOCK,
            self.rank,
            culprits=tuple(sorted(circle)),
            timeout=operation.timeout,
            claims=tuple(claims),
        )


def _wait_for(causes: set[int], late: Mapping[int, Here]) -> set[int]:
    """Returns those of `late` that wait for `causes`, and are not to blame.

    A rank in an earlier collective does. A rank in messages does if it waits for one of `causes`, or for a
    rank that does.
    """
    waiting = {peer for peer, answer in late.items() if is_collective(answer.inside)}
    while more := {
        peer
        for peer, answer in late.items()
        if peer not in waiting and not (causes | waiting).isdisjoint(needed(answer.awaits))
    }:
        waiting |= more
    return waiting
