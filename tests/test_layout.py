"""The parts and who may import whom (docs/design, section 2 of the design), held to by reading the source."""

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "unicomm"
FILES = sorted(PACKAGE.rglob("*.py"))

# What each part may import of the others. Faces for users (hooks.py, testing) may import all, as launch may.
ALLOWED = {
    "flight_recorder": {"_core", "flight_recorder"},
    "extensions": {"_core", "extensions"},
    "comms": {"_core", "flight_recorder", "comms", "extensions", "c10d"},
    "backends": {"_core", "flight_recorder", "comms", "backends", "extensions"},
    "c10d": {"_core", "flight_recorder", "comms", "backends", "extensions", "c10d"},
    "profiler": {"_core", "flight_recorder", "comms", "profiler"},
}
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
            assert other is None or other in ALLOWED[own], f"{own} must not import {name}"
    if own == "flight_recorder":
        assert not any(n.split(".")[0] == "torch" for n in names)
        if ".".join(path.relative_to(PACKAGE / own).with_suffix("").parts) in READERS:
            assert "unicomm._core" not in names
            assert not any(n.startswith("unicomm.flight_recorder.recording.") for n in names)


def test_the_rules_would_notice():
    """The reading of imports itself: relative, absolute and inner ones are all seen."""
    registry = set(imports(PACKAGE / "backends" / "registry.py"))
    assert "unicomm.comms.membership.lifecycle" in registry
    assert "unicomm._core.fold" not in registry
    assert "unicomm.comms.batch.BatchSendRecv" in set(imports(PACKAGE / "comms" / "communicator.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_stay_small(path):
    assert len(path.read_text().splitlines()) <= 600


def test_no_two_test_files_share_a_name():
    """pytest imports them by it, so that the second one could not be collected beside the first."""
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
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_native_core_loads_nothing():
    code = """
import sys, unicomm._core
assert "torch" not in sys.modules
loaded = {m for m in sys.modules if m.startswith("unicomm")}
assert loaded == {"unicomm", "unicomm._core"}, loaded
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_readers_load_no_torch():
    modules = ", ".join(f"unicomm.flight_recorder.{name}" for name in sorted(READERS))
    code = (
        f"import sys, {modules}\nassert not {{'torch', 'unicomm._core', 'unicomm.comms'}} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_no_file_knows_whose_machine_it_was_written_on():
    folder = re.compile("/(?:home|root|Users)/" + r"[a-z]")
    kinds = {".py", ".pyi", ".cpp", ".hpp", ".md", ".toml", ".txt", ".json", ".yml"}
    parts = [ROOT / name for name in ("unicomm", "csrc", "tests", "docs", "examples", "benchmarks")]
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
