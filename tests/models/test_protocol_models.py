"""The models of the protocols: docs/design/models/README.md."""

import re
from typing import NamedTuple

import pytest

from docs.design.models import checker
from docs.design.models.__main__ import PROTOCOLS
from docs.design.models.checker import Model, Step, check
from tests import ROOT
from tests.test_docs_architecture import find, has, spans

pytestmark = pytest.mark.timeout(600)  # some seconds of computing each, on a machine that may be busy

PAGE = (ROOT / "docs/design/models/README.md").read_text()

SMALL = [pytest.param(model, id=model.title) for p in PROTOCOLS.values() for model in p.small()]
VARIANTS = [pytest.param(p, name, id=f"{p.name}-{name}") for p in PROTOCOLS.values() for name in p.variants]


@pytest.mark.parametrize("model", SMALL)
def test_the_protocol_holds(model):
    result = check(model)
    assert result.ok, f"{result.summary()}\n{result.table()}"
    assert result.states > 10


@pytest.mark.parametrize(("protocol", "name"), VARIANTS)
def test_a_line_left_out_is_noticed(protocol, name):
    result = check(protocol.mutant(name))
    assert result.violation, result.summary()
    assert result.table().endswith(f"=> {result.violation}")
    # Its steps are steps of the model, and its last state is the one that is wrong.
    assert len(result.run) == result.depth + 1
    assert result.run[0][1] == "start"


@pytest.mark.parametrize("name", PROTOCOLS)
def test_each_protocol_can_fail_in_two_ways_at_least(name):
    assert len(PROTOCOLS[name].mutants) >= 2


def test_the_page_lists_all_protocols_and_what_the_code_lacks():
    for protocol in PROTOCOLS.values():
        assert f"({protocol.name}.py)" in PAGE
        for name in (*protocol.defects, *protocol.limits):
            assert f"| `{name}` |" in PAGE
    listed = re.findall(r"^\| `([a-z ]+)` \|", PAGE, flags=re.MULTILINE)
    assert sorted(listed) == sorted(n for p in PROTOCOLS.values() for n in (*p.defects, *p.limits))


SPANS = sorted({(path, name) for path, names in spans(PAGE) for name in names or [""] if "/" in path})


@pytest.mark.parametrize(("path", "name"), SPANS)
def test_the_code_that_the_page_maps_exists(path, name):
    assert name == "" or has(find(path), name), f"{path} has no {name}"


def test_the_page_maps_code():
    assert len(SPANS) > 40


# --- the search --------------------------------------------------------------------------------------------


class Lamp(NamedTuple):
    number: int
    on: bool = False


class Lamps(Model):
    """A counter from 0 to `last` that may go on for ever between two numbers."""

    title = "lamps"

    def __init__(self, last, circle=(), fair=True, wrong=-1):
        self.last, self.circle, self.fair, self.wrong = last, circle, fair, wrong

    def start(self):
        return Lamp(0)

    def steps(self, state):
        if state.number in self.circle:
            at = self.circle.index(state.number)
            yield Step("counter", "goes round", Lamp(self.circle[(at + 1) % len(self.circle)]))
            if not self.fair:
                yield Step("fault", "leaves the circle", Lamp(self.last), fair=False)
        elif state.number < self.last:
            yield Step("counter", "counts", Lamp(state.number + 1))
            yield Step("counter", "jumps", Lamp(min(self.last, state.number + 2)))

    def violation(self, state):
        return "wrong number" if state.number == self.wrong else ""

    def over(self, state):
        return state.number == self.last

    def show(self, state):
        return {"number": str(state.number)}


def test_a_shortest_run_to_a_violation_is_shown():
    result = check(Lamps(9, wrong=6))
    assert (result.violation, result.depth) == ("wrong number", 3)
    assert [row[2]["number"] for row in result.run] == ["0", "2", "4", "6"]
    assert result.table().splitlines()[-2:] == ["3  counter  jumps  6", "=> wrong number"]


def test_all_states_are_visited_once():
    result = check(Lamps(9))
    assert result.ok
    assert (result.states, result.transitions) == (10, 18)


def test_a_deadlock_is_found():
    class Stuck(Lamps):
        def over(self, state):
            return False

    result = check(Stuck(3))
    assert "no fair step" in result.violation
    assert result.run[-1][2]["number"] == "3"


def test_a_circle_without_an_end_is_found():
    assert "no fair step" in check(Lamps(9, circle=(4, 5))).violation


def test_no_run_may_depend_on_a_fault_to_end():
    assert "no fair step" in check(Lamps(9, circle=(4, 5), fair=False)).violation


def test_a_search_that_reached_its_limit_proves_nothing():
    result = check(Lamps(1000), most=10)
    assert not result.ok
    assert "unknown" in result.summary()


def test_states_that_stand_for_each_other_are_visited_once():
    class Even(Lamps):
        def canonical(self, state):
            return Lamp(state.number % 4 if state.number < self.last else self.last)

        def steps(self, state):
            yield Step("counter", "counts", Lamp(min(self.last, state.number + 1)))
            yield Step("counter", "ends", Lamp(self.last))

    result = check(Even(100, wrong=3))
    assert result.states == 5
    assert [row[2]["number"] for row in result.run] == ["0", "1", "2", "3"]


def test_ranks_are_shown_sorted():
    assert checker.ranks({2, 0}) == "{0,2}"
    assert checker.put((1, 2, 3), 1, 5) == (1, 5, 3)
