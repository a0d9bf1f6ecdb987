"""Rooms of the package: which room may import which, and that no files import each other in a circle.

Imports are read from the source. Imports for types only and imports inside functions count.
"""

import ast
from collections import defaultdict

import pytest

from tests import ROOT

PACKAGE = ROOT / "unicomm"

_VALUES = {"comms.errors", "comms.options", "comms.streams", "comms.operations"}
_PROTOCOLS = _VALUES | {"comms.backend", "comms.work", "c10d.compat"}
_FAILURES = _PROTOCOLS | {"comms.failures", "flight_recorder"}
_EXECUTION = _FAILURES | {"comms.execution", "extensions"}
_MEMBERSHIP = _EXECUTION | {"comms.membership"}
_MEMORY = _MEMBERSHIP | {"comms.memory"}
_FACES = {
    *("comms.communicator", "comms.properties", "comms.batch", "comms.window", "comms.persistent"),
    "comms.objects",
}
_BACKEND = _PROTOCOLS | {"comms.failures"}
_SHARED = {"backends.bootstrap", "backends.out_of_band", "backends.vendor"}
_FAR = {"backends.gloo", "backends.transport", "backends.tcp", "backends.ucx"}

#: What each room may import. The longest prefix of a module's name is its room. A room may import itself, and
#: those in CORE the native core.
MAY_IMPORT = {
    "c10d.compat": set(),
    "extensions": {"c10d.compat"},
    "flight_recorder": set(),
    "comms.errors": set(),
    "comms.options": {"comms.errors"},
    "comms.streams": {"c10d.compat"},
    "comms.operations": {"comms.errors", "comms.options", "c10d.compat"},
    "comms.backend": _VALUES | {"c10d.compat"},
    "comms.work": {"comms.errors", "comms.options"},
    "comms.failures": _PROTOCOLS | {"flight_recorder"},
    "comms.execution": _FAILURES | {"extensions"},
    "comms.membership": _EXECUTION,
    "comms.memory": _MEMBERSHIP,
    "comms.batch": _EXECUTION,
    "comms.persistent": _EXECUTION,
    "comms.window": _MEMORY,
    "comms.properties": _MEMORY,
    "comms.communicator": _MEMORY | _FACES - {"comms.objects"},
    "comms.objects": _MEMORY | _FACES,
    "backends.vendor": _VALUES | {"extensions", "c10d.compat"},
    # Rank, size and rendezvous are membership's; the store of a job is opened with them.
    "backends.bootstrap": _BACKEND | {"comms.execution", "comms.membership"},
    # The recorder knows which lines are the user's.
    "backends.out_of_band": _BACKEND | {"backends.bootstrap", "comms.membership", "flight_recorder"},
    "backends.shm": _BACKEND | {"backends.bootstrap"},
    "backends.fake": _BACKEND,
    "backends.gloo": _BACKEND | _SHARED,
    "backends.transport": _BACKEND | {"backends.bootstrap", "backends.out_of_band"},
    "backends.tcp": _BACKEND | {"backends.out_of_band", "backends.transport"},
    "backends.ucx": _BACKEND | _SHARED | {"backends.transport"},
    "backends.mpi": _BACKEND | _SHARED,
    "backends.nccl": _BACKEND | _SHARED,
    "backends.shmem": _BACKEND | _SHARED,
    # Collectives over several hosts compose those of their parts, and `auto` meets before it chooses.
    "backends.hosts": _BACKEND | _SHARED | _FAR | {"backends.shm", "comms.execution"},
    "backends.auto": _BACKEND | _SHARED | _FAR | {"backends.shm", "backends.hosts", "comms.membership"},
    "backends.registry": _MEMBERSHIP | {"comms.communicator", "backends.bootstrap"},
    "c10d": _MEMORY | _FACES | {"backends.bootstrap", "backends.registry"},
    "symm": _MEMORY | _FACES,
    "torchcomms": _MEMORY | _FACES | {"backends.registry", "c10d"},
    # It plays any backend's part, under the switch of torch.distributed.
    "rehearse": _MEMORY | _FACES | {"backends.registry", "c10d"},
    "profiler": _EXECUTION | {"comms.communicator"},
    "testing": _MEMORY | _FACES | {"backends.registry", "rehearse"},
}
#: Rooms that may import everything: the command line, and names that users import.
FREE = {"launch", "__main__", "hooks", "functional", ""}
#: Rooms that may import the native core.
CORE = {"comms", "c10d", "backends", "flight_recorder", "symm", "extensions", "launch", "profiler", "testing"}


def modules():
    """Module name below unicomm -> its file."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(name):
    """Modules below unicomm that a module imports, the native core as "_core"."""
    path = MODULES[name]
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            wanted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = ["unicomm", *package][: len(package) + 2 - node.level]
                base = ".".join([*up, base] if base else up)
            wanted = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for full in wanted:
            if full.split(".")[0] != "unicomm":
                continue
            inner = full.split(".")[1:]
            if inner[:1] == ["_core"]:
                yield "_core"
            while inner and ".".join(inner) not in MODULES:
                inner = inner[:-1]
            if inner and (found := ".".join(inner)) != name:
                yield found


def room(name):
    parts = name.split(".")
    for k in range(len(parts), 0, -1):
        if (prefix := ".".join(parts[:k])) in MAY_IMPORT:
            return prefix
    return parts[0]


@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_room_imports_only_rooms_below_it(name):
    own = room(name)
    if own in FREE or name in ("comms", "backends"):  # maps without code
        return
    for other in imports(name):
        if other == "_core":
            assert own.split(".")[0] in CORE, f"{own} must not import the native core"
        else:
            there = room(other)
            assert there == own or there in MAY_IMPORT[own], f"{own} must not import {other}"


def test_the_rooms_themselves_have_one_direction():
    circles = circles_of({own: set(may) & set(MAY_IMPORT) for own, may in MAY_IMPORT.items()})
    assert circles == []


def test_no_files_import_each_other_in_a_circle():
    graph = {name: {other for other in imports(name) if other != "_core"} for name in MODULES}
    # A package's own file names its modules to hand them out; whoever imports from it is below none of them.
    faces = {name for name, path in MODULES.items() if path.name == "__init__.py"}
    assert circles_of({name: others - faces for name, others in graph.items()}) == []


def test_circles_would_be_found():
    assert circles_of({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    assert "comms.execution.engine" in set(imports("comms.execution.point_to_point"))
    assert "backends.out_of_band" in set(imports("backends.gloo.backend"))


def circles_of(graph):
    """The strongly connected components of more than one node (Tarjan, SIAM J. Comput. 1, 1972)."""
    index, low, stack, found = {}, {}, [], []

    def visit(node):
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph.get(node, ()):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for node in graph:
        if node not in index:
            visit(node)
    return found


def test_each_room_is_there():
    used = defaultdict(list)
    for name in MODULES:
        used[room(name)].append(name)
    assert set(MAY_IMPORT) <= set(used)
