"""Readers keep their promises for a minute of inputs that a fuzzer makes, and for all that once broke one."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import pickle
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from tests.fuzz import mutations
from tests.fuzz.conductor import CORPUS, fuzz, keep, make_seeds
from tests.fuzz.limits import BrokenPromiseError, check_text, limited, strict_json
from tests.fuzz.minimise import minimise, outcome
from tests.fuzz.targets import PLANTED, TARGETS, Room, Target, _PlantedError, signature
from unicomm.flight_recorder.formats.pickles import read as read_pickle
from unicomm.flight_recorder.ring.reader import Ring
from unicomm.flight_recorder.table.load import load

SECONDS = float(os.environ.get("UNICOMM_FUZZ_SECONDS", "7"))  # of fuzzing for each target
# The same in each run: else chance would fail runs for what they have not changed. `make fuzz` tries others.
SEED = 18
needs_atheris = pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None,
    reason="atheris has no wheel for this machine (x86-64, Python 3.10 to 3.14): pip install atheris",
)


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeds(tmp_path_factory.mktemp("fuzz") / "seeds")


@pytest.fixture
def room(seeds: Path) -> Iterator[Room]:
    with Room(seeds) as room:
        yield room


@needs_atheris
@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.skipif(not SECONDS, reason="UNICOMM_FUZZ_SECONDS=0 asks for none")
def test_readers_keep_their_promises(target, seeds, tmp_path):
    run = fuzz(target, seeds, tmp_path, SECONDS, SEED)
    assert not run.ended, run.ended
    assert run.inputs >= len(list((seeds / target).iterdir()))
    assert run.coverage > 0, "atheris sees no branch of the readers: it finds only what chance finds"
    said = "".join(
        path.with_suffix(".txt").read_text() for path in run.found if path.with_suffix(".txt").exists()
    )
    assert not run.found, f"{said}\nmake fuzz TARGET={target} finds and keeps it; the inputs: {run.found}"


@pytest.mark.parametrize(
    "path", sorted(CORPUS.glob("*/*")), ids=lambda path: f"{path.parent.name}-{path.name}"
)
def test_what_once_broke_a_promise(path, room):
    target = TARGETS[path.parent.name]
    with limited():
        target(room, path.read_bytes(), every=True)


@pytest.mark.parametrize("target", TARGETS)
def test_the_seeds_are_sound(target, seeds, room):
    """Else the fuzzer would change inputs that are refused at once."""
    paths = sorted((seeds / target).iterdir())
    assert len(paths) >= 7
    for path in paths[:: max(1, len(paths) // 7)]:
        with limited():
            TARGETS[target](room, path.read_bytes())
        if target in ("rings", "dumps", "archives", "pickles"):
            assert len(load([path])), path


# --- the fuzzer itself -------------------------------------------------------------------------------------


@needs_atheris
@pytest.mark.processes
@pytest.mark.timeout(600)
def test_a_reader_with_a_defect_is_found_and_its_input_minimised(seeds, tmp_path, room, monkeypatch):
    """The defect that is planted needs a value in a JSON tree that no seed has."""
    monkeypatch.setenv(PLANTED, "1")
    run = fuzz("dumps", seeds, tmp_path, 300.0, seed=1, more=["-runs=2000"], planted=True)
    assert [path.name.startswith("dumps-") for path in run.found] == [True], run.ended
    assert "_PlantedError" in run.found[0].with_suffix(".txt").read_text()
    (line,) = keep(run, room, tmp_path / "corpus")
    (kept,) = (tmp_path / "corpus" / "dumps").iterdir()
    assert "_PlantedError" in line
    assert len(kept.read_bytes()) < len(run.found[0].read_bytes()) // 4
    with pytest.raises(_PlantedError):
        TARGETS["dumps"](room, kept.read_bytes(), every=True)


def _odd(room: Room, data: bytes, one: int | None) -> None:
    if b"!" in data and b"?" in data:
        raise KeyError("both")


def _endless(room: Room, data: bytes, one: int | None) -> None:
    if b"!" in data:
        import ctypes

        ctypes.string_at(0)


def test_an_input_is_minimised(room):
    data = bytes(range(256)) * 3
    target = Target(_odd, mutations.mutate_json)
    assert outcome(target, room, data) == "KeyError  in the output"
    assert sorted(minimise(target, room, data)[0]) == sorted(b"!?")
    tree = json.dumps({"a": [1, {"b": "!"}, [2] * 9], "c": {"d": "?"}, "e": 5}).encode()
    assert len(minimise(target, room, tree)[0]) <= 4
    assert minimise(target, room, b"good") == (b"good", "")


def test_a_crash_of_native_code_is_minimised(room):
    target = Target(_endless, mutations.mutate_json)
    assert minimise(target, room, b"x" * 50 + b"!" + b"y" * 50) == (b"!", "killed by SIGSEGV")


@pytest.mark.parametrize("text", ["\x1b[2J", "\x9b", "a\rb", "\u202e", "\ud800", "Unable to allocate 16 GiB"])
def test_what_output_may_not_contain(text):
    check_text("lines\nof text \u20ac")
    with pytest.raises(BrokenPromiseError):
        check_text(text)
    with pytest.raises(BrokenPromiseError):
        strict_json(json.dumps({"a": [text]}))


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", "{", ""])
def test_json_that_others_refuse(text):
    with pytest.raises(BrokenPromiseError):
        strict_json(text)


def test_memory_is_limited():
    with limited():
        small = bytearray(1 << 20)
    del small
    with pytest.raises(BrokenPromiseError, match="memory"), limited():
        large = bytearray(b"\1") * (1 << 30)
    del large


def test_changed_inputs_keep_their_format(seeds):
    """Most of them: else the fuzzer would see no more than the checks at the beginning of a reader."""
    rng = Random(3)
    good = dict.fromkeys(("rings", "dumps", "pickles", "archives"), 0)
    for target in good:
        data = sorted((seeds / target).iterdir())[0].read_bytes()
        for _ in range(100):
            made = TARGETS[target].mutate(data, rng)
            try:
                _parse(target, made)
            except Exception:
                continue
            good[target] += 1
    assert min(good.values()) >= 30, good


def _parse(target: str, data: bytes) -> None:
    if target == "rings":
        Ring(data)
    elif target == "dumps":
        json.loads(data)
    elif target == "pickles":
        read_pickle(data)
    elif data.startswith(b"PK"):
        assert zipfile.ZipFile(io.BytesIO(data)).testzip() is None
    else:
        tarfile.open(fileobj=io.BytesIO(data)).close()


def test_changed_pickles_are_never_run():
    evil = pickle.dumps(signature)
    assert TARGETS["pickles"].mutate(evil, Random(1))  # by opcodes, or as it is
