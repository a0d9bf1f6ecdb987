"""docs/design/dependencies.md names exactly the packages that pyproject.toml names, each with a reason."""

from __future__ import annotations

import re
import sys

import pytest

from tests import ROOT

if sys.version_info < (3, 11):
    pytest.skip("tomllib came with Python 3.11", allow_module_level=True)

import tomllib

PAGE = (ROOT / "docs" / "design" / "dependencies.md").read_text()
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def names(requirements):
    return sorted(re.match(r"[\w.-]+", text)[0].lower() for text in requirements)


def rows(heading):
    """The cells of the table below a heading."""
    part = PAGE.split(f"### {heading}\n")[1].split("\n### ")[0].split("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("|")][2:]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]


def test_what_every_installation_has():
    table = rows("What every installation has")
    assert sorted(row[0] for row in table) == names(PYPROJECT["project"]["dependencies"])


def test_extras():
    table = rows("Extras")
    extras = PYPROJECT["project"]["optional-dependencies"]
    documented = {extra: sorted(row[1] for row in table if row[0] == extra) for extra in extras}
    asked = {extra: names(wanted) for extra, wanted in extras.items()}
    assert documented == asked
    assert {row[0] for row in table} == set(extras)


def test_what_builds():
    assert sorted(row[0] for row in rows("To build")) == names(PYPROJECT["build-system"]["requires"])


@pytest.mark.parametrize("heading", ["What every installation has", "Extras", "To build"])
def test_each_has_a_reason_and_a_size(heading):
    for row in rows(heading):
        *_, why, size, _ = row
        assert why, row
        assert re.match(r"\d+(\.\d+)?", size), row


def test_the_package_index_gets_links_that_work_there(monkeypatch):
    """Links are relative in the repository and absolute in the metadata, below the project's home."""
    provider = pytest.importorskip("scikit_build_core.metadata.fancy_pypi_readme")
    pytest.importorskip("hatch_fancy_pypi_readme")
    monkeypatch.chdir(ROOT)
    text = provider.dynamic_metadata("readme", {}, PYPROJECT["project"])["text"]
    home = PYPROJECT["project"]["urls"]["Repository"]
    pictures = home.replace("github.com", "raw.githubusercontent.com") + "/main/"
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    assert len(links) > 40
    for picture, target in links:
        if target.startswith("#"):
            continue
        begin = pictures if picture else home + "/blob/main/"
        assert target.startswith(begin), target
        assert (ROOT / target.removeprefix(begin).split("#")[0]).exists(), target
    urls = PYPROJECT["project"]["urls"].values()
    assert all(url.startswith(home) for url in urls)
