"""The pictures of the documentation show what the code makes today, and the README's first minute is true."""

from __future__ import annotations

import html
import json
import re
import sys
from pathlib import Path

import pytest

from docs.pictures import make
from tests import ROOT
from tests.commands import clean_environment, run

README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("name", make.PICTURES)
def test_a_picture_is_current(name):
    picture = make.PICTURES[name]
    assert (make.HERE / name).exists()
    assert picture.hash() == make.made()[name], f"run `python -m docs.pictures.make {name}`"


def test_another_page_would_be_noticed(monkeypatch):
    picture = make.PICTURES["trace-page.png"]
    monkeypatch.setattr(picture, "shows", lambda: make.trace_page() + "<p>")
    assert picture.hash() != make.made()["trace-page.png"]


def test_the_readme_quotes_the_figures():
    rows = [row for row in json.loads(make.BENCHMARK.read_text())["rows"] if row["operation"] != "ping_pong"]
    ratios = [row["seconds"]["Gloo"] / row["seconds"][make.OURS] for row in rows]
    least, most = re.search(r"(\d+) to (\d+) times as fast as with Gloo", README).groups()
    assert (int(least), int(most)) == (round(min(ratios)), max(ratios) // 10 * 10)
    assert json.loads(make.BENCHMARK.read_text())["about"]["date"] in README


def text_of(svg):
    """The words of a picture of a terminal."""
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", svg)).split())


def sentence(output):
    """The verdict's main sentence: what is in the first box."""
    box = re.search(r"╭─.*?╮\n(.*?)╰", output, re.DOTALL)[1]
    return " ".join(re.sub(r"[│]", " ", box).split())


@pytest.mark.processes
def test_the_job_in_the_readme_hangs_and_is_explained(tmp_path):
    program = re.search(r"```py\n(.*?)```", README, re.DOTALL)[1]
    assert program == (ROOT / "examples" / "hang.py").read_text()
    (tmp_path / "hang.py").write_text(program)
    line = next(n for n, text in enumerate(program.splitlines(), 1) if "time.sleep" in text)
    ran = run(
        [Path(sys.executable).parent / "unicomm", "run", "--nproc-per-node", 2, tmp_path / "hang.py"],
        env=clean_environment() | {"COLUMNS": "100"},
    )
    said = ran.stdout + ran.stderr
    assert ran.returncode == 1
    assert "Rank 1 " in sentence(said)
    assert re.search(rf"It is in `load_batch`, \S*hang.py:{line}, sleeping", sentence(said))


def test_the_picture_shows_that_verdict():
    said = json.loads(make.HANG.read_text())["unicomm run"]
    program = (ROOT / "examples" / "hang.py").read_text().splitlines()
    line = next(n for n, text in enumerate(program, 1) if "time.sleep" in text)
    assert f"It is in `load_batch`, /job/hang.py:{line}, sleeping" in sentence(said)
    words = text_of((make.HERE / "hang.svg").read_text())
    assert f"hang.py:{line}" in words


def test_every_picture_is_made_here():
    kept = {file.name for file in make.HERE.iterdir() if file.suffix in {".png", ".svg"}}
    assert kept == set(make.PICTURES)
