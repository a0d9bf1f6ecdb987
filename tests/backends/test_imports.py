"""What backends may import: no other backend, the face of shared packages, and the lower rooms of `comms`."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests import ROOT

FOLDER = ROOT / "unicomm" / "backends"
FILES = sorted(path for path in FOLDER.rglob("*.py") if path.parent != FOLDER or path.name != "__init__.py")
SHARED = {"bootstrap", "out_of_band", "transport", "vendor"}
WITH_A_FACE = {"bootstrap", "out_of_band", "transport"}
#: What has to know other backends: `auto` chooses one, and `hosts` is made of two.
OF_BACKENDS = {"auto", "hosts"}
ROOMS = ("errors", "options", "streams", "operations", "backend", "failures")
#: Further rooms of `comms`, and what for.
MORE_ROOMS = {
    "auto": {"membership"},  # its parts meet by themselves
    "bootstrap": {"membership", "execution.member"},  # stores, this process's place in its job
    # Composes what has to go straight from rank to rank, and encodes what goes between hosts, in chunks.
    "hosts": {"execution.composed.completion", "execution.composed.encoded", "execution.composed.exchanges"},
    "out_of_band": {"membership.handles"},  # notices silent connections
    "registry": {"communicator", "execution", "membership"},  # `new_comm`
}
#: The core's faults as errors are in shm.py, of which no backend should have to know.
FAULTS = {
    "hosts/first_step.py",
    "out_of_band/fault_errors.py",
    "out_of_band/signatures.py",
    "shmem/backend.py",
}


def imported(path: Path) -> list[tuple[str, str]]:
    """Returns (module, name) of all imports from unicomm, also typing-only ones and those in functions."""
    package = ["unicomm", *path.relative_to(ROOT / "unicomm").parent.parts]
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [base])])
            found += [(base, alias.name) for alias in node.names]
    return [(module, name) for module, name in found if module.split(".")[0] == "unicomm"]


def owner(path: Path) -> str:
    """Returns the backend or shared package that a file belongs to."""
    return path.relative_to(FOLDER).parts[0].removesuffix(".py")


def within(name: str, rooms: set[str]) -> bool:
    return any(name == room or name.startswith(f"{room}.") for room in rooms)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(FOLDER)))
def test_imports(path: Path):
    own = owner(path)
    for module, name in imported(path):
        parts = f"{module}.{name}".split(".")
        if parts[1] == "comms":
            allowed = {*ROOMS, *MORE_ROOMS.get(own, ())}
            assert within(".".join(parts[2:]), allowed), f"{own} must not import {name} from {module}"
        if parts[1] != "backends" or parts[2] == own:
            continue
        if parts[2] in WITH_A_FACE:
            assert module in ("unicomm.backends", f"unicomm.backends.{parts[2]}"), (
                f"import {name} from unicomm.backends.{parts[2]}, whose face says what others may use"
            )
        known = parts[2] in SHARED or own in OF_BACKENDS
        known = known or (parts[2] == "shm" and str(path.relative_to(FOLDER)) in FAULTS)
        assert known, f"{own} must not know the backend {parts[2]}"
