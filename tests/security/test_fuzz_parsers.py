"""Every parser of what others wrote, over bytes that nobody wrote well: an error of its own kind, or data.

The native reader of pickles has a fuzzer of its own besides, with sanitizers: csrc/tests/pickle_fuzz.cpp.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unicomm import ReduceOp
from unicomm._core import FaultCode
from unicomm.backends.out_of_band import wire as watch_messages
from unicomm.backends.out_of_band.wire import Ask, Bye, Here, Inbox, Slow
from unicomm.comms.errors import CommError
from unicomm.comms.failures.faults import Claim, Fault
from unicomm.comms.membership.rendezvous_parts import error_of, grow, pack, read_failure, shrink, unpack
from unicomm.flight_recorder.formats import torch_dump as formats
from unicomm.flight_recorder.formats.dump_columns import DumpError, from_dump
from unicomm.flight_recorder.formats.pickles import read as read_pickle
from unicomm.flight_recorder.ring.reader import RingError, read_ring
from unicomm.flight_recorder.table.load import load
from unicomm.testing import run_ranks

often = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
seldom = settings(often, max_examples=40)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)
changes = st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), min_size=1, max_size=12)


def damaged(data: bytes, edits: list[tuple[int, int]], cut: int) -> bytes:
    out = bytearray(data)
    for place, value in edits:
        out[place % len(out)] = value
    return bytes(out[: len(out) - cut % len(out)] if cut % 3 == 0 else out)


# --- what watches say -------------------------------------------------------------------------------------

CLAIM = Claim(1, root=0, amount=24, extra=16)
FAULT = Fault(
    FaultCode.TIMEOUT,
    3,
    dead=(1,),
    absent=(2,),
    late=(4,),
    where={2: "is at train.py:7 in load"},
    detail="words",
    timeout=2.5,
    claims=(CLAIM,),
    library="",
)
SAID = {
    "fault": (watch_messages.encode(FAULT), FAULT),
    "ask": (watch_messages.encode(Ask()), Ask()),
    "here": (
        watch_messages.encode(Here(7, "barrier", 1, 2, 3, 4, "a.py:3")),
        Here(7, "barrier", 1, 2, 3, 4, "a.py:3"),
    ),
    "bye": (watch_messages.encode(Bye(9)), Bye(9)),
    "slow": (watch_messages.encode(Slow("checkpoint", 60.0)), Slow("checkpoint", 60.0)),
}


@pytest.mark.parametrize("kind", SAID)
@pytest.mark.parametrize("step", [1, 3, 1000])
def test_messages_arrive_whole_from_any_pieces(kind, step):
    data, meant = SAID[kind]
    inbox, got = Inbox(), []
    for start in range(0, 2 * len(data), step):
        got += inbox.feed((data * 2)[start : start + step])
    assert got == [meant, meant]


def heard(data: bytes) -> list[Any]:
    got: list[Any] = []
    with contextlib.suppress(ValueError):
        got += Inbox().feed(data)
    return got


@often
@given(data=st.binary(max_size=300))
def test_any_bytes_on_the_watch(data):
    heard(data)


@often
@given(kind=st.sampled_from(sorted(SAID)), edits=changes, cut=st.integers(0, 1000))
def test_damaged_messages_on_the_watch(kind, edits, cut):
    for message in heard(damaged(SAID[kind][0], edits, cut)):
        if isinstance(message, Fault):
            assert all(r >= 0 for r in (message.by, *message.dead, *message.absent, *message.late))
            assert 0 <= message.timeout <= 1e9


@often
@given(value=json_values)
def test_any_object_on_the_watch(value):
    with contextlib.suppress(ValueError):
        watch_messages.parse(json.dumps(value).encode())
    for kind in ("fault", "here", "bye", "slow"):
        said = {"kind": kind, "fault": 2, **(value if isinstance(value, dict) else {"by": value})}
        with contextlib.suppress(ValueError):
            watch_messages.parse(json.dumps(said).encode())


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 60000,
        b'{"kind":"bye","entered":' + b"9" * 4000 + b"}",
        b'{"kind":"slow","name":"x","seconds":NaN}',
    ],
    ids=["nested", "a number of 4000 digits", "not a number"],
)
def test_odd_objects_on_the_watch(body):
    with pytest.raises(ValueError):
        watch_messages.parse(body)


@pytest.mark.parametrize("length", [watch_messages.MOST + 1, 0x7FFFFFFF, 0xFFFFFFFF])
def test_a_message_that_claims_to_be_long(length):
    """Refused by its length, before anything is kept for it."""
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="a message of"):
            list(Inbox().feed(length.to_bytes(4, "little") + b"x" * 100))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


# --- the rendezvous ---------------------------------------------------------------------------------------


@often
@given(data=st.binary(max_size=80), count=st.integers(1, 9))
def test_any_bytes_for_packed_values(data, count):
    with contextlib.suppress(ValueError):
        assert pack(unpack(data, count)) == data


@often
@given(data=st.binary(max_size=200), most=st.integers(0, 300))
def test_any_bytes_for_compressed_values(data, most):
    for text in (data, b"z" + data, b"=" + data, b"z" + zlib.compress(data * 50)):
        with contextlib.suppress(ValueError):
            assert len(grow(text, most)) <= most
    assert grow(shrink(data * 50), 10_000) == data * 50


@often
@given(value=json_values, kind=st.sampled_from(["timeout", "mismatch", "twice", "left"]))
def test_any_failure_in_the_store(value, kind):
    """Either refused, or good for an error."""
    fields = value if isinstance(value, dict) else {"culprits": value, "differences": value}
    for said in (
        value,
        {"culprits": [[0, 1]], "seconds": 1, "stuck": False, "reason": "", **fields, "kind": kind},
        {"culprits": [[0, 1]], "global": True, "reason": "", "cause": value, **fields, "kind": "left"},
    ):
        try:
            failure = read_failure(json.dumps(said).encode(), 3)
        except ValueError:
            continue
        assert isinstance(error_of(failure, "arrive", "c", 0, [0, 1, 2]), CommError)


# --- rings and dumps --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ring_bytes(tmp_path_factory) -> bytes:
    """A ring of two real ranks."""
    from unicomm.flight_recorder.recording import writer

    def program(comm: Any) -> None:
        comm.all_reduce(torch.ones(4), ReduceOp.SUM, False)
        comm.barrier(False)

    run_ranks(program, 2)
    data = writer.ring_bytes()
    assert len(read_ring(data).records)
    return data


def look_at(data: bytes) -> None:
    """Uses all that a reader uses of a ring."""
    ring = read_ring(data)
    for comm in ring.comms[:8]:
        assert comm.ranks is not None
    for record in ring.records[:8]:
        ring.op(record), ring.frame(record), ring.shape(record, "in"), ring.reduction(record)
    formats.to_dict(ring)


@seldom
@given(edits=changes, cut=st.integers(0, 1 << 20), in_header=st.booleans())
def test_damaged_rings(edits, cut, in_header, ring_bytes):
    if in_header:
        edits = [(place % 256, value) for place, value in edits]
    with contextlib.suppress(RingError):
        look_at(damaged(ring_bytes, edits, cut))


@often
@given(data=st.binary(max_size=400), magic=st.booleans())
def test_any_bytes_for_a_ring(data, magic):
    with contextlib.suppress(RingError):
        look_at((b"UCRING01\x01\0\0\0" if magic else b"") + data)


@often
@given(value=json_values)
def test_any_object_for_a_dump(value):
    entries = value if isinstance(value, list) else [value]
    for dump in (value, {"version": "2.10", "entries": entries, "pg_config": value, "pg_status": value}):
        with contextlib.suppress(DumpError):
            from_dump(dump)


@often
@given(value=json_values, edits=changes, cut=st.integers(0, 1000))
def test_damaged_pickles(value, edits, cut):
    data = pickle.dumps({"version": "2.10", "entries": [value]}, 2)
    for raw in (data, damaged(data, edits, cut)):
        with contextlib.suppress(DumpError):
            read_pickle(raw)


TORCHCOMMS = {  # as torchcomms 0.3.0 writes them: its own names, ranks as a text, no PG status
    "version": "2.10",
    "comm_lib_version": "",
    "pg_config": {"main": {"name": "main", "desc": "gloo", "ranks": "[0,1]"}},
    "pg_status": {},
    "entries": [
        {
            "record_id": i,
            "pg_id": 0,
            "process_group": ["main", "gloo"],
            "collective_seq_id": i,
            "p2p_seq_id": 0,
            "is_p2p": False,
            "op_id": i,
            "profiling_name": "gloo:all_reduce",
            "time_created_ns": 10 + i,
            "input_sizes": [[4]],
            "output_sizes": [[4]],
            "input_dtypes": ["Float"],
            "output_dtypes": ["Float"],
            "state": "scheduled",
            "retired": i < 2,
            "timeout_ms": 600000,
        }
        for i in range(1, 3)
    ],
}


def dumps_of(ring: bytes) -> dict[str, bytes]:
    own = formats.to_dict(read_ring(ring))
    return {
        "rank0.json": json.dumps(own).encode(),
        "rank_0": pickle.dumps(own),
        "rank0.ucring": ring,
        "torchcomms_rank_0.json": json.dumps(TORCHCOMMS).encode(),
        "torchcomms_rank_0": pickle.dumps(TORCHCOMMS, 2),
    }


@pytest.mark.parametrize("name", ["rank0.json", "rank_0", "torchcomms_rank_0.json", "torchcomms_rank_0"])
def test_damaged_files(name, ring_bytes, tmp_path):
    """`load` raises nothing, and says of each file what is wrong with it, or reads it."""
    data = dumps_of(ring_bytes)[name]
    path = tmp_path / name
    path.write_bytes(data)
    assert load([path]).sources, "the sound file is not read: its damaged copies would prove nothing"
    rng = random.Random(7)
    for i in range(60):
        edits = [(rng.randrange(len(data)), rng.randrange(256)) for _ in range(rng.randrange(1, 9))]
        path.write_bytes(damaged(data, edits, rng.randrange(3 * len(data))))
        table = load([path])
        assert len(table.sources) or table.remarks, i


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("place", [lambda e: e, lambda e: {"entries": [e]}, lambda e: {"version": e}])
def test_a_dump_that_would_run_something(protocol, place: Callable[[Any], Any], tmp_path):
    target = tmp_path / "made by the pickle"
    path = tmp_path / "rank_0"
    path.write_bytes(pickle.dumps(place(Evil(target)), protocol))
    with pytest.raises(DumpError):
        read_pickle(path)
    table = load([path])
    assert table.remarks
    assert not len(table.sources)
    assert not target.exists()
    pickle.loads(path.read_bytes())
    assert target.is_dir(), "the dump is not malicious: this test would prove nothing"
