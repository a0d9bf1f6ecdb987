"""Model of how a rank that sleeps is woken: `slow` and `wake_others` of csrc/shm/waiting/wait.cpp.

One rank waits for a word that the other one writes, and both use the processor's store buffers: a write is
seen by the other rank when it leaves the buffer, at the latest at a fence or at an atomic addition. The model
has no naps that end by themselves, so that a lost wake-up is a deadlock. (In the code it costs up to 50 ms.)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from .checker import Model, Protocol, Step


class State(NamedTuple):
    """`word`, `bell`, `sleeping` and `sleepers` are in shared memory.

    Attributes:
        buffered: the writer's word is still in its store buffer.
        writer, waiter: the next step of each. seen: the bell that the waiter has read. asleep: in the kernel.
        words: how many words the writer has written, and the waiter has got.
    """

    word: int = 0
    bell: int = 0
    sleeping: int = 0
    sleepers: int = 0
    buffered: bool = False
    writer: str = "write"
    waiter: str = "bell"
    seen: int = 0
    asleep: bool = False
    written: int = 0
    got: int = 0


MUTANTS = {
    "no fence after the word": "the word is still in the store buffer when the writer looks for sleepers",
    "no look at the word before sleeping": "the word was written before the waiter was counted",
    "bell read after that look": "the wake-up came between the look and the sleep",
    "not counted before that look": "the writer sees no sleeper, and the waiter no word",
}


class WakeUp(Model[State]):
    """A rank that writes some words, one after the other has got the last, and a rank that waits for each."""

    def __init__(self, words: int, without: str = "") -> None:
        self.words, self.without = words, without
        self.title = f"wake-up, {words} word{'s' * (words > 1)}"
        order = ["bell", "count", "look", "sleep"]
        if without == "no look at the word before sleeping":
            order.remove("look")
        elif without == "bell read after that look":
            order = ["count", "look", "bell", "sleep"]
        elif without == "not counted before that look":
            order = ["bell", "look", "count", "sleep"]
        self._after = dict(itertools.pairwise(order))
        self._first = order[0]

    def start(self) -> State:
        return State(waiter=self._first)

    def steps(self, state: State) -> Iterator[Step]:
        yield from self._writer(state)
        yield from self._waiter(state)

    def _writer(self, state: State) -> Iterator[Step]:
        s = state
        if s.buffered:
            drained = s._replace(word=s.written, buffered=False)
            yield Step("writer", "its word leaves the store buffer", drained)
        if s.writer == "write" and s.written < self.words and s.got == s.written:
            yield Step(
                "writer", "writes the word", s._replace(written=s.written + 1, buffered=True, writer="fence")
            )
        elif s.writer == "fence":
            if self.without == "no fence after the word":
                yield Step("writer", "goes on", s._replace(writer="sleepers"))
            elif not s.buffered:
                yield Step("writer", "is past the fence", s._replace(writer="sleepers"))
        elif s.writer == "sleepers":
            woken = "sleeping" if s.sleepers else "write"
            yield Step("writer", f"sees {s.sleepers} sleepers", s._replace(writer=woken))
        elif s.writer == "sleeping":
            yield Step(
                "writer", f"sees {s.sleeping} asleep", s._replace(writer="ring" if s.sleeping else "write")
            )
        elif s.writer == "ring":  # an atomic addition empties the store buffer
            yield Step(
                "writer",
                "rings the bell",
                s._replace(bell=s.bell + 1, writer="wake", word=s.written, buffered=False),
            )
        elif s.writer == "wake":
            yield Step("writer", "wakes who sleeps", s._replace(asleep=False, writer="write"))

    def _waiter(self, state: State) -> Iterator[Step]:
        s = state
        if s.got == self.words:
            return
        then = self._after.get(s.waiter, "")
        if s.waiter == "bell":
            yield Step("waiter", "reads its bell", s._replace(seen=s.bell, waiter=then))
        elif s.waiter == "count":  # sleeping, then sleepers; both are read by the writer in the other order
            counted = s._replace(sleeping=1, waiter="count 2")
            yield Step("waiter", "says that it sleeps", counted)
        elif s.waiter == "count 2":
            yield Step(
                "waiter", "counts itself as a sleeper", s._replace(sleepers=1, waiter=self._after["count"])
            )
        elif s.waiter == "look":
            if s.word > s.got:
                yield Step("waiter", "has the word", self._got(s))
            else:
                yield Step("waiter", "sees no word", s._replace(waiter=then))
        elif s.waiter == "sleep":
            if s.bell != s.seen:
                yield Step("waiter", "does not sleep: its bell has rung", s._replace(waiter="again"))
            else:
                yield Step("waiter", "sleeps", s._replace(asleep=True, waiter="asleep"))
        elif s.waiter == "asleep" and not s.asleep:
            yield Step("waiter", "is awake", s._replace(waiter="again"))
        elif s.waiter == "again":
            awake = s._replace(sleeping=0, sleepers=0, waiter=self._first)
            yield Step("waiter", "looks again", self._got(awake) if s.word > s.got else awake)

    def _got(self, state: State) -> State:
        return state._replace(got=state.got + 1, sleeping=0, sleepers=0, waiter=self._first)

    def violation(self, state: State) -> str:
        return ""

    def over(self, state: State) -> bool:
        return state.got == self.words

    def show(self, state: State) -> Mapping[str, str]:
        return {
            "word": f"{state.word}{' (buffered)' * state.buffered}",
            "bell": str(state.bell),
            "sleeping/sleepers": f"{state.sleeping}/{state.sleepers}",
            "waiter": f"got {state.got}{', asleep' * state.asleep}",
        }


def small() -> Iterator[WakeUp]:
    yield WakeUp(1)
    yield WakeUp(3)


def large() -> Iterator[WakeUp]:
    yield WakeUp(20)


def mutant(name: str) -> WakeUp:
    return WakeUp(1, name)


PROTOCOL = Protocol("wake_up", small, large, mutant, MUTANTS)
