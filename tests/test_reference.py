"""The site: its menu has every page, and the API reference every public name, with docstring and example."""

from __future__ import annotations

import ast
import enum
import inspect
import re
import sys

import pytest

import unicomm
from tests import ROOT
from tests.old_torch import OLD_TORCH
from tools import reference_examples
from tools.reference_examples import Example, resolve, shown
from unicomm import functional, hooks, objcol, profiler, symm, testing
from unicomm.launch import notebook
from unicomm.testing import run_ranks

SHOWN = shown()
EXAMPLES = reference_examples.examples()
ALIASES = {"TorchComm": "Communicator", "TorchWork": "Work", "OpName": "a type of hooks"}
NAMES = sorted(set(unicomm._NAMES) - set(ALIASES))
#: Public names that have no example yet. It may only become shorter.
WITHOUT = ROOT / "docs" / "reference" / "examples" / "missing.txt"


@pytest.mark.parametrize("name", SHOWN)
def test_what_a_page_shows_exists_and_is_described(name):
    assert inspect.getdoc(resolve(name)), name


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_is_on_a_page(name):
    assert any(resolve(one) is getattr(unicomm, name) for one in SHOWN)


def exports(module):
    """What a module's user finds there: functions and classes of unicomm."""
    names = getattr(module, "__all__", None) or [n for n in vars(module) if n[0] != "_"]
    for name in names:
        value = getattr(module, name)
        if callable(value) and getattr(value, "__module__", "").startswith("unicomm"):
            yield name, value


@pytest.mark.parametrize("module", [symm, functional, hooks, testing, notebook, profiler])
def test_what_a_public_module_exports_is_on_a_page_and_described(module):
    known = {id(value) for _, value in reference_examples.public()}
    assert [name for name, value in exports(module) if not inspect.getdoc(value)] == []
    assert [n for n, value in exports(module) if id(value) not in known and n not in ALIASES] == []


def test_functions_for_objects_are_on_a_page():
    known = {id(value) for _, value in reference_examples.public()}
    missing = [n for n, v in exports(objcol) if n.endswith(("_object", "_list")) and id(v) not in known]
    assert missing == []


def test_public_methods_are_described():
    assert [path for path, value in reference_examples.public() if not inspect.getdoc(value)] == []


# --- examples ---------------------------------------------------------------------------------------------


class _Raises(ast.NodeTransformer):
    """Has each `try` fail that raises nothing, unless its block asserts something."""

    def visit_Try(self, node: ast.Try) -> ast.Try:
        if not any(isinstance(inner, ast.Assert) for one in node.body for inner in ast.walk(one)):
            text = f"nothing was raised by: {ast.unparse(node.body[0])}"
            node.orelse = ast.parse(f"raise AssertionError({text!r})").body
        return ast.fix_missing_locations(node)


def run(example: Example) -> None:
    """Runs an example as a reader of its page would: `comm` is given where the example does not make one."""
    program = compile(example.preamble, example.place, "exec")
    cell = compile(_Raises().visit(ast.parse(example.code)), example.place, "exec")

    def rank_main(comm=None):
        space = {"__name__": "example", "comm": comm}
        exec(program, space)
        exec(cell, space)

    if example.on_two_ranks:
        run_ranks(rank_main, 2)
    else:
        rank_main()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.names[0])
def test_example(example, tmp_path, monkeypatch, fresh_recorder):
    if OLD_TORCH and any(name.endswith(("_async", "graph_annotations")) for name in example.names):
        pytest.skip("this torch has no asynchronous functional forms, and annotates no graphs")
    monkeypatch.chdir(tmp_path)  # some write files
    run(example)


def test_every_public_name_has_an_example_that_uses_it():
    assert reference_examples.without_example() == WITHOUT.read_text().split()
    for example in EXAMPLES:
        text = example.code + example.preamble
        last = {name.split(".")[-1] for name in example.names} - {"__await__"}
        unused = {name for name in last if not re.search(rf"\b{name}\b", text)}
        assert unused <= _NOT_MADE_BY_USERS, example.place


#: Classes whose objects a function or a method makes, which the example calls.
_NOT_MADE_BY_USERS = {
    *("Work", "BatchSendRecv", "CommOptions", "MemAllocator", "P2POp", "Handle", "Route", "RemovableHandle"),
    *("FunctionalOp", "CommEvent", "Ranks", "TorchOperator", "Communicator", "Window", "OpArgs"),
}


def test_an_example_that_is_wrong_fails():
    with pytest.raises(AssertionError):
        run(Example(("Communicator.barrier",), "comm.barrier()\nassert comm.size == 3\n", "", "here"))
    with pytest.raises(AssertionError, match="nothing was raised"):
        run(Example((), "try:\n    comm.barrier()\nexcept RuntimeError:\n    pass\n", "", "here"))
    with pytest.raises(AttributeError):
        resolve("unicomm.Communicator.no_such_method")


# --- parameters -------------------------------------------------------------------------------------------


def described_in(path, value):
    """Returns what a reader looks at for a parameter: the docstrings of name, class, bases and module."""
    owner, function = resolve(path.rpartition(".")[0]), value
    classes = [one for one in (value, owner) if isinstance(one, type)]
    bases = [base for one in classes for base in one.__mro__ if base.__module__.startswith("unicomm")]
    initial = [base.__init__ for base in bases if "__init__" in vars(base)]
    module = sys.modules.get(getattr(function, "__module__", ""))
    return "\n".join(inspect.getdoc(one) or "" for one in (value, *bases, *initial, module))


def undescribed():
    """Yields the parameters that these docstrings do not mention."""
    for path, value in reference_examples.public():
        own_signature = not (isinstance(value, type) and issubclass(value, enum.Enum | Exception))
        if isinstance(value, property) or not callable(value) or not own_signature:
            continue
        if isinstance(value, type) and value.__name__ in _NOT_MADE_BY_USERS:
            continue
        text = described_in(path, value)
        for name in inspect.signature(value).parameters:
            if name not in ("self", "cls") and not re.search(rf"\b{name}\b", text):
                yield f"{path}({name})"


def test_every_parameter_is_described():
    assert sorted(undescribed()) == []


def test_the_menu_has_every_page():
    menu = set(re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    brought = {"index.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md"}
    assert menu - brought == {page for page in pages if not page.startswith("design/")} | {"design/README.md"}
