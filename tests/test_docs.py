"""The README and the docs: every Python example runs; links, files and names that they mention exist."""

import re
import sys

import pytest

from tests import ROOT
from tests.commands import run
from tests.old_torch import OLD_TORCH
from tools.reference_examples import resolve

PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = [
    pytest.param(block, id=f"{page.relative_to(ROOT)}-{i}")
    for page in PAGES
    for i, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


def test_there_are_examples():
    assert len(EXAMPLES) >= 5


@pytest.mark.parametrize("code", EXAMPLES)
def test_example(code, tmp_path, monkeypatch):
    if OLD_TORCH and "group: dist.ProcessGroup" in code:
        pytest.skip("this torch has no custom operators that take process groups")
    monkeypatch.chdir(tmp_path)  # some write files
    exec(compile(code, "example", "exec"), {"__name__": "example"})


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


#: Folders with which a path begins that is meant to be one of this repository.
FOLDERS = {path.name for root in (ROOT, ROOT / "unicomm") for path in root.iterdir() if path.is_dir()} - {
    "build"
}
SOURCES = [
    *PAGES,
    *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "csrc/README.md")),
    *sorted(path for part in ("examples", "benchmarks", "tools") for path in (ROOT / part).glob("*.py")),
]


def lost_paths(text):
    """Paths in a text that begin with a folder of the repository or of the package, and do not exist."""
    for path in set(re.findall(r"(?<![\w/.\-<])((?:[\w-]+/)+[\w-]+\.(?:py|cpp|hpp|md|json|sh))\b", text)):
        if path.split("/")[0] in FOLDERS and not any(
            (root / path).exists() for root in (ROOT, ROOT / "unicomm")
        ):
            yield path


def lost_names(text):
    """Dotted names below `unicomm` in a text that cannot be imported or found."""
    for name in set(re.findall(r"(?<![\w./])unicomm(?:\.\w+)+", text)):
        try:
            resolve(name)
        except AttributeError:
            yield name


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_names_exist(source):
    text = re.sub(r"### Removed\n.*?(?=\n##|\Z)", "", source.read_text(), flags=re.DOTALL)  # in CHANGELOG.md
    assert sorted(lost_paths(text)) == []
    assert sorted(lost_names(text)) == []


def test_names_that_texts_call_need_no_import_but_unicomm():
    """As a reader types them: in a new interpreter, after `import unicomm` alone."""
    text = "".join(page.read_text() for page in SOURCES)
    called = sorted(set(re.findall(r"(?<![\w./])unicomm((?:\.\w+)+)\(", text)))
    assert ".launch.notebook.launch" in called
    program = f"""
import operator, unicomm
for name in {called}:
    try:
        operator.attrgetter(name[1:])(unicomm)
    except AttributeError as error:
        print(name, error)
"""
    ran = run([sys.executable, "-c", program])
    assert (ran.returncode, ran.stdout) == (0, ""), ran.stdout + ran.stderr


@pytest.mark.parametrize("page", ["slurm", "kubernetes"])
def test_scripts_start_what_is_recommended(page):
    """Complete scripts start `unicomm run`; hosts that c10d numbers are given no numbers."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    scripts = re.findall(r"^```\w+\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert any("unicomm" in script for script in scripts)
    for script in scripts:
        assert "torchrun" not in script, script
        assert not ("c10d" in script and "--node-rank" in script), script


def test_lost_files_and_names_are_noticed():
    assert list(
        lost_paths("see comms/engine.py and unicomm/comms/execution/engine.py, not /job/train.py")
    ) == ["comms/engine.py"]
    assert list(lost_names("`unicomm.new_comm`, unicomm.symm.empty and unicomm.no_comm")) == [
        "unicomm.no_comm"
    ]
