"""The site: its menu has every page, and the API reference every public name, which has a docstring."""

from __future__ import annotations

import importlib
import inspect
import re

import pytest

import unicomm
from tests import ROOT
from unicomm import symm, testing

PAGES = {page.name: page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md")}
SHOWN = [name for text in PAGES.values() for name in re.findall(r"^::: (\S+)$", text, re.MULTILINE)]
ALIASES = {"TorchComm": "Communicator", "TorchWork": "Work", "OpName": "a type of hooks"}
NAMES = sorted(set(unicomm._NAMES) - set(ALIASES))


def found(name):
    """The object or module of a dotted name."""
    parts = name.split(".")
    for n in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:n]))
        except ImportError:
            continue
        for part in parts[n:]:
            value = getattr(value, part)
        return value
    raise AssertionError(name)


@pytest.mark.parametrize("name", SHOWN)
def test_what_a_page_shows_exists_and_is_described(name):
    assert inspect.getdoc(found(name)), name


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_is_on_a_page(name):
    assert any(found(shown) is getattr(unicomm, name) for shown in SHOWN)


@pytest.mark.parametrize(
    ("module", "name"),
    [(m, n) for m in (symm, testing) for n, v in vars(m).items() if n[0] != "_" and callable(v)],
    ids=lambda v: v if isinstance(v, str) else v.__name__,
)
def test_what_a_public_module_exports_is_described(module, name):
    assert inspect.getdoc(getattr(module, name)), name


@pytest.mark.parametrize("owner", ["Communicator", "Work", "Window", "BatchSendRecv", "CommError"])
def test_public_methods_are_described(owner):
    members = inspect.getmembers(getattr(unicomm, owner))
    functions = [(n, f) for n, f in members if n[0] != "_" and (callable(f) or isinstance(f, property))]
    assert [n for n, f in functions if not inspect.getdoc(f)] == []


def test_the_menu_has_every_page():
    menu = set(re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    brought = {"index.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md"}
    assert menu - brought == {page for page in pages if not page.startswith("design/")} | {"design/README.md"}
