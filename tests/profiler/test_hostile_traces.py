"""Traces that nobody wrote well: odd numbers, deep and expanding files. They are read, or a `TraceError`."""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import profile_merge as generator
from tests.flight_recorder.rings import write_ring
from tests.fuzz.limits import measured_memory
from unicomm.flight_recorder.texts import printable
from unicomm.launch.cli import app
from unicomm.profiler import TraceError, annotate, chrome, merge, read_events, report
from unicomm.profiler.figures import to_json
from unicomm.profiler.trace_table import KEY

ODD: list[Any] = ["--5", "", "9" * 30, "\x1b[2J", 10**400, -(10**400), math.inf, math.nan, 1e308, 1.5]
ODD += [2**63 - 1, -(2**63), 2**64, 2**31, 1 << 18, -1, True, None, [], {}, [[[]]]]
#: Columns that get an odd value in all rows, too: what is compared between ranks.
EVERYWHERE = ("seq_num", "issued_ns", "started_ns", "completed_ns", "bytes")
#: JSON that Python does not write, by name.
RAW = {
    "deep": "[" * 100_000 + "]" * 100_000,
    "large": "1e999999999",
    "long": "9" * 100_000,
    "half": '"\\ud800"',
}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return generator.generate(tmp_path_factory.mktemp("job"), 2, 40, 0.2)


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("notes") / "notes.json"
    path.write_text('{"version": 1, "kernels": {"5": [{"unicomm": "all_reduce"}]}}')
    return path


def read_by_all(paths: list[Path], notes: Path, memory: int | None = None) -> list[TraceError]:
    """Reads traces by all that reads them. Returns the errors, and fails for one of another kind."""
    folder, errors = paths[0].parent, []
    for read in (
        lambda: read_events(paths[0], memory=memory),
        lambda: merge(paths, folder / "merged.json", memory=memory),
        lambda: merge(paths, folder / "merged.pftrace", memory=memory),
        lambda: to_json(report(paths, memory=memory)),
        lambda: annotate(paths[0], notes, folder / "merged.json", memory=memory),
    ):
        try:
            read()
        except TraceError as error:
            errors.append(error)
    return errors


def changed(job: list[Path], tmp_path: Path, change) -> list[Path]:
    trace = json.loads(job[0].read_text())
    change(trace)
    text = json.dumps(trace)
    for name, raw in RAW.items():
        text = text.replace(f'"@{name}"', raw)
    (tmp_path / "rank0.json").write_text(text)
    return [tmp_path / "rank0.json", job[1]]


@pytest.mark.parametrize("odd", [*ODD, *(f"@{name}" for name in RAW)], ids=lambda odd: repr(odd)[:12])
def test_odd_values_in_traces(odd, job, notes, tmp_path):
    def in_row(column):
        def change(trace):
            trace[KEY]["rows"][3][column] = odd

        return change

    def everywhere(column):
        def change(trace):
            for row in trace[KEY]["rows"]:
                row[column] = odd

        return change

    def in_table(key):
        return lambda trace: trace[KEY].update({key: odd})

    def in_group(key):
        return lambda trace: trace[KEY]["groups"][0].update({key: odd})

    def in_event(key):
        return lambda trace: trace["traceEvents"][7].update({key: odd})

    def in_kernel(key):
        kernel = {"ph": "X", "cat": "kernel", "name": "k", "ts": 8, "dur": 3, "pid": 0, "tid": 7, key: odd}
        return lambda trace: trace["traceEvents"].append(kernel)

    def in_file(key):
        return lambda trace: trace.update({key: odd})

    columns = range(len(generator.COLUMNS))
    changes = [*map(in_row, columns), *(everywhere(generator.COLUMNS.index(name)) for name in EVERYWHERE)]
    changes += [in_table(key) for key in json.loads(job[0].read_text())[KEY]]
    changes += [
        in_group(key) for key in ("uid", "name", "description", "group_name", "backend", "ranks", "rank")
    ]
    changes += [
        make(key)
        for make in (in_event, in_kernel)
        for key in ("ph", "name", "cat", "pid", "tid", "ts", "dur", "args", "id")
    ]
    changes += [in_file(key) for key in (KEY, "baseTimeNanoseconds", "traceEvents", "schemaVersion")]
    for change in changes:
        read_by_all(changed(job, tmp_path, change), notes)


@pytest.mark.parametrize("odd", [*ODD, *(f"@{name}" for name in RAW)], ids=lambda odd: repr(odd)[:12])
def test_odd_values_in_annotations(odd, job, tmp_path):
    for data in (
        odd,
        {"version": odd, "kernels": {}},
        {"version": 1, "kernels": odd},
        {"version": 1, "kernels": {str(odd): []}},
        {"version": 1, "kernels": {"5": odd}},
        {"version": 1, "kernels": {"5": [odd]}},
        {"version": 1, "kernels": {"5": [{"unicomm": odd}]}},
    ):
        text = json.dumps(data)
        for name, raw in RAW.items():
            text = text.replace(f'"@{name}"', raw)
        (tmp_path / "notes.json").write_text(text)
        with contextlib.suppress(TraceError):
            annotate(job[0], tmp_path / "notes.json", tmp_path / "out.json")


def texts(value: Any) -> Iterator[str]:
    """All texts in what JSON holds."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in value.items() if isinstance(value, dict) else value:
            yield from texts(list(one) if isinstance(one, tuple) else one)


def test_names_control_no_terminal(job, tmp_path):
    """Neither in texts nor in JSON, whose readers print what they decode."""
    hostile = "\u202eecuder_lla\x1b[2J\n"

    def change(trace):
        trace[KEY]["host"] = hostile
        trace[KEY]["groups"][0] |= {"name": hostile, "description": hostile}
        for row in trace[KEY]["rows"]:
            row[generator.COLUMNS.index("op")] = hostile

    found = list(texts(json.loads(to_json(report(changed(job, tmp_path, change))))))
    assert any("ecuder_lla" in text for text in found)
    assert [text for text in found if text != printable(text)] == []


def test_a_deep_trace_is_said(job, notes, tmp_path):
    (tmp_path / "a.json").write_text('{"traceEvents": [{"args": ' + RAW["deep"] + "}]}")
    errors = read_by_all([tmp_path / "a.json"], notes)
    assert len(errors) == 5
    assert all("a.json" in str(error) for error in errors)


def test_a_trace_of_many_lists_of_events_is_not_tried_for_ever(notes, tmp_path, monkeypatch):
    """Each try to find the events reads the file up to there: 200 000 tries would take hours."""
    (tmp_path / "a.json").write_text('{"a": [' + '{"traceEvents":[]},' * 200_000 + "{}]}")
    tries: list[int] = []
    real = chrome._parts.decode
    counting = type("Counting", (), {"decode": lambda _, text: tries.append(len(text)) or real(text)})
    monkeypatch.setattr(chrome, "_parts", counting())
    errors = read_by_all([tmp_path / "a.json"], notes)
    assert len(errors) == 5
    assert "it has no list 'traceEvents' that is not in another one" in str(errors[0])
    assert len(tries) <= 6 * 64


# --- memory ------------------------------------------------------------------------------------------------


def expanding(begin: bytes, piece: bytes, times: int, end: bytes) -> bytes:
    deflater = zlib.compressobj(9, zlib.DEFLATED, 31)
    return b"".join(
        [deflater.compress(begin), *(deflater.compress(piece) for _ in range(times)), deflater.flush()]
    )


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b'{"a": "', b" " * (1 << 20)),
        (b'{"unicomm": [', b"[]," * (1 << 19)),
        (b'{"traceEvents": [{"args": "', b" " * (1 << 20)),
        (b" ", b" " * (1 << 20)),
    ],
    ids=["a text", "lists", "an event", "blanks"],
)
def test_what_traces_expand_to_is_bounded(begin, piece, notes, tmp_path):
    """640 MiB and more in some hundred kB, of which no reader reads more than a part."""
    path = tmp_path / "a.json.gz"
    path.write_bytes(expanding(begin, piece, 640, b""))
    assert path.stat().st_size < 4 << 20
    read = []
    real = chrome.Reader._more

    def counted(self: chrome.Reader) -> bool:
        more = real(self)
        read.append(len(self._buffer))
        return more

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chrome.Reader, "_more", counted)
        errors = read_by_all([path], notes, memory=16 << 20)
    assert len(errors) == 5
    assert max(read) < 96 << 20


def test_the_tables_of_all_traces_are_counted(job, notes):
    errors = read_by_all(job, notes, memory=1 << 10)
    assert len(errors) == 5
    assert all("allow more by --memory" in str(error) for error in errors)
    assert read_by_all(job, notes, memory=1 << 26) == []


def test_groups_of_too_many_members_take_no_memory(job, notes, tmp_path):
    def more(trace):
        group = {**trace[KEY]["groups"][0], "ranks": "0-262142"}
        trace[KEY]["groups"] += [group] * 300

    paths = changed(job, tmp_path, more)
    grown = measured_memory()
    errors = read_by_all(paths, notes)
    assert grown() < 256 << 20
    assert errors
    assert all("more members than a job can have" in str(error) for error in errors)


def test_events_that_are_kept_are_counted(job, notes, tmp_path):
    """A million kernels in a compressed trace of some kB."""
    kernel = b'{"ph":"X","cat":"kernel","name":"k","ts":8,"dur":3,"pid":0,"tid":7},'
    head = job[0].read_bytes()
    begin = head[: head.index(b'"traceEvents": [') + len(b'"traceEvents": [')]
    data = b"".join([begin, kernel * 300_000, kernel[:-1], b"]}"])
    path = tmp_path / "rank0.json.gz"
    path.write_bytes(gzip.compress(data, 6))
    for read in (lambda m: report([path], memory=m), lambda m: read_events(path, memory=m)):
        with pytest.raises(TraceError, match="allow more by --memory"):
            read(16 << 20)
        read(1 << 30)


@pytest.mark.parametrize("bare", [False, True])
def test_long_events_are_counted_before_they_are_decoded(bare, notes, tmp_path):
    """An event with 16 million lists, which would take more than 1 GiB; nothing ends in the blocks before."""
    path = tmp_path / "a.json.gz"
    begin = b"[" if bare else b'{"traceEvents": ['
    path.write_bytes(
        gzip.compress(begin + b'{"args": [' + b"[]," * (1 << 24) + b"[]]}]" + b"}" * (not bare), 1)
    )
    grown = measured_memory()
    errors = read_by_all([path], notes, memory=16 << 20)
    assert grown() < 512 << 20
    assert len(errors) == 5
    assert all("allow more by --memory" in str(error) for error in errors)


def test_the_option_reaches_archives(tmp_path):
    folder = tmp_path / "rings"
    folder.mkdir()
    write_ring(folder / "a.ucring", 0, 1, 3)
    data = gzip.compress((folder / "a.ucring").read_bytes())
    (tmp_path / "job.gz").write_bytes(data)
    for command in ("profile report", "trace export", "trace analyze"):
        words = [*command.split(), str(tmp_path / "job.gz"), "--memory"]
        assert CliRunner().invoke(app, [*words, "1"]).exit_code in (0, 1)
        done = CliRunner().invoke(app, [*words, "0.000001"])
        assert done.exit_code == 2
        assert "--memory" in done.stderr.replace("\n", " ")


def test_a_pipe_is_not_waited_for(notes, tmp_path):
    os.mkfifo(tmp_path / "a.json")
    errors = read_by_all([tmp_path / "a.json"], notes)
    assert errors
    assert all("FIFO" in str(error) for error in errors)
