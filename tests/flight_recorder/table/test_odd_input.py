"""Input that nobody wrote well: odd numbers, damaged and expanding archives. Readers raise nothing."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import math
import struct
import sys
import tarfile
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.commands import clean_environment, run
from tests.flight_recorder.rings import write_ring
from unicomm.flight_recorder.analysis.analyze import analyze
from unicomm.flight_recorder.formats.dump_columns import integer
from unicomm.flight_recorder.reports.report_data import to_json
from unicomm.flight_recorder.reports.report_markdown import to_markdown
from unicomm.flight_recorder.ring.reader import COMM, HEADER, Ring, RingError
from unicomm.flight_recorder.table.load import load
from unicomm.flight_recorder.texts import MOST_RANKS
from unicomm.launch.cli import app
from unicomm.profiler import TraceError, figures

ODD = [
    "--5",
    "\u00b2",
    10**400,
    -(10**400),
    math.inf,
    -math.inf,
    math.nan,
    2**64,
    2**63,
    2**31 - 1,
    -1,
    1e308,
]
ODD += [True, None, "", "\ud800", [], {}, [[[]]], [10**400] * 3]
FIELDS = [
    *("record_id", "pg_id", "process_group", "collective_seq_id", "p2p_seq_id", "op_id", "profiling_name"),
    *("time_created_ns", "time_discovered_started_ns", "time_discovered_completed_ns", "duration_ms"),
    *("input_sizes", "input_dtypes", "output_sizes", "output_dtypes", "state", "timeout_ms", "is_p2p"),
    *("frames", "thread_id", "retired"),
]


def entry(number: int) -> dict[str, object]:
    return {
        "record_id": number,
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "collective_seq_id": number + 1,
        "op_id": number + 1,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": 1000 * (number + 1),
        "time_discovered_started_ns": 1000 * (number + 1) + 10,
        "time_discovered_completed_ns": 1000 * (number + 1) + 20,
        "input_sizes": [[4]],
        "input_dtypes": ["Float"],
        "output_sizes": [[4]],
        "output_dtypes": ["Float"],
        "state": "completed",
        "frames": [{"name": "step", "filename": "train.py", "line": 7}],
    }


def dump(entries: int = 3) -> dict[str, object]:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    return {"version": "2.10", "pg_config": config, "entries": [entry(i) for i in range(entries)]}


def reported(path: Path) -> str:
    """Everything that is made of the input."""
    report = analyze(load([path]))
    try:
        measured = figures.to_json(figures.report([path]))
    except TraceError:
        measured = ""
    return to_json(report) + to_markdown(report, verbose=True) + measured


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: repr(odd)[:12])
def test_odd_values_in_dumps(odd, tmp_path):
    good = dump()
    (tmp_path / "rank1.json").write_text(json.dumps(good))
    path = tmp_path / "rank0.json"
    for field in FIELDS:
        for all_of_them in (False, True):
            data = dump()
            for one in data["entries"] if all_of_them else data["entries"][1:2]:
                one[field] = odd
            path.write_text(json.dumps(data))
            reported(tmp_path)
    status = {f"last_{word}_collective": odd for word in ("enqueued", "started", "completed")}
    for more in (
        {"rank": odd},
        {"global_rank": odd},
        {"pg_status": {"0": status}},
        {"pg_config": {"0": {"name": odd, "desc": odd, "ranks": odd}}},
        {"pg_config": {"0": {"ranks": json.dumps([odd])}}},
        {"pg_config": odd},
        {"entries": odd},
    ):
        path.write_text(json.dumps(dump() | more))
        reported(tmp_path)
    path.write_text(json.dumps({"processes": [{"rank": odd, "host": odd, "pid": odd, "trace": dump()}, odd]}))
    reported(tmp_path)


def test_numbers_of_dumps():
    assert [integer(value) for value in ("--5", "-5", "\u00b2", "7", "9" * 30, math.nan)] == [
        0,
        -5,
        0,
        7,
        0,
        0,
    ]
    assert integer(10**400) == integer(math.inf) == 2**63 - 1


@pytest.mark.parametrize(
    "name", ["send 99999999999999999999->0", "recv 0<-99999999999999999999", "send 0->1"]
)
def test_peers_that_no_job_has(name, tmp_path):
    data = dump()
    data["entries"][1] |= {"profiling_name": f"nccl:{name}", "is_p2p": True, "p2p_seq_id": 1}
    (tmp_path / "rank_of_nobody.json").write_text(json.dumps(data))
    reported(tmp_path)


@pytest.mark.parametrize(
    "dtype", ["Float", "int16777216" + 20 * "0", "int" + 5000 * "9", "int0"], ids=lambda name: name[:8]
)
def test_types_of_more_bits_than_any_has(dtype, tmp_path):
    data = dump()
    data["entries"][1] |= {"input_dtypes": [dtype], "input_sizes": [[2**62]]}
    (tmp_path / "rank0.json").write_text(json.dumps(data))
    assert '"error"' not in reported(tmp_path)
    for elements in (2**61, 2**62, 2**63 - 1):
        data["entries"][1] |= {"input_sizes": [[elements]]}
        (tmp_path / "rank0.json").write_text(json.dumps(data))
        of_sums = next(o for o in figures.report([tmp_path]).operations if o.op == "all_reduce")
        assert of_sums.bytes > 2**44  # as for a size that no operation has, not what is left of it in 64 bits


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: repr(odd)[:12])
def test_odd_values_in_ending_files(odd, tmp_path):
    write_ring(tmp_path / "a.ucring", 0, 2, 3)
    raised = {"type": "E", "message": "m", "frames": [{"file": "f", "line": 3, "function": "g"}]}
    good = {
        "format": 1,
        "rank": 0,
        "pid": 5,
        "host": "h",
        "ended_ns": 7,
        "raised": raised | {"consequence": False},
    }
    path = tmp_path / "a.ending"
    for key in good:
        path.write_text(json.dumps(good | {key: odd}))
        reported(tmp_path)
    for key in (*raised, "consequence"):
        path.write_text(json.dumps(good | {"raised": good["raised"] | {key: odd}}))
        reported(tmp_path)
    for key in ("file", "line", "function"):
        place = {"file": "f", "line": 3, "function": "g"} | {key: odd}
        path.write_text(json.dumps(good | {"exit_call": [place], "exit_argument": odd}))
        reported(tmp_path)
    one = {"pid": 1, "exit_code": 3, "out_of_memory": "", "ended_ns": 5}
    for key in one:
        ranks = {"1": one | {key: odd}}
        (tmp_path / "b.exits").write_text(json.dumps({"format": 1, "host": odd, "ranks": ranks}))
        reported(tmp_path)
    (tmp_path / "b.exits").write_text(json.dumps({"format": 1, "host": "h", "ranks": {str(odd): one}}))
    reported(tmp_path)


@pytest.mark.parametrize("rank", [2**31 - 1, 2**22, -(2**31)])
def test_ranks_that_no_job_has(rank, tmp_path):
    write_ring(tmp_path / "a.ucring", 0, 2, 3)
    write_ring(tmp_path / "b.ucring", 1, 2, 3)
    data = bytearray((tmp_path / "b.ucring").read_bytes())
    for field in ("rank", "world"):
        struct.pack_into("<i", data, HEADER.fields[field][1], rank)
        (tmp_path / "b.ucring").write_bytes(data)
        assert [s.rank for s in load([tmp_path]).sources][:1] == [0]
        reported(tmp_path)
    head = Ring(bytes(data)).header
    place = int(head["comm_off"])
    for field in ("rank", "size"):
        struct.pack_into("<i", data, place + COMM.fields[field][1], rank)
        (tmp_path / "b.ucring").write_bytes(data)
        reported(tmp_path)
    (tmp_path / "c.exits").write_text(
        json.dumps(
            {
                "format": 1,
                "host": "h",
                "ranks": {str(rank): {"pid": 1, "exit_code": 1, "out_of_memory": "", "ended_ns": 1}},
            }
        )
    )
    table = load([tmp_path])
    assert table.endings == []
    assert rank < 0 or any("is no rank of a job" in r.message for r in table.remarks)


def overlapping(count: int, length: int) -> bytes:
    """A ring with `count` communicators, whose names are all the same `length` bytes but for one."""
    head = np.zeros(1, HEADER)
    comms = np.zeros(count, COMM)
    heap = HEADER.itemsize + comms.nbytes
    for field, value in {
        "magic": b"UCRING01",
        "version": 2,
        "comm_off": HEADER.itemsize,
        "comm_cap": count,
        "comm_size": COMM.itemsize,
        "comm_count": count,
        "frame_size": 32,
        "rec_size": 176,
        "heap_off": heap,
        "heap_cap": length,
    }.items():
        head[field] = value
    comms["name"]["off"] = np.arange(count)
    comms["name"]["len"] = length - np.arange(count)
    return head.tobytes() + comms.tobytes() + b"x" * length


def test_overlapping_names_take_no_memory(tmp_path):
    """20 000 names of 1 MB each in a file of 4 MB."""
    with pytest.raises(RingError, match="overlap"):
        Ring(overlapping(20_000, 1 << 20))


def test_groups_of_more_members_than_a_job_has(tmp_path):
    data = dump()
    data["pg_config"] = {str(i): {"name": f"g{i}", "ranks": f"0-{MOST_RANKS - 1 - i}"} for i in range(300)}
    (tmp_path / "rank0.json").write_text(json.dumps(data))
    table = load([tmp_path])
    assert any("more than" in remark.message for remark in table.remarks)
    assert sum(len(group.ranks) for group in table.groups) < 1 << 27


# --- archives ---------------------------------------------------------------------------------------------


def packed(data: bytes, kind: str) -> bytes:
    out = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("rank0.json", data)
    elif kind == "gz":
        out.write(gzip.compress(data))
    else:
        with tarfile.open(fileobj=out, mode="w:gz" if kind == "tgz" else f"w:{kind}") as archive:
            info = tarfile.TarInfo("rank0.json")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


KINDS = ["zip", "gz", "tgz", "bz2", "xz", ""]


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_archives_are_remarks(kind, tmp_path):
    good = packed(json.dumps(dump()).encode(), kind)
    path = tmp_path / "rank0.archive"
    path.write_bytes(good)
    assert not load([path]).empty
    generator = np.random.default_rng(3)
    for step in range(200):
        data = bytearray(good)
        for _ in range(1 + step % 5):
            data[int(generator.integers(4, len(data)))] = int(generator.integers(256))
        path.write_bytes(data[: int(generator.integers(4, len(data)))] if step % 3 == 0 else data)
        reported(tmp_path)


def test_an_encrypted_archive_is_a_remark_and_exit_code_2(tmp_path):
    data = bytearray(packed(json.dumps(dump()).encode(), "zip"))
    for at in (data.index(b"PK\x03\x04") + 6, data.index(b"PK\x01\x02") + 8):
        data[at] |= 1  # the flag for a password
    path = tmp_path / "secret.zip"
    path.write_bytes(data)
    done = CliRunner().invoke(app, ["trace", "analyze", str(path)])
    assert done.exit_code == 2, done.output
    assert "password" in done.output.replace("\n", " ")


def test_one_bad_member_does_not_hide_the_others(tmp_path):
    path = tmp_path / "mixed.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for rank in range(3):
            archive.writestr(f"rank{rank}.json", json.dumps(dump()))
    data = bytearray(path.read_bytes())
    data[data.index(b'"version"') + 2] ^= 1  # the checksum of the first member is wrong
    path.write_bytes(data)
    table = load([path])
    assert [source.rank for source in table.sources] == [1, 2]
    assert any("rank0" in remark.path for remark in table.remarks)


@pytest.mark.parametrize("kind", KINDS)
def test_what_archives_expand_to_is_bounded(kind, tmp_path):
    path = tmp_path / "bomb"
    path.write_bytes(packed(b" " * (64 << 20), kind))
    table = load([path], memory=8 << 20)
    assert table.empty
    assert "allow more by --memory" in table.remarks[0].message
    assert not any("--memory" in remark.message for remark in load([path], memory=65 << 20).remarks)


def test_an_expanding_archive_needs_no_more_memory_than_allowed(tmp_path):
    """Four times 1 GiB of blanks in a zip of some MiB."""
    deflater = zlib.compressobj(9, zlib.DEFLATED, 31)
    piece = b" " * (1 << 24)
    data = b"".join([*(deflater.compress(piece) for _ in range(64)), deflater.flush()])
    path = tmp_path / "bomb.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for rank in range(4):
            archive.writestr(f"rank{rank}.json.gz", data)
    code = (
        "import resource, sys\n"
        "from unicomm.flight_recorder.table.load import load\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"table = load([{str(path)!r}], memory=64 << 20)\n"
        "after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "print(after - before, [r.message for r in table.remarks])\n"
    )
    done = run([sys.executable, "-c", code], 60, clean_environment(), check=True)
    grown, _, remarks = done.stdout.partition(" ")
    assert int(grown) << 10 < 256 << 20
    assert "allow more by --memory" in remarks


def test_archives_in_archives_end(tmp_path):
    data = json.dumps(dump()).encode()
    for _ in range(3):
        data = packed(data, "zip")
    (tmp_path / "good.zip").write_bytes(data)
    assert not load([tmp_path / "good.zip"]).empty
    for _ in range(2000):
        data = packed(data, "")[: 3 << 20] if len(data) < 1 << 20 else packed(bz2.compress(data), "zip")
    (tmp_path / "deep.zip").write_bytes(packed(data, "zip"))
    assert "is in 3 others" in load([tmp_path / "deep.zip"]).remarks[0].message


@pytest.mark.parametrize("command", ["analyze", "show", "diff"])
def test_nothing_that_can_be_used_is_exit_code_2(command, tmp_path):
    (tmp_path / "rank0.json").write_text("[" * 100_000)
    (tmp_path / "rank1.json").write_text("{}")
    (tmp_path / "a.ucring").write_bytes(b"UCRING01" + bytes(30))
    (tmp_path / "b.zip").write_bytes(b"PK\x03\x04" + bytes(100))
    (tmp_path / "c.pickle").write_bytes(b"\x80\x04c" + bytes(100))
    folders = [str(tmp_path)] * (2 if command == "diff" else 1)
    done = CliRunner().invoke(app, ["trace", command, *folders])
    assert done.exit_code == 2, done.output
