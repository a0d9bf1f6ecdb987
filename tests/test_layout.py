"""The parts, who may import whom, and maps of packages, by reading the source (docs/architecture.md)."""

import ast
import re
import sys
from collections import Counter

import pytest

from tests import ROOT
from tests.commands import run

PACKAGE = ROOT / "unicomm"
FILES = sorted(PACKAGE.rglob("*.py"))
PACKAGES = sorted(path.parent.relative_to(PACKAGE.parent) for path in PACKAGE.rglob("__init__.py"))

# What each part may import of the others. Faces for users (hooks.py, testing) may import all, as launch may.
ALLOWED = {
    "flight_recorder": {"_core", "flight_recorder"},
    "extensions": {"_core", "extensions"},
    "comms": {"_core", "flight_recorder", "comms", "extensions"},
    "backends": {"_core", "flight_recorder", "comms", "backends", "extensions"},
    "c10d": {"_core", "flight_recorder", "comms", "backends", "extensions", "c10d"},
    "profiler": {"_core", "flight_recorder", "comms", "profiler"},
}
COMPAT = "unicomm.c10d.compat."  # torch's private parts: a leaf, which every part may import
COMMS_ROOMS = ("operations", "execution", "membership", "failures", "memory")
#: Tests outside these rooms that name private parts of a communicator, and why.
PRIVATE = {"tests/c10d/test_group_all_reduce.py": "whether the native fast path took a call is not public"}
# The recorder's reading half runs where neither torch nor the native core is.
WRITERS = {
    "recording.writer",
    "recording.hook",
    "recording.dumps",
    "formats.pickles",
    "formats.perfetto_packets",
    "reports.perfetto",
}
READERS = {
    ".".join(path.relative_to(PACKAGE / "flight_recorder").with_suffix("").parts)
    for path in (PACKAGE / "flight_recorder").rglob("*.py")
    if path.name != "__init__.py"
} - WRITERS


def imports(path):
    """Absolute names of all modules that a file imports, also inside functions, but not for types only."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    package = ["unicomm", *path.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = package[: len(package) - node.level + 1]
                base = ".".join([*up, base] if base else up)
            yield from (f"{base}.{alias.name}" for alias in node.names)


def part(name):
    return name.split(".")[1] if name.startswith("unicomm.") else None


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports(path):
    own = path.relative_to(PACKAGE).parts[0]
    names = list(imports(path))
    if own in ALLOWED:
        for name in names:
            other = part(name)
            assert other is None or other in ALLOWED[own] or f"{name}.".startswith(COMPAT), (
                f"{own} must not import {name}"
            )
    if own == "flight_recorder":
        assert not any(n.split(".")[0] == "torch" for n in names)
        if ".".join(path.relative_to(PACKAGE / own).with_suffix("").parts) in READERS:
            assert "unicomm._core" not in names
            assert not any(n.startswith("unicomm.flight_recorder.recording.") for n in names)


def test_torchs_private_parts_are_a_leaf():
    assert not any(part(name) for name in imports(PACKAGE / "c10d" / "compat.py"))


def test_the_rules_would_notice():
    """The reading of imports itself: relative, absolute and inner ones are all seen."""
    registry = set(imports(PACKAGE / "backends" / "registry.py"))
    assert "unicomm.comms.membership.create" in registry
    assert "unicomm._core.fold" not in registry
    assert "unicomm.comms.batch.BatchSendRecv" in set(imports(PACKAGE / "comms" / "communicator.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_stay_small(path):
    assert len(path.read_text().splitlines()) <= 600


def missing_in_map(package):
    """The files and subpackages that a package's docstring does not name, as `file.py` and `name/`."""
    docstring = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    files = {path.name for path in package.glob("*.py")} - {"__init__.py", "__main__.py"}
    subpackages = {path.parent.name + "/" for path in package.glob("*/__init__.py")}
    return {name for name in files | subpackages if not re.search(rf"(?<![\w/]){re.escape(name)}", docstring)}


@pytest.mark.parametrize("package", PACKAGES, ids=str)
def test_packages_are_maps(package):
    missing = missing_in_map(PACKAGE.parent / package)
    assert not missing, f"the docstring of {package}/__init__.py does not name {sorted(missing)}"


def test_private_parts_are_named_once():
    """Tests use public names; those of a room of comms reach its private parts by tests/comms/inside.py."""
    private = re.compile(r"\._(engine|member)\b")
    helper = re.compile(r"from tests\.comms(\.inside)? import (\w+, )*(inside|fast_path|post)\b")
    rooms = [ROOT / "tests/comms" / name for name in COMMS_ROOMS]
    for path in (ROOT / "tests").rglob("*.py"):
        text, name = path.read_text(), str(path.relative_to(ROOT))
        assert name == "tests/comms/inside.py" or name in PRIVATE or not private.search(text), name
        assert any(room in path.parents for room in rooms) or not helper.search(text), name


def test_no_two_test_files_share_a_name():
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_importing_loads_no_backend_and_no_torch():
    code = """
import sys, unicomm
assert "torch" not in sys.modules
assert unicomm.__version__
unicomm.ReduceOp
loaded = [m for m in sys.modules if m.startswith("unicomm.backends.")]
assert not loaded, loaded
"""
    done = run([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr


def test_the_native_core_loads_nothing():
    code = """
import sys, unicomm._core
assert "torch" not in sys.modules
loaded = {m for m in sys.modules if m.startswith("unicomm")}
assert loaded == {"unicomm", "unicomm._core"}, loaded
"""
    done = run([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr


def test_readers_load_no_torch():
    modules = ", ".join(f"unicomm.flight_recorder.{name}" for name in sorted(READERS))
    code = (
        f"import sys, {modules}\nassert not {{'torch', 'unicomm._core', 'unicomm.comms'}} & set(sys.modules)"
    )
    done = run([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr


def test_no_file_knows_whose_machine_it_was_written_on():
    folder = re.compile("/(?:home|root|Users)/" + r"[a-z]")
    kinds = {".py", ".pyi", ".cpp", ".hpp", ".md", ".toml", ".txt", ".json", ".yml"}
    parts = [ROOT / name for name in ("unicomm", "csrc", "tests", "docs", "examples", "benchmarks", "tools")]
    files = [path for part in parts for path in part.rglob("*") if path.suffix in kinds]
    files += [path for path in ROOT.glob("*") if path.is_file() and path.suffix in kinds]
    assert len(files) > 100
    assert [str(path) for path in files if folder.search(path.read_text())] == []


def test_public_names():
    import unicomm

    for name in unicomm.__all__:
        assert getattr(unicomm, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = unicomm.nothing
