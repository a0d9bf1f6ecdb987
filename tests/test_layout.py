"""What the recorder's readers import, the sizes and names of files, and the maps in packages' docstrings."""

import ast
import re
import sys
from collections import Counter

import pytest

from tests import ROOT
from tests.commands import run
from tests.test_rooms import MODULES, imports

PACKAGE = ROOT / "unicomm"
FILES = sorted(PACKAGE.rglob("*.py"))
PACKAGES = sorted(path.parent.relative_to(PACKAGE.parent) for path in PACKAGE.rglob("__init__.py"))

COMMS_ROOMS = ("operations", "execution", "membership", "failures", "memory")
#: Tests outside these rooms that name private parts of a communicator, and why.
PRIVATE = {
    "tests/c10d/test_group_all_reduce.py": "whether the native fast path took a call is not public",
    "tests/c10d/test_single_messages.py": "whether a message went through the queue is not public",
    "tests/processes/programs/one_copy.py": "how a message was moved is not public",
}
# The recorder's reading half runs where neither torch nor the native core is.
WRITERS = {
    "recording.writer",
    "recording.hook",
    "recording.dumps",
    "recording.ending",
    "formats.pickles",
    "formats.perfetto_packets",
    "reports.perfetto",
}
READERS = {
    ".".join(path.relative_to(PACKAGE / "flight_recorder").with_suffix("").parts)
    for path in (PACKAGE / "flight_recorder").rglob("*.py")
    if path.name != "__init__.py"
} - WRITERS
RECORDER = sorted(name for name in MODULES if name.startswith("flight_recorder."))


@pytest.mark.parametrize("name", RECORDER)
def test_the_recorder_imports_no_torch_and_its_readers_no_core(name):
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not any(imported.split(".")[0] == "torch" for imported in names)
    if name.removeprefix("flight_recorder.") in READERS:
        found = set(imports(name))
        assert "_core" not in found
        assert not any(other.startswith("flight_recorder.recording.") for other in found)


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
