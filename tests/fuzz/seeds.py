"""Real inputs for the fuzzer: what programs and the corpus of the analyzer write.

python -m tests.fuzz.seeds FOLDER      # FOLDER/TARGET/... for each target
"""

from __future__ import annotations

import gzip
import json
import pickle
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks import profile_merge
from tests.fuzz.mutations import ARCHIVES, pack
from unicomm.flight_recorder.corpus import KINDS, Case
from unicomm.flight_recorder.corpus.nccl_dump import nccl_dump
from unicomm.flight_recorder.formats.torch_dump import to_dict
from unicomm.flight_recorder.ring.copies import copied
from unicomm.flight_recorder.ring.reader import COPY_STATES, Ring

_MOST = 1 << 16  # bytes of a seed
_SEEDS = 52  # the most of a target: every second kind of the corpus
_RECORDS = 10  # newest records of a seed's ring, and entries of a dump


def _cases() -> Iterator[Case]:
    """Each kind of the corpus at its smallest size, after its run."""
    for number, kind in enumerate(KINDS):
        case = kind.make(kind.sizes[0], np.random.default_rng(number))
        case.table()
        yield case


def _short(ring: bytes, rank: int) -> bytes:
    """A copy of a ring with its newest records; the ranks' processes are in different states."""
    return copied(ring, COPY_STATES[1 + rank % (len(COPY_STATES) - 1)], _RECORDS)


def _job(case: Case, form: str) -> list[bytes]:
    """The files of the ranks of a case, as rings or as dumps."""
    out = []
    for rank in range(case.job.size):
        if form == "ring":
            out.append(_short(case.job.ring(rank), rank))
            continue
        dump = nccl_dump(case.job, rank) if form == "nccl" else to_dict(Ring(case.job.ring(rank)))
        dump["entries"] = dump["entries"][-_RECORDS:]
        out.append(json.dumps(dump).encode())
    return out


def _endings() -> list[bytes]:
    place = {"file": "/job/train.py", "line": 37, "function": "load_batch"}
    raised = {"type": "ValueError", "message": "bad batch 7", "frames": [place, place], "consequence": False}
    own = {"format": 1, "rank": 0, "pid": 7, "host": "node0", "ticks": 5, "pid_namespace": "4026531836"}
    own |= {"stack_signal": 12, "library": ["/usr/lib/python3"]}
    one = {"pid": 7, "exit_code": -9, "out_of_memory": "", "ended_ns": 10**18}
    ranks = {"0": one, "1": one | {"exit_code": 3, "out_of_memory": "oom_kill 1 in the cgroup"}}
    stack = (
        "Thread 0x00007f1 (most recent call first):\n"
        '  File "/job/train.py", line 51 in load_batch\n  File "/job/train.py", line 60 in <module>\n'
    )
    return [
        json.dumps(own).encode(),
        json.dumps(own | {"ended_ns": 10**18, "raised": raised}).encode(),
        json.dumps(own | {"ended_ns": 10**18, "exit_call": [place], "exit_argument": 3}).encode(),
        json.dumps({"format": 1, "host": "node0", "ranks": ranks}).encode(),
        f"Process state: sleeping\n{stack}".encode(),
        f"Fatal Python error: Segmentation fault\n\nCurrent {stack[0].lower()}{stack[1:]}".encode(),
        f"Fatal Python error: Aborted\n\n{stack}\n{stack}".encode(),
    ]


def _traces() -> list[bytes]:
    with tempfile.TemporaryDirectory() as name:
        paths = profile_merge.generate(Path(name), 2, 40, 0.2, late=1)
        trace = json.loads(paths[0].read_text())
    table = trace["unicomm"]
    v2 = table | {"version": 2, "clock": "boot%201", "columns": [*table["columns"], "captured_seq", "replay"]}
    rows = [[*row, at, (at % 3) - 1] for at, row in enumerate(table["rows"])]
    rows[1][0] = "replay"
    messages = [["send" if at % 2 else "recv", *row[1:13], -1, 1, *row[15:]] for at, row in enumerate(rows)]
    thread = {"pid": 1000, "tid": 1000}
    more: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", **thread, "args": {"name": "main"}},
        {"ph": "M", "name": "process_name", "pid": 1000, "args": {"name": "python"}},
        {"ph": "i", "name": "now", "ts": 5.5, **thread, "s": "g"},
        {"ph": "s", "id": 3, "cat": "ac2g", "name": "ac2g", "ts": 6.25, **thread},
        {"ph": "f", "id": 3, "cat": "ac2g", "name": "ac2g", "ts": 7, **thread, "bp": "e"},
        {"ph": "X", "cat": "python_function", "name": "train.py(3): f", "ts": 1, "dur": 9000.5, **thread},
        {"ph": "X", "cat": "kernel", "name": "k", "ts": 8, "dur": 3, "pid": 0, "tid": 7},
    ]
    more[-1]["args"] = {"graph node id": 5, "stream": 7}
    events = [*trace["traceEvents"][:12], *more]
    made = [
        trace,
        trace | {"traceEvents": events},
        trace | {"unicomm": v2 | {"rows": rows}, "traceEvents": events},
        trace | {"unicomm": v2 | {"rows": messages}},
        {"traceEvents": events, "unicomm": table, "baseTimeNanoseconds": 0},
        {
            "version": 1,
            "kernels": {"5": [{"unicomm": "all_reduce", "comm": "main"}], "6": [{"unicomm": "x"}]},
        },
    ]
    out = [json.dumps(one).encode() for one in made]
    return [*out, gzip.compress(out[1], mtime=0), json.dumps(events).encode()]


def _hub_messages(ring: bytes) -> list[bytes]:
    from unicomm.launch.hub import protocol as p

    done = p.Gathered("node0", "/dev/shm/x", 2, ["node1: no answer"], "Rank 1 was killed.")
    packed = p.Packed("node0", "a.ucring", len(ring), p.pack(ring))
    messages: list[Any] = [
        p.Ping(),
        p.Announce(1, "tcp://127.0.0.1:29401", "node1", "r"),
        p.Look(),
        p.Files("a round"),
    ]
    messages += [
        p.Read("a round", "a.ucring", 0),
        p.Gather("a round"),
        p.Tell("a round", done),
        p.Done(),
        p.Refused("no"),
        done,
    ]
    messages += [p.Rings([packed], ["one"]), p.Listing([("a.ucring", 5)]), p.Part(3, p.pack(b"abc"))]
    note = {"address": "127.0.0.1", "port": 29401, "token": "t" * 32, "pid": 1, "numbers": "4026531836"}
    note |= {"ticks": 1, "folder": "/dev/shm"}
    return [*(msgspec.msgpack.encode(m) for m in messages), json.dumps(note).encode()]


def _collector_messages() -> list[bytes]:
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse

    answer = ExportMetricsServiceResponse()
    answer.partial_success.error_message = "slow down"
    soft = bytes(answer.SerializeToString())
    answer.partial_success.rejected_data_points = 3
    return [soft, bytes(answer.SerializeToString())]


def _peer_messages() -> list[bytes]:
    """What ranks tell each other on gloo, and what they find in the rendezvous store."""
    from unicomm._core import FaultCode
    from unicomm.backends.out_of_band.operation import Awaited
    from unicomm.backends.out_of_band.wire import Ask, Bye, Here, Slow, encode
    from unicomm.comms.failures.faults import Claim, Fault
    from unicomm.comms.membership.rendezvous_parts import pack as packed
    from unicomm.comms.membership.rendezvous_parts import shrink

    fault = Fault(FaultCode.TIMEOUT, 3, dead=(1,), absent=(2,), late=(4,), where={2: "is at train.py:7"})
    claim = Claim(1, root=0, amount=24, extra=16)
    several = Fault(FaultCode.MISMATCH, 1, detail="words", timeout=2.5, claims=(claim, claim), library="")
    here = Here(7, "barrier", 1, 2, 3, 4, "a.py:3", (Awaited(1, True, 3, 16),))
    said = [encode(m) for m in (fault, several, Ask(), here, Bye(9), Slow("checkpoint", 60.0))]
    failures = [
        {"kind": "timeout", "culprits": [[0, 1]], "seconds": 1, "stuck": False},
        {"kind": "left", "culprits": [[1, 1]], "reason": "gone"},
        {
            "kind": "mismatch",
            "culprits": [[2, 2]],
            "differences": {"size": [["2", [[2, 2]]], ["3", [[0, 1]]]]},
        },
    ]
    store = [packed([b"a", b"bc", b""]), shrink(b"x" * 9000), shrink(b"y")]
    return [*said, *(json.dumps(f).encode() for f in failures), *store]


def write(folder: Path) -> None:
    """Writes the seeds of all targets."""
    rings, dumps, pickles, archives = [], [], [], []
    for number, case in enumerate(_cases()):
        form = "nccl" if case.nccl else "dump"
        found = _job(case, form)
        dumps.append(found[0])
        pickles.append(pickle.dumps(json.loads(found[-1]), (2, 4)[number % 2]))
        suffix = "json"
        if not case.nccl:  # the calls of NCCL's kinds are in no ring
            rings.append(_job(case, "ring")[0])
            if number % 2:
                found, suffix = _job(case, "ring"), "ucring"
        job = [(f"rank{rank}.{suffix}", data) for rank, data in enumerate(found[:3])]
        archives.append(pack(job, ARCHIVES[number % len(ARCHIVES)]))
    shown = {
        "processes": [{"rank": 0, "host": "h", "pid": 3, "state": "killed", "trace": json.loads(dumps[0])}]
    }
    dumps += [json.dumps(shown).encode(), json.dumps([json.loads(dumps[1])]).encode()]
    made = {
        "rings": rings,
        "dumps": dumps,
        "pickles": pickles,
        "archives": archives,
        "endings": _endings(),
        "traces": _traces(),
        "hub": [*_hub_messages(rings[0]), *_collector_messages()],
        "peers": _peer_messages(),
    }
    for name, inputs in made.items():
        (folder / name).mkdir(parents=True)
        several = [data for data in inputs if len(data) <= _MOST]
        for number, data in enumerate(several[:: -(-len(several) // _SEEDS)]):
            (folder / name / f"{number:03d}").write_bytes(data)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
