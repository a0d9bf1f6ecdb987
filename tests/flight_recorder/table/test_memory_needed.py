"""A few bytes that stand for many: readers need no more memory than allowed, and say which file needs more.

Each input is read by a command in a process of its own, whose memory is measured at its peak.
"""

from __future__ import annotations

import gzip
import io
import json
import pickle
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.commands import clean_environment, run
from tests.flight_recorder.rings import write_ring
from tests.flight_recorder.table.test_odd_input import dump, entry
from unicomm.flight_recorder.memory import Memory, TooMuchMemoryError, needed_by_json
from unicomm.flight_recorder.ring.reader import HEADER
from unicomm.flight_recorder.table.load import load
from unicomm.flight_recorder.texts import MOST_RANKS

ALLOWED = 64 << 20
BESIDE = 128 << 20  # what a process needs anyway; docs/trace/reading.md allows 256 MiB
MIB = 1 << 20

# The first time imports what every later one needs.
COMMAND = """
import sys
from tests.fuzz.limits import measured_memory
from tests.fuzz.targets import command
good, path, memory, *words = sys.argv[1:]
command("trace", *words, good)
grown = measured_memory()
code, out, errors = command("trace", *words, path, "--memory", memory)
print(code, grown(), errors.replace("\\n", " "))
"""


def analyzed(path: Path, memory: int, *command: str) -> tuple[int, int, str]:
    """Runs a command of `unicomm trace`; returns its exit code, the memory that it took, and stderr.

    `command`: its name and options, by default `analyze`.
    """
    good = path.with_name("good")
    good.mkdir()
    write_ring(good / "a.ucring", 0, 2, 3)
    (good / "b.json").write_text(json.dumps(dump() | {"rank": 1}))
    words = [sys.executable, "-c", COMMAND, good, path, memory / (1 << 30), *(command or ("analyze",))]
    done = run(words, 60, clean_environment(), check=True)
    code, grown, errors = done.stdout.split(" ", 2)
    return int(code), int(grown), errors


def zipped(name: str, data: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, data)
    return out.getvalue()


def in_list(value: bytes, count: int, key: bytes = b"pg_config") -> bytes:
    """JSON of a dump in which a value stands many times in a list."""
    return b'{"%s": [' % key + (value + b",") * count + value + b"]}"


def pickled(opcodes: bytes, key: bytes = b"pg_config") -> bytes:
    """A pickle of a dump, `opcodes` of which make the items of a list."""
    return b"\x80\x04}X" + len(key).to_bytes(4, "little") + key + b"](" + opcodes + b"es."


def pickled_text(text: bytes) -> bytes:
    return b"X" + len(text).to_bytes(4, "little") + text


def with_ranks() -> bytes:
    """A dump of groups with as many ranks as a job can have."""
    groups = {str(i): {"name": str(i), "ranks": f"0-{MOST_RANKS - 1 - i}"} for i in range(40)}
    return json.dumps(dump() | {"pg_config": groups}).encode()


def long_header() -> bytes:
    """A tar of some MB, with an extended header of 400 MiB."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz", compresslevel=1, format=tarfile.PAX_FORMAT) as archive:
        info = tarfile.TarInfo("rank0.json")
        info.pax_headers = {"comment": "x" * (400 * MIB)}
        archive.addfile(info)
    return out.getvalue()


INPUTS: dict[str, Callable[[], bytes]] = {
    "lists.zip": lambda: zipped("rank0.json", in_list(b"[]", 16 * MIB)),
    "header.tar.gz": long_header,
    "lists.json": lambda: in_list(b"[]", 5 * MIB),
    "entries.json": lambda: in_list(b"{}", 3 * MIB, b"entries"),
    "texts.json": lambda: b'{"pg_config": [' + b",".join(b'"%x"' % i for i in range(5 * MIB)) + b"]}",
    "wide.json": lambda: b'{"pg_config": "' + b"a" * (60 * MIB) + "\U0001f600".encode() + b'"}',
    "dumps.json": lambda: b"[" + b'{"entries":[]},' * 200_000 + b'{"entries":[]}]',
    "ranks.json": with_ranks,
    "entries.pickle": lambda: pickled(b"}" * (2 * MIB), b"entries"),
    "lists.pickle": lambda: pickled(b"]" * (4 * MIB)),
    "nothing.pickle": lambda: pickled(b"N" * (24 * MIB)),
    "a text.pickle": lambda: pickled(pickled_text(b"a" * MIB) + b"q\0" + b"h\0" * 512),
    "an element type.pickle": lambda: pickled(
        b"}"
        + pickled_text(b"input_dtypes")
        + b"]("
        + pickled_text(b"a" * MIB)
        + b"q\0"
        + b"h\0" * 512
        + b"es",
        b"entries",
    ),
    "ranks.pickle": lambda: pickle.dumps(json.loads(with_ranks())),
    "exits.exits": lambda: in_list(b"[]", 5 * MIB, b"ranks"),
}


@pytest.mark.parametrize("name", INPUTS)
def test_what_needs_much_memory_is_left_out(name, tmp_path):
    folder = tmp_path / "input"
    folder.mkdir()
    (folder / f"rank0 {name}").write_bytes(INPUTS[name]())
    code, grown, errors = analyzed(folder, ALLOWED)
    assert grown < ALLOWED + BESIDE
    assert code == 2
    assert name in errors
    assert "allow more by --memory" in errors


COMMANDS = [("analyze",), ("show",), ("show", "--json"), ("top", "--once")]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("kind", ["holes", "members"])
def test_a_ring_is_left_out(kind, command, tmp_path):
    """A file of 1 GiB that takes a MiB on disk, and one with lists of 16 million ranks."""
    folder = tmp_path / "input"
    folder.mkdir()
    recorder = write_ring(folder / "a.ucring", 0, 2, 3)
    if kind == "members":
        for i in range(60):
            last = MOST_RANKS - 1 - i
            recorder.add_comm("c", "shm", f"uid{i}", ranks=f"0-{last}", rank=5, size=last + 1)
    else:
        with (folder / "a.ucring").open("r+b") as file:
            file.truncate(1 << 30)
    code, grown, errors = analyzed(folder, ALLOWED, *command)
    assert grown < ALLOWED + BESIDE
    assert code == 2
    assert "a.ucring" in errors
    assert "allow more by --memory" in errors


@pytest.mark.parametrize(("option", "expected"), [("--json", 2), ("--last=0", 2), ("--last=1000", 0)])
def test_too_many_records_are_not_shown(option, expected, tmp_path):
    folder = tmp_path / "input"
    folder.mkdir()
    for rank in range(4):
        write_ring(folder / f"{rank}.ucring", rank, 4, 5000, 5000)
    code, grown, errors = analyzed(folder, ALLOWED, "show", option)
    assert (code, grown < ALLOWED) == (expected, True)
    assert ("or show fewer by --last" in errors) == (expected == 2)


def test_many_files_together_are_bounded(tmp_path):
    """Of 100 dumps with 20 000 entries each those are left out for which nothing is left."""
    folder = tmp_path / "input"
    folder.mkdir()
    for rank in range(100):
        (folder / f"rank{rank}.pickle").write_bytes(pickled(b"}" * 20_000, b"entries"))
    code, grown, _ = analyzed(folder, ALLOWED)
    assert grown < ALLOWED + BESIDE
    assert code == 0
    table = load([folder], memory=ALLOWED)
    assert 4 <= len(table.sources) <= ALLOWED // (20_000 * 100)
    assert len(table.sources) + len(table.remarks) == 100
    assert all("allow more by --memory" in remark.message for remark in table.remarks)


def test_what_is_left_out_does_not_depend_on_threads(tmp_path):
    for rank in range(40):
        (tmp_path / f"rank{rank}.pickle").write_bytes(pickled(b"}" * (1000 * (1 + rank % 7)), b"entries"))
    read = [[source.rank for source in load([tmp_path], memory=16 << 20).sources] for _ in range(5)]
    assert read == read[:1] * 5
    assert 0 < len(read[0]) < 40


@pytest.mark.parametrize("name", ["lists.json", "entries.pickle", "ranks.json"])
def test_it_is_read_when_more_is_allowed(name, tmp_path):
    path = tmp_path / f"rank0 {name}"
    path.write_bytes(INPUTS[name]())
    remarks = load([path], memory=1 << 34).remarks
    assert not any("--memory" in remark.message for remark in remarks)


def test_dumps_of_100000_ranks_are_read(tmp_path):
    """With all groups of three dimensions, by 256 MiB: as JSON, as pickles, and in an archive."""
    ranks = 100_000
    kept = []
    for rank in range(0, ranks, ranks // 8):
        lists = (range(ranks), range(rank // 8 * 8, rank // 8 * 8 + 8), range(rank % 8, ranks, 8))
        config = {str(i): {"name": str(i), "ranks": json.dumps(list(of))} for i, of in enumerate(lists)}
        data = dump(0) | {"pg_config": config, "entries": [entry(i) for i in range(500)]}
        packed = json.dumps(data).encode() if rank % 3 else pickle.dumps(data)
        kept.append((f"rank_{rank}", packed))
    folder = tmp_path / "input"
    folder.mkdir()
    for name, data in kept[:4]:
        (folder / name).write_bytes(data)
    with zipfile.ZipFile(folder / "rest.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in kept[4:]:
            archive.writestr(name, data)
    table = load([folder], memory=256 << 20)
    assert [source.rank for source in table.sources] == list(range(0, ranks, ranks // 8))
    assert table.remarks == []


# --- the estimate ------------------------------------------------------------------------------------------

MEASURE = """
import json, sys
from tests.fuzz.limits import measured_memory
from unicomm.flight_recorder.formats.dump_columns import from_dump
text = open(sys.argv[1], "rb").read()
grown = measured_memory()
columns = from_dump(json.loads(text))
print(grown())
"""
COUNT = 300_000
JSONS: dict[str, Callable[[int], bytes]] = {
    "empty list": lambda i: b"[]",
    "list": lambda i: b"[%d]" % (i + 1000),
    "empty object": lambda i: b"{}",
    "object": lambda i: b'{"":%d}' % (i + 1000),
    "number": lambda i: b"%d" % (i + 1000),
    "float": lambda i: b"1e%d" % (i % 300),
    "text": lambda i: b'"%d"' % i,
    "wide text": lambda i: b'"%d\xc4\x80"' % i,
    "escaped text": lambda i: b'"%dabcdefghijklm\\ud83d\\ude00"' % i,
    "nested": lambda i: b'[[[{"a":[]}]]]',
}


@pytest.mark.parametrize("kind", [*JSONS, "entries", "keys"])
def test_json_needs_no_more_than_estimated(kind, tmp_path):
    path = tmp_path / "a.json"
    if kind == "entries":
        items = [b'{"input_sizes":[[%d]],"profiling_name":"%d"}' % (i, i) for i in range(COUNT // 3)]
        path.write_bytes(b'{"entries":[' + b",".join(items) + b"]}")
    elif kind == "keys":
        path.write_bytes(b'{"pg_config":{' + b",".join(b'"%d":0' % i for i in range(COUNT)) + b"}}")
    else:
        path.write_bytes(b'{"pg_config":[' + b",".join(map(JSONS[kind], range(COUNT))) + b"]}")
    done = run([sys.executable, "-c", MEASURE, path], 60, clean_environment(), check=True)
    assert 4 * MIB < int(done.stdout) < needed_by_json(path.read_bytes()) + 4 * MIB


def test_memory_is_counted():
    memory = Memory(100)
    memory.take(60)
    memory.check(40)
    for size, use in ((41, memory.take), (41, memory.check)):
        with pytest.raises(TooMuchMemoryError, match=r"^a\.json needs more than .* allow more by --memory$"):
            use(size, "a.json")
    memory.give_back(60)
    memory.take(100)
    assert (memory.allowed, memory.left) == (100, 0)


def test_a_zip_with_a_directory_of_a_million_members_is_left_out(tmp_path):
    """Python's reader would make an object for each, before it says how many they are."""
    one = zipped("a", b"")
    at = one.index(b"PK\x01\x02")
    end = one.index(b"PK\x05\x06")
    size = (end - at) * MIB
    path = tmp_path / "rank0.zip"
    tail = one[end : end + 12] + size.to_bytes(4, "little") + one[end + 16 :]
    path.write_bytes(one[:at] + one[at:end] * MIB + tail)
    code, grown, errors = analyzed(path, ALLOWED)
    assert grown < ALLOWED + BESIDE
    assert code == 2
    assert "allow more by --memory" in errors


def test_a_compressed_ring_counts_once(tmp_path):
    """What is unpacked is not counted again when it is read."""
    write_ring(tmp_path / "a.ucring", 0, 1, 3)
    data = (tmp_path / "a.ucring").read_bytes()
    assert len(data) > HEADER.itemsize
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(data))
    assert not load([path], memory=16 * len(data)).empty
