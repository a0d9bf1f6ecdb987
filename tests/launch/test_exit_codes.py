"""Commands that read end with code 2, and say why on stderr, when nothing of their input can be used."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from benchmarks import profile_merge
from tests.flight_recorder.rings import write_ring
from unicomm.launch.cli import app

# Each command by its words; BAD stands for what cannot be used, GOOD for what can, OUT for a new file.
COMMANDS = {
    "analyze": "trace analyze BAD",
    "analyze as JSON": "trace analyze BAD --json",
    "analyze as Markdown": "trace analyze BAD --markdown",
    "analyze as a page": "trace analyze BAD --html OUT.html",
    "analyze for Perfetto": "trace analyze BAD --perfetto OUT.pftrace",
    "show": "trace show BAD",
    "show as JSON": "trace show BAD --json",
    "show records": "trace show BAD --raw",
    "diff": "trace diff BAD BAD",
    "diff of a good and a bad run": "trace diff RINGS BAD",
    "diff of a bad and a good run": "trace diff BAD RINGS --json",
    "export": "trace export BAD",
    "export for a collector": "trace export BAD --otlp OUT.json",
    "top": "trace top BAD --once",
    "top as JSON": "trace top BAD --json",
    "report": "profile report BAD",
    "report as JSON": "profile report BAD --json",
    "report as a page": "profile report BAD --html OUT.html",
    "merge": "profile merge BAD -o OUT.json",
    "merge of a good and a bad trace": "profile merge TRACE BAD -o OUT.pftrace",
    "annotate a bad trace": "profile annotate BAD NOTES -o OUT.json",
    "annotate with bad notes": "profile annotate TRACE BAD -o OUT.json",
}
GOOD = {
    "trace analyze RINGS": (0, 1),
    "trace show RINGS": (0,),
    "trace diff RINGS RINGS": (0,),
    "trace export RINGS": (0,),
    "trace top RINGS --once": (0,),
    "profile report RINGS": (0,),
    "profile report TRACE --memory 1": (0,),
    "profile merge TRACE -o OUT.json --memory 1": (0,),
    "profile annotate TRACE NOTES -o OUT.json --memory 1": (0,),
}


def _nothing(path: Path) -> None:
    """There is no such path."""


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _damaged(path: Path) -> None:
    path.mkdir()
    (path / "a.ucring").write_bytes(b"UCRING01" + bytes(300))
    (path / "rank0.json").write_text("[" * 100_000)
    (path / "rank1.json").write_text('{"entries": 5}')
    (path / "c.pickle").write_bytes(b"\x80\x04cos\nsystem\n")
    (path / "a.ending").write_text('{"format": 1}')


def _locked(path: Path) -> None:
    """An archive that needs a password."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("rank0.json", "{}")
    data = bytearray(path.read_bytes())
    for at in (data.index(b"PK\x03\x04") + 6, data.index(b"PK\x01\x02") + 8):
        data[at] |= 1
    path.write_bytes(data)


def _text(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text)


UNUSABLE: dict[str, Callable[[Path], object]] = {
    "nothing": _nothing,
    "an empty folder": Path.mkdir,
    "a folder of damaged files": _damaged,
    "an empty file": Path.touch,
    "zeros": _text("\0" * 5000),
    "JSON of something else": _text('{"a": [1, 2]}'),
    "JSON without an end": _text('{"traceEvents": [{"ph": "X"'),
    "deep JSON": _text('{"traceEvents": ' + "[" * 90_000 + "]" * 90_000 + "}"),
    "half of a character": _text('{"\\ud800": "\\udfff"}'),
    "a locked archive": _locked,
    "a pipe": _pipe,
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Inputs that can be used, by the words that stand for them."""
    folder = tmp_path_factory.mktemp("good")
    (folder / "rings").mkdir()
    for rank in range(2):
        write_ring(folder / "rings" / f"{rank}.ucring", rank, 2, 4)
    (folder / "traces").mkdir()
    (trace, *_) = profile_merge.generate(folder / "traces", 2, 40, 0.2)
    notes = folder / "notes.json"
    notes.write_text(json.dumps({"version": 1, "kernels": {"1": [{"unicomm": "all_reduce"}]}}))
    return {"RINGS": str(folder / "rings"), "TRACE": str(trace), "NOTES": str(notes)}


def ran(words: str, tmp_path: Path, good: dict[str, str]) -> Result:
    meant = good | {"BAD": str(tmp_path / "input"), "OUT": str(tmp_path / "output")}
    for word, path in meant.items():
        words = words.replace(word, path)
    return CliRunner().invoke(app, words.split())


@pytest.mark.parametrize("what", UNUSABLE)
@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_that_can_be_used(command, what, tmp_path, good):
    UNUSABLE[what](tmp_path / "input")
    done = ran(COMMANDS[command], tmp_path, good)
    assert done.exception is None or isinstance(done.exception, SystemExit), repr(done.exception)
    assert done.exit_code == 2, done.output
    assert done.stderr.strip()
    assert not done.stdout
    assert not list(tmp_path.glob("output*")), "an output was left"


@pytest.mark.parametrize("command", GOOD)
def test_what_can_be_used(command, tmp_path, good):
    done = ran(command, tmp_path, good)
    assert done.exit_code in GOOD[command], done.output


def test_every_command_that_reads_is_in_the_table():
    """A new command of `unicomm trace` or `unicomm profile` has to be added."""
    from typer.main import get_command

    groups = get_command(app).commands
    reading = {f"{group} {name}" for group in ("trace", "profile") for name in groups[group].commands}
    named = {" ".join(words.split()[:2]) for words in COMMANDS.values()}
    assert reading - named == {"trace selftest"}  # reads nothing
