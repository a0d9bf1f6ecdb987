"""An exhaustive search through all states of a small model, for `check` of the protocols in this folder.

A model is a set of states, each an immutable tuple, and of guarded steps from one state to the next. The
search is breadth first, so a violation is shown with a shortest run that leads to it. It checks

- invariants, in every state;
- that every fair run ends: from each state a state in which the run may be over can be reached by fair steps
  alone. Otherwise there is a set of states that no fair step leaves, and that is not the end: a deadlock if
  it is one state, else a circle. Faults are not fair: no run may depend on one to come to its end.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

S = TypeVar("S")


class Step(NamedTuple):
    """One atomic step of a model.

    Attributes:
        who: the rank that takes it, or the fault that happens to it.
        what: in words, for the table of a counterexample.
        after: the state that it leads to.
        fair: whether a run that could take it again and again has to take it at some time. False for faults.
    """

    who: str
    what: str
    after: Any
    fair: bool = True


class Model(ABC, Generic[S]):
    """A protocol with a number of ranks, a program and a bound on faults.

    Attributes:
        title: the name in reports, with its bounds.
    """

    title: str

    @abstractmethod
    def start(self) -> S:
        """The state in which all runs begin."""

    @abstractmethod
    def steps(self, state: S) -> Iterator[Step]:
        """All steps that are possible in a state."""

    @abstractmethod
    def violation(self, state: S) -> str:
        """Which invariant a state violates, in a sentence; "" if none."""

    @abstractmethod
    def over(self, state: S) -> bool:
        """Whether a run may end in this state."""

    @abstractmethod
    def show(self, state: S) -> Mapping[str, str]:
        """The columns of a state in the table of a counterexample."""

    def canonical(self, state: S) -> S:
        """One of the states that differ from this one by an exchange of equal ranks only."""
        return state


@dataclass(frozen=True)
class Result:
    """What a search has found.

    Attributes:
        title: of the model.
        states, transitions, depth: how much was visited; the depth is the length of
            the run, or of the longest of the shortest runs.
        seconds: of processor time.
        violation: what is wrong; "" if nothing is.
        run: the shortest run to it, as rows (who, what, columns).
        complete: False if the search ended at its limit of states.
    """

    title: str
    states: int
    transitions: int
    depth: int
    seconds: float
    violation: str
    run: Sequence[tuple[str, str, Mapping[str, str]]]
    complete: bool

    @property
    def ok(self) -> bool:
        return not self.violation and self.complete

    def summary(self) -> str:
        """One line."""
        found = self.violation or ("holds" if self.complete else "unknown: the limit of states was reached")
        return (
            f"{self.title}: {self.states} states, {self.transitions} steps, depth {self.depth},"
            f" {self.seconds:.1f} s: {found}"
        )

    def table(self) -> str:
        """The counterexample as a table: a line for each step, a cell only where it has changed."""
        if not self.run:
            return ""
        names = list(self.run[0][2])
        rows = [["", "who", "what", *names]]
        before: Mapping[str, str] = {}
        for number, (who, what, columns) in enumerate(self.run):
            cells = [columns[name] if columns[name] != before.get(name) else "" for name in names]
            rows.append([str(number), who, what, *cells])
            before = columns
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
        ]
        return "\n".join(line.rstrip() for line in [*lines, f"=> {self.violation}"])


def check(model: Model[Any], most: int = 5_000_000) -> Result:
    """Visits all states of a model, or `most` of them."""
    search = _Search(model, most)
    violation, at = search.run()
    if not violation and search.complete and (at := search.stuck()) >= 0:
        violation = "no fair step leads from here to the end of the run"
    run = search.trace(at) if violation else []
    depth = len(run) - 1 if run else search.depth
    seconds = time.process_time() - search.began
    return Result(
        model.title, len(search.states), search.transitions, depth, seconds, violation, run, search.complete
    )


class _Search:
    """The states, by number in the order of their discovery, and the fair steps between them."""

    def __init__(self, model: Model[Any], most: int) -> None:
        self.model, self.most = model, most
        self.began = time.process_time()
        self.states: list[Any] = []
        self.transitions = self.depth = 0
        self.complete = True
        self._parent, self._depth = array("l"), array("l")
        self._from, self._to = array("l"), array("l")  # the fair steps
        self._over: list[int] = []

    def run(self) -> tuple[str, int]:
        """Returns the first violation of an invariant and the number of its state; "" if there is none."""
        model, states = self.model, self.states
        start = model.canonical(model.start())
        number = {start: 0}
        states.append(start)
        self._parent.append(-1)
        self._depth.append(0)
        at = 0
        while at < len(states):
            state = states[at]
            if violation := model.violation(state):
                return violation, at
            if model.over(state):
                self._over.append(at)
            for step in model.steps(state):
                self.transitions += 1
                after = model.canonical(step.after)
                to = number.get(after)
                if to is None:
                    if len(states) >= self.most:
                        self.complete = False
                        return "", -1
                    to = number[after] = len(states)
                    states.append(after)
                    self._parent.append(at)
                    self._depth.append(self._depth[at] + 1)
                if step.fair and to != at:
                    self._from.append(at)
                    self._to.append(to)
            at += 1
        self.depth = self._depth[-1]
        return "", -1

    def stuck(self) -> int:
        """A state from which no fair steps lead to the end, best one without any; -1 if there is none."""
        into: list[list[int]] = [[] for _ in self.states]
        for a, b in zip(self._from, self._to, strict=True):
            into[b].append(a)
        ends = bytearray(len(self.states))
        todo = list(self._over)
        for at in todo:
            ends[at] = 1
        while todo:
            for before in into[todo.pop()]:
                if not ends[before]:
                    ends[before] = 1
                    todo.append(before)
        moves = bytearray(ends)
        for before in self._from:
            moves[before] = 1
        still = moves.find(0)
        return still if still >= 0 else ends.find(0)

    def trace(self, at: int) -> list[tuple[str, str, Mapping[str, str]]]:
        path = [at]
        while (at := self._parent[at]) >= 0:
            path.append(at)
        path.reverse()
        # The states themselves, and not those that stand for them: the numbers of ranks stay the same.
        model = self.model
        state = model.start()
        rows = [("", "start", model.show(state))]
        for number in path[1:]:
            step = next(s for s in model.steps(state) if model.canonical(s.after) == self.states[number])
            state = step.after
            rows.append((step.who, step.what, model.show(state)))
        return rows


def put(row: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    """The row with one element replaced."""
    return (*row[:at], value, *row[at + 1 :])


def ranks(found: Iterable[int]) -> str:
    """Ranks as a set in a table."""
    return "{" + ",".join(map(str, sorted(found))) + "}"


@dataclass(frozen=True)
class Protocol:
    """A protocol's models, and what shows that they can fail.

    Attributes:
        small: makes the models of the bound that the tests check; `large`: of the bound of `make models`.
            They describe the protocol with its defects repaired.
        mutant: makes a small model for one of the names below, in which the search has to find a violation.
        mutants: lines of the protocol that can be left out, with what happens then.
        defects: lines that the code lacks today, with what happens.
        limits: what the protocol does not promise, with what may happen.
    """

    name: str
    small: Callable[[], Iterable[Model[Any]]]
    large: Callable[[], Iterable[Model[Any]]]
    mutant: Callable[[str], Model[Any]]
    mutants: Mapping[str, str]
    defects: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, str] = field(default_factory=dict)

    @property
    def variants(self) -> dict[str, str]:
        """All names that `mutant` takes."""
        return {**self.mutants, **self.defects, **self.limits}
