"""The native reader of pickled dumps against Python's own unpickler, and against what is no dump."""

import dataclasses
import io
import math
import pickle
import pickletools
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rings import RECV, SEND, write_ring

from unicomm.flight_recorder.formats import torch_dump as formats
from unicomm.flight_recorder.formats.dump_columns import DumpError, from_dump
from unicomm.flight_recorder.formats.pickles import read
from unicomm.flight_recorder.ring.reader import read_ring


class PlainUnpickler(pickle.Unpickler):
    """The reference: Python's unpickler, which is allowed no classes."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"{module}.{name}")


def reference(data):
    return from_dump(PlainUnpickler(io.BytesIO(data)).load())


POINTS_TO = {
    "group": "groups",
    "profiling_name": "profiling_names",
    "input_sizes": "sizes",
    "output_sizes": "sizes",
    "input_dtypes": "dtypes",
    "output_dtypes": "dtypes",
    "state": "states",
    "frames": "stacks",
    "thread": "threads",
}


def plain(columns):
    """Columns without their numbering: what each entry says."""
    out = {"meta": columns.meta}
    for member in dataclasses.fields(columns):
        value = getattr(columns, member.name)
        if member.name in POINTS_TO:
            out[member.name] = [getattr(columns, POINTS_TO[member.name])[i] for i in value]
        elif isinstance(value, np.ndarray):
            out[member.name] = [
                "nan" if isinstance(v, float) and math.isnan(v) else v for v in value.tolist()
            ]
    out["extra"] = {name: column.tolist() for name, column in columns.extra.items()}
    return out


def check(data):
    ours, theirs = read(data), reference(data)
    assert plain(ours) == plain(theirs)
    for member in dataclasses.fields(ours):
        a, b = getattr(ours, member.name), getattr(theirs, member.name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype, member.name
    for name in set(POINTS_TO.values()):
        table = getattr(ours, name)
        assert len(set(table)) == len(table), name
    return ours


texts = st.text(max_size=8) | st.sampled_from(["all_reduce", "/a/ü.py", "\ud800", "𝄞", "a\\u0041\n\x00\x1a"])
numbers = st.integers(-(2**63), 2**63 - 1) | st.integers(0, 300) | st.integers(-(2**80), 2**80)
floats = st.floats(allow_nan=False) | st.just(math.nan)
shapes = st.lists(st.lists(st.integers(0, 2**40), max_size=5), max_size=4)
frames = st.lists(
    st.fixed_dictionaries({}, optional={"name": texts, "filename": texts, "line": numbers}), max_size=4
)
odd = st.none() | st.booleans() | floats | st.binary(max_size=4) | st.just([]) | st.just({}) | st.just(())
FIELDS = {
    **dict.fromkeys(
        ["record_id", "pg_id", "collective_seq_id", "p2p_seq_id", "op_id", "timeout_ms", "time_created_ns"],
        numbers | odd | st.sampled_from(["17", "-3", "x", ""]),
    ),
    **dict.fromkeys(["time_discovered_started_ns", "time_discovered_completed_ns"], numbers | st.none()),
    **dict.fromkeys(["retired", "is_p2p", "unicomm_async"], st.booleans() | odd | texts | numbers),
    "unicomm_graph": numbers | odd,
    **dict.fromkeys(["profiling_name", "state", "thread_id"], texts | st.none() | st.integers(-9, 9)),
    "process_group": st.tuples(texts, texts) | st.lists(texts, max_size=3) | texts | odd,
    "duration_ms": floats | st.integers(0, 9) | odd,
    **dict.fromkeys(["input_sizes", "output_sizes"], shapes | st.lists(st.integers(0, 9)) | odd),
    **dict.fromkeys(["input_dtypes", "output_dtypes"], st.lists(texts, max_size=3) | texts | odd),
    "frames": frames | odd,
    "something_new": st.recursive(texts | numbers | odd, lambda inner: st.lists(inner, max_size=3)),
}
meta = st.recursive(
    texts | numbers | odd | st.just(True),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner, inner, inner)
        | st.dictionaries(texts | st.integers() | st.binary(max_size=2), inner, max_size=3)
    ),
    max_leaves=6,
).filter(lambda v: "nan" not in repr(v))  # not equal to itself
dumps = st.fixed_dictionaries(
    {"entries": st.lists(st.fixed_dictionaries({}, optional=FIELDS), max_size=5)},
    optional={"version": texts, "pg_config": meta, "pg_status": meta, "comm_lib_version": meta},
)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(dumps, st.integers(0, 5))
def test_reads_what_pythons_unpickler_reads(dump, protocol):
    try:
        data = pickle.dumps(dump, protocol)
    except UnicodeEncodeError:  # protocol 0 cannot write a lone surrogate
        return
    if any(o.name == "GLOBAL" for o, _, _ in pickletools.genops(data)):  # before protocol 3, bytes are a call
        with pytest.raises(DumpError, match="GLOBAL"):
            read(data)
        return
    check(data)


def entry(i, **fields):
    return {
        "record_id": i,
        "process_group": ("0", "default_pg"),
        "profiling_name": "nccl:all_reduce",
        "input_sizes": [[1024, 1024]],
        "input_dtypes": ["Float"],
        "state": "completed",
        "time_created_ns": 1_795_253_746_811_903_025 + i,
        "frames": [{"name": "step", "filename": "train.py", "line": 7}],
        "thread_id": "1",
        **fields,
    }


@pytest.mark.parametrize("protocol", range(6))
def test_many_entries_share_their_tables(protocol):
    """More than the 1000 items that Python writes in one go."""
    columns = check(pickle.dumps({"entries": [entry(i) for i in range(2500)]}, protocol))
    assert len(columns) == 2500
    assert columns.sizes == [((1024, 1024),), ()]
    assert columns.stacks == [(("step", "train.py", 7),)]


@pytest.mark.parametrize("protocol", range(6))
def test_shared_objects(protocol):
    """One list in several places and roles, one entry twice, a memo place filled after its use."""
    nothing, shape, one = [], [[3, 4], [3, 4]], entry(1)
    dump = {
        "entries": [entry(0, input_sizes=shape, output_sizes=shape), one, one]
        + [entry(2, input_sizes=nothing, input_dtypes=nothing, frames=nothing, process_group=nothing)],
        "pg_status": {"a": shape, "b": shape},
    }
    columns = check(pickle.dumps(dump, protocol))
    assert columns.meta["pg_status"]["a"] is columns.meta["pg_status"]["b"]


def test_our_own_dumps(tmp_path):
    recorder = write_ring(tmp_path / "a.ucring", 1, 4, 40, unfinished=True)
    for i in range(3):
        recorder.begin(0, SEND, i, 9, [torch.zeros(5, dtype=torch.bfloat16)], [], peer=2, flags=2)
        recorder.begin(0, RECV, i, 9, [], [torch.zeros(i)], peer=2, flags=2 | 8)
    ring = read_ring(tmp_path / "a.ucring")
    columns = check(pickle.dumps(formats.to_dict(ring)))
    assert len(columns) == 46
    assert columns.groups == [("main", "shm")]
    assert {columns.profiling_names[i] for i in columns.profiling_name[40:]} == {
        "gloo:send 1->2",
        "gloo:recv 1<-2",
    }


def test_a_dump_of_torchs_own_recorder():
    """As torch's C++ pickler writes it: protocol 2, with call stacks by the memo."""
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for _ in range(20):
            dist.all_reduce(torch.ones(3, 4))
        data = torch._C._distributed_c10d._dump_fr_trace(True, True, False)
    finally:
        dist.destroy_process_group()
    columns = check(data)
    assert len(columns) >= 20
    assert columns.sizes[columns.input_sizes[-1]] == ((3, 4),)
    assert any(file == __file__ for _, file, _ in columns.stacks[columns.frames[-1]])


# --- what is refused ------------------------------------------------------------------------------


class Evil:
    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", range(6))
def test_nothing_is_run(protocol, tmp_path):
    trap = tmp_path / "trap"
    data = pickle.dumps({"entries": [], "x": Evil(open, (str(trap), "w"))}, protocol)
    opcode, _, at = next(o for o in pickletools.genops(data) if "GLOBAL" in o[0].name)
    with pytest.raises(DumpError, match=rf"opcode {opcode.name} .* at byte {at}"):
        read(data)
    assert not trap.exists()


@pytest.mark.parametrize("value", [{1, 2}, frozenset([1]), bytearray(b"x"), 1j, Evil(print, ())])
def test_only_plain_data(value):
    with pytest.raises(DumpError, match="only plain data is read, at byte"):
        read(pickle.dumps({"entries": [], "x": value}))


def test_persistent_objects_are_refused():
    with pytest.raises(DumpError, match="PERSID"):
        read(b"(dVentries\n(lsPx\n.")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"\x80\x04", "cut short"),
        (b"\x80\x09N.", "protocol 9"),
        (b'{"entries": []}', "0x7b is no opcode"),
        (b"UCRING01", "SHORT_BINSTRING"),
        (b"\x00\x01", "0x00 is no opcode"),
        (pickle.dumps([1]), "neither 'entries' nor 'pg_config'"),
        (pickle.dumps({"a": 1}), "neither 'entries' nor 'pg_config'"),
        (pickle.dumps({"entries": 3}), "'entries' is a number, not a list"),
        (pickle.dumps({"entries": [{}, "x"]}), "entry 1 is a text"),
        (b"}X\xff\xff\xff\xff", "cut short"),
        (b"\x8d" + b"\xff" * 8, "cut short"),
        (b"\x8e" + b"\xff" * 7 + b"\x7f", "cut short"),
        (b"\x95" + b"\xff" * 8, "frame"),
        (b"\x8b\xff\xff\xff\xff", "negative length"),
        (b"\x8b\xff\xff\x00\x00", "number has 65535 bytes"),
        (b"I" + b"9" * 2000 + b"\n.", "number has 2000 digits"),
        (b"I1_0\n.", "other characters"),
        (b"Fx\n.", "float is broken"),
        (b"Nr\xff\xff\xff\xff.", "out of range"),
        (b"h\x00.", "memo place 0 is empty"),
        (b"a.", "more items than there are"),
        (b"e.", "mark"),
        (b"N(e.", "added to None"),
        (b"}(Nu.", "no value"),
        (b"N", "no end"),
        (b".", "middle"),
        (b"(N.", "middle"),
        (b"V\\u12\n.", "escape"),
        (b"\x8c\x02\xff\xfe.", "neither"),
        (b"}\x8c\x09pg_config\x8c\x01\xff\x73.", "not UTF-8"),
        (b"}\x8c\x09pg_config]q\x00h\x00as.", "holds itself"),
        (b"}\x8c\x09pg_config" + b"]" * 200 + b"a" * 199 + b"s.", "deeper than 100"),
        (b"}\x8c\x09pg_config}]Nss.", "key is a list"),
    ],
    ids=lambda v: repr(v)[:24] if isinstance(v, bytes) else "",
)
def test_refused(data, message):
    with pytest.raises(DumpError, match=message):
        read(data)


def test_sharing_costs_no_more_than_the_file():
    """2 ** 60 leaves by nested sharing, and a large list that every entry uses again in turns."""
    deep = []
    for _ in range(60):
        deep = [deep, deep]
    columns = read(pickle.dumps({"entries": [], "pg_config": deep}))
    assert columns.meta["pg_config"][0] is columns.meta["pg_config"][1]
    many = [{}] * 100_000
    with pytest.raises(DumpError, match="used too often"):
        read(pickle.dumps({"entries": [{"frames": many, "input_dtypes": many} for _ in range(20_000)]}))


@pytest.fixture(scope="module", params=range(6))
def valid(request):
    dump = {"version": "2.10", "pg_config": {"0": {"ranks": "[0]", "x": [1.5, -1, 2**70, None, True, ()]}}}
    return pickle.dumps(dump | {"entries": [entry(i, duration_ms=i / 7) for i in range(6)]}, request.param)


def test_damage_never_does_more_than_refuse(valid):
    """Random bytes anywhere, and each way of cutting the file off."""
    chance = random.Random(5)
    for length in range(len(valid)):
        with pytest.raises(DumpError):
            read(valid[:length])
    accepted = 0
    for _ in range(5000):
        damaged = bytearray(valid)
        for _ in range(chance.choice([1, 1, 2, 8])):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        try:
            columns = read(bytes(damaged))
        except DumpError:
            continue
        plain(columns)
        accepted += 1
    assert 0 < accepted < 5000  # some damage only changes a value


def test_files_are_read_in_threads(tmp_path):
    paths = []
    for rank in range(16):
        paths.append(tmp_path / f"rank_{rank}")
        paths[-1].write_bytes(pickle.dumps({"entries": [entry(i, pg_id=rank) for i in range(300)]}))
    with ThreadPoolExecutor(4) as pool:
        for rank, columns in enumerate(pool.map(read, paths)):
            assert set(columns.pg_id) == {rank}
            assert len(columns) == 300
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "nothing")
