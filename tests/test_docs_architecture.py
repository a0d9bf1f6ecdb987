"""docs/architecture.md: the files and functions that it names exist; its picture is the rule of imports."""

import ast
import re

import pytest

from tests import ROOT
from tests.test_rooms import CORE, MAY_IMPORT
from unicomm.comms.operations.table import OPERATIONS, Kind
from unicomm.flight_recorder.formats import operation_names

PAGE = ROOT / "docs" / "architecture.md"
TEXT = PAGE.read_text()

#: `path` and `path: name, name` in the page; a folder ends with a slash. Names within a path have no spaces.
_SPAN = re.compile(r"(?<!`)`((?:[\w.-]+/)*[\w.*-]*(?:\.\w+|/))(?:: ([^`]+))?`(?!`)")
_SUFFIXES = (".py", ".pyi", ".cpp", ".hpp", ".json", ".md", ".txt", "/")
#: Words that look like paths: patterns and what the reader is to create.
NO_PATHS = {"bind*.cpp", "tests/backends/toy/"}

NO_MEMBERS = {"ProcessGroupGloo.allreduce", "CHANGELOG.md", "CMakeLists.txt"}

#: The nodes of the picture: which rooms of tests/test_rooms.py each stands for.
PICTURE = {
    "launch": {"launch"},
    "testing": {"testing"},
    "torchcomms": {"torchcomms"},
    "c10d": {"c10d"},
    "registry": {"backends.registry"},
    "symm": {"symm"},
    "rehearse": {"rehearse"},
    "profiler": {"profiler"},
    "faces": {
        f"comms.{name}" for name in ("communicator", "properties", "batch", "window", "persistent", "objects")
    },
    "choosers": {"backends.auto", "backends.hosts"},
    "shared": {f"backends.{name}" for name in ("bootstrap", "out_of_band", "vendor")},
    "memory": {"comms.memory"},
    "membership": {"comms.membership"},
    "execution": {"comms.execution"},
    "failures": {"comms.failures"},
    "protocol": {"comms.backend", "comms.work"},
    "values": {f"comms.{name}" for name in ("operations", "errors", "options", "streams")},
    "recorder": {"flight_recorder"},
    "extensions": {"extensions"},
    "compat": {"c10d.compat"},
}
#: All other backends.
PICTURE["backends"] = {name for name in MAY_IMPORT if name.startswith("backends.")} - set().union(
    *PICTURE.values()
)


def spans(text=TEXT):
    """(path, names) of the files that a page names."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL).replace("\n", " ")
    for path, names in _SPAN.findall(re.sub(r" +", " ", prose)):
        if path.endswith(_SUFFIXES) and path not in NO_PATHS:
            yield path, [name.strip() for name in names.split(",") if name.strip()]


SPANS = sorted({(path, name) for path, names in spans() for name in names or [""]})


def find(path):
    found = [root / path for root in (ROOT / "unicomm", ROOT) if (root / path).exists()]
    assert found, f"{path} does not exist"
    return found[0]


def names_in_python(tree, within=""):
    """Functions, classes, methods and assigned names: "Class.method", "function", "NAME"."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield within + node.name
            if isinstance(node, ast.ClassDef):
                yield from names_in_python(node, f"{within}{node.name}.")
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (within + target.id for target in targets if isinstance(target, ast.Name))


def has(path, name):
    text = path.read_text()
    if path.suffix == ".py":
        return name in set(names_in_python(ast.parse(text)))
    return re.search(rf"(?<![\w:]){re.escape(name)}\b", text) is not None


def short_names():
    """Members that the page names without a file: `Class.member` and `Class::member`."""
    return {found for found in re.findall(r"`([A-Z]\w+(?:\.|::)\w+)`", TEXT) if found not in NO_MEMBERS}


def test_names_without_a_path_are_in_a_file_that_the_page_names():
    files = {find(path) for path, _ in SPANS if not path.endswith("/")}
    assert short_names()
    lost = {name for name in short_names() if not any(has(path, name) for path in files)}
    assert not lost


@pytest.mark.parametrize(("path", "name"), SPANS, ids=[f"{p}:{n}" for p, n in SPANS])
def test_what_the_page_names_exists(path, name):
    there = find(path)
    assert not name or has(there, name), f"{path} has no {name}"


def test_the_page_names_much_and_wrong_names_are_noticed():
    assert len(SPANS) > 120
    engine = find("comms/execution/engine.py")
    assert has(engine, "Engine.collective")
    assert not has(engine, "collective")
    assert not has(find("csrc/shm/collectives.cpp"), "Group::all_reduced")
    assert not has(find("csrc/shm/collectives.cpp"), "all_reduce")  # is Group::all_reduce
    with pytest.raises(AssertionError, match="does not exist"):
        find("comms/engine.py")


def closure(graph):
    """Whatever each node reaches, without itself."""

    def reach(node, seen):
        for other in graph.get(node, ()):
            if other not in seen:
                seen.add(other)
                reach(other, seen)
        return seen

    return {node: reach(node, set()) - {node} for node in graph}


def test_the_picture_is_what_imports_are_held_to():
    mermaid = re.search(r"```mermaid\n(.*?)```", TEXT, re.DOTALL).group(1)
    nodes = set(re.findall(r"^ +(\w+)\[", mermaid, re.MULTILINE))
    assert nodes == {*PICTURE, "core"}
    drawn = {node: set() for node in nodes}
    for source, targets in re.findall(r"^ +(\w+) --> (.*)$", mermaid, re.MULTILINE):
        drawn[source] |= set(targets.split(" & "))
    assert {room for rooms in PICTURE.values() for room in rooms} == {*MAY_IMPORT, "launch"}
    node_of = {room: node for node, rooms in PICTURE.items() for room in rooms}
    rules = {node: set() for node in PICTURE}
    for room, may in MAY_IMPORT.items():
        rules[node_of[room]] |= {node_of[other] for other in may}
    rules["launch"] = set(PICTURE)  # may import all
    drawn_rooms = {node: others - {"core"} for node, others in drawn.items() if node != "core"}
    assert closure(drawn_rooms) == closure(rules)
    users = {
        room.split(".")[0] for node, others in drawn.items() if "core" in others for room in PICTURE[node]
    }
    assert users <= CORE


@pytest.mark.parametrize("anchor", sorted(set(re.findall(r"\]\(#([\w-]+)\)", TEXT))))
def test_links_within_the_page(anchor):
    headings = re.findall(r"^#+ (.*)$", TEXT, re.MULTILINE)
    assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_readers_have_the_names_of_the_operation_table():
    """The recorder's readers import nothing of comms, so they have the names a second time."""
    names = {kind: {row.name for row in OPERATIONS.values() if row.kind is kind} for kind in Kind}
    assert names[Kind.COLLECTIVE] == operation_names.COLLECTIVES
    assert names[Kind.SYMMETRIC] == set(operation_names._ON_SYMMETRIC_MEMORY)
