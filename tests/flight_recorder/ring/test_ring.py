"""Reading rings: layout, contents, wrap, damage."""

import struct
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import ROOT
from tests.commands import run
from tests.flight_recorder.rings import ALL_REDUCE, RECV, SEND, write_ring
from unicomm import _core
from unicomm.flight_recorder.ring import reader as ring_module
from unicomm.flight_recorder.ring.reader import (
    COMM,
    FRAME,
    HEADER,
    RECORD,
    RingError,
    read_folder,
    read_ring,
)
from unicomm.flight_recorder.texts import format_ranks, parse_ranks


def test_layout_is_that_of_the_core():
    layout = _core.ring_layout()
    assert HEADER.itemsize == layout["header"]
    assert COMM.itemsize == layout["comm"]
    assert FRAME.itemsize == layout["frame"]
    assert RECORD.itemsize == layout["record"]
    tables = {"header": HEADER, "comm": COMM, "frame": FRAME, "record": RECORD}
    for name, offset in layout.items():
        table, _, member = name.partition(".")
        if member:
            assert tables[table].fields[member][1] == offset, name


def test_contents(tmp_path):
    recorder = write_ring(tmp_path / "a.ucring", 1, 4, 3, unfinished=True)
    comm = recorder.add_comm(name="pairs", backend="gloo", uid="u2", ranks="1,3", rank=0, size=2)
    sent = recorder.begin(comm, SEND, 1, 9, [torch.zeros(5, dtype=torch.bfloat16)], [], peer=1, flags=2 | 1)
    recorder.finish(sent, 4, 2)
    here = read_ring(tmp_path / "a.ucring")
    assert (here.rank, int(here.header["world"]), here.host, here.wrapped) == (1, 4, "here", False)
    assert [(c.name, c.backend, c.ranks, c.size) for c in here.comms] == [
        ("main", "shm", [0, 1, 2, 3], 4),
        ("pairs", "gloo", [1, 3], 2),
    ]
    assert here.comms[0].coll_created == 3
    assert here.comms[0].coll_completed == 2
    assert [here.op(r) for r in here.records] == ["all_reduce"] * 3 + ["send"]
    assert [int(r["state"]) for r in here.records] == [3, 3, 2, 4]
    first, last = here.records[0], here.records[-1]
    assert here.shape(first, "in") == [2, 3]
    assert here.dtype(int(first["in_dtype"])) == "float32"
    assert here.reduction(first) == "SUM"
    assert here.dtype(int(last["in_dtype"])) == "bfloat16"
    assert int(last["n_out"]) == 0
    assert int(last["error"]) == 2
    assert int(first["created_ns"]) <= int(first["completed_ns"]) <= int(last["created_ns"])
    frame = here.frame(first)
    assert frame.file.endswith("rings.py")
    assert frame.function.endswith("write_ring")
    assert here.process_state == "running"


def test_call_sites_are_interned_once(tmp_path):
    recorder = write_ring(tmp_path / "a.ucring", 0, 1, 50, records=64)
    for _ in range(5):
        recorder.begin(0, ALL_REDUCE, 51, 0, [], [])
    here = read_ring(tmp_path / "a.ucring")
    assert len({int(r["frame"]) for r in here.records}) == 2
    assert len({here.frame(r).line for r in here.records}) == 2


def test_wrap_keeps_the_newest_and_the_high_marks(tmp_path):
    write_ring(tmp_path / "a.ucring", 0, 1, 1000, records=64)
    here = read_ring(tmp_path / "a.ucring")
    assert here.wrapped
    assert here.total == 1000
    assert [int(s) for s in here.records["seq"]] == list(range(937, 1001))
    assert here.comms[0].coll_completed == 1000


def test_snapshot_equals_the_file(tmp_path):
    recorder = write_ring(tmp_path / "a.ucring", 0, 1, 10)
    assert recorder.snapshot() == (tmp_path / "a.ucring").read_bytes()


def test_memory_only_ring():
    recorder = _core.Recorder("", "{}", -1, 1, 16)
    recorder.begin(recorder.add_comm("c", "shm", "u", "0", 0, 1), ALL_REDUCE, 1, 0, [], [])
    assert len(read_ring(recorder.snapshot()).records) == 1


def test_more_communicators_than_the_table_holds(tmp_path):
    recorder = _core.Recorder(str(tmp_path / "a.ucring"), "{}", 0, 1, 16)
    for i in range(300):
        index = recorder.add_comm(f"c{i}", "shm", f"u{i}", "0", 0, 1)
        recorder.set_comm_state(index, 2, f"u{i}")
    here = read_ring(tmp_path / "a.ucring")
    assert "c299" in [c.name for c in here.comms]


def test_folder_reports_what_it_cannot_read(tmp_path):
    recorder = write_ring(tmp_path / "good.ucring", 0, 1, 3)
    (tmp_path / "empty.ucring").write_bytes(b"")
    (tmp_path / "noise.ucring").write_bytes(b"x" * 5000)
    (tmp_path / "short.ucring").write_bytes((tmp_path / "good.ucring").read_bytes()[:4000])
    (tmp_path / "other.txt").write_text("not a ring")
    rings, findings = read_folder(tmp_path)
    assert [r.rank for r in rings] == [0]
    assert sorted(f.path.rsplit("/", 1)[1] for f in findings) == [
        "empty.ucring",
        "noise.ucring",
        "short.ucring",
    ]
    del recorder


def test_a_newer_version_says_so(tmp_path):
    recorder = write_ring(tmp_path / "a.ucring", 0, 1, 1)
    data = bytearray(recorder.snapshot())
    struct.pack_into("<I", data, 8, 99)
    with pytest.raises(RingError, match="version 99"):
        read_ring(bytes(data))


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    path = tmp_path_factory.mktemp("rings") / "a.ucring"
    return write_ring(path, 0, 2, 80, records=64).snapshot()


@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data())
def test_damage_never_raises_anything_else(valid, data):
    """Random bytes anywhere, mostly in the header and tables, and random truncation."""
    damaged = bytearray(valid)
    for _ in range(data.draw(st.integers(1, 8))):
        limit = data.draw(st.sampled_from([192, 4096, 40000, len(damaged)]))
        at = data.draw(st.integers(0, limit - 1))
        damaged[at] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        damaged = damaged[: data.draw(st.integers(0, len(damaged)))]
    try:
        here = read_ring(bytes(damaged))
    except RingError:
        return
    for record in here.records:
        here.op(record), here.frame(record), here.shape(record, "in"), here.reduction(record)
    for comm in here.comms:
        assert len(comm.ranks) <= 1 << 20
    assert here.process_state in ("running", "stopped", "ended", "killed", "elsewhere")


@given(st.lists(st.integers(0, 60), unique=True, max_size=40))
def test_ranks_text_round_trip(ranks):
    assert parse_ranks(format_ranks(ranks)) == ranks


def test_ranks_text_is_short():
    assert format_ranks(range(100_000)) == "0-99999"
    assert format_ranks([0, 1, 2, 3, 8, 10, 12, 14]) == "0-3,8-14:2"
    assert parse_ranks("0-3,8,10-14:2") == [0, 1, 2, 3, 8, 10, 12, 14]
    assert format_ranks([]) == ""
    assert parse_ranks("") == []


@pytest.mark.parametrize("text", ["a", "3-1", "0-99999999999", "1-5:0", "-4", "1,,2"])
def test_ranks_text_refuses(text):
    with pytest.raises(ValueError, match=r"."):
        parse_ranks(text)


def test_recv_is_told_from_send():
    assert ring_module.RECEIVE == 8
    assert (SEND, RECV) == (1, 2)


def test_a_ring_that_cannot_be_mapped_leaves_no_file(tmp_path):
    program = f"""
import resource
from unicomm import _core
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), resource.RLIM_INFINITY))
try:
    _core.Recorder({str(tmp_path / "a.ucring")!r}, "{{}}", 0, 1, 1 << 16)
except OSError as error:
    print(error)
"""
    ended = run([sys.executable, "-c", program], within=60)
    assert "cannot map the recorder's ring" in ended.stdout, ended.stdout + ended.stderr
    assert not list(tmp_path.iterdir())


def test_texts_of_communicators_that_ended_make_room(tmp_path):
    """However many communicators a job has created, each with a unique id: new ones still have names."""
    recorder = write_ring(tmp_path / "a.ucring", 0, 2, 1)
    for turn in range(20_000):
        comm = recorder.add_comm("again", "gloo", f"{turn:016x}", "0-1", 0, 2)
        recorder.set_comm_state(comm, 2, f"{turn:016x}")  # finalized
        if turn == 300:
            first = int(read_ring(tmp_path / "a.ucring").header["heap_used"])
    recorder.add_comm("last", "shm", "a longer unique id", "0-1", 0, 2)
    here = read_ring(tmp_path / "a.ucring")
    assert int(here.header["strings_dropped"]) == 0
    assert int(here.header["heap_used"]) == first + len("last" + "a longer unique id")
    found = {c.uid for c in here.comms}
    assert len(found) == len(here.comms)  # no two share a text that one of them may replace
    assert "a longer unique id" in found


PROGRAM = """
import sys
from pathlib import Path
from tests.flight_recorder.rings import write_ring
recorder = write_ring(Path(sys.argv[1]), 0, 2, 3)
print("ready", flush=True)
sys.stdin.readline()
recorder.close(sys.argv[2] == "removed")
"""


@pytest.mark.parametrize(
    ("end", "state"), [("kept", "ended"), ("removed", "ended"), ("replaced", "killed"), ("killed", "killed")]
)
def test_a_process_that_ends_after_its_ring_was_read(tmp_path, end, state):
    path = tmp_path / "a.ucring"
    command = [sys.executable, "-c", PROGRAM, path, end]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as process:
        assert process.stdout.readline() == "ready\n"
        ring, copy = read_ring(path), read_ring(path.read_bytes())
        if end in ("killed", "replaced"):
            process.kill()
        process.communicate("\n", timeout=60)
    if end == "replaced":
        path.unlink()
        write_ring(path, 0, 2, 3).close(False)
    assert ring.process_state == state
    assert copy.process_state == "killed"  # which nothing contradicts
