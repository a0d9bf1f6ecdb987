"""When operations ran on their device: in the recorder and in torch.profiler, over the double."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

import unicomm
from unicomm import Communicator
from unicomm.comms.execution.device.clock import DeviceClock
from unicomm.comms.execution.profiling import events as profiling
from unicomm.flight_recorder.recording import writer
from unicomm.flight_recorder.ring.reader import read_ring
from unicomm.testing import run_ranks

SUM = unicomm.ReduceOp.SUM


def records() -> list:
    return list(read_ring(writer._recorder.path).records)


def test_a_record_says_that_the_device_has_come_to_it(double, eventually):
    """Created while a kernel before it runs, started when the device is at it, completed after that."""
    reached, released = threading.Event(), threading.Event()

    def program(comm: Communicator) -> None:
        streams = comm._engine.executor.streams
        if comm.get_rank() == 1:
            assert released.wait(60)
            comm.all_reduce(torch.ones(4), SUM, True).wait_blocking()
            return
        streams.call(lambda: reached.wait(60))
        work = comm.all_reduce(torch.ones(4), SUM, False)
        looked = comm._engine.executor._running[0]
        assert [int(r["state"]) for r in records()] == [1]
        reached.set()
        eventually(lambda: looked.reached and int(records()[0]["state"]) == 2)
        assert not work.is_completed()  # rank 1 has not come
        released.set()
        work.wait_blocking()
        assert comm._engine.executor.drain(30)

    run_ranks(program, 2, backend=double)
    assert [int(r["state"]) for r in records()] == [3, 3]


def test_durations_are_the_devices_own(double, eventually):
    """The rank that waits for the other has that time in its record; the one that is waited for has not."""
    begun, released = threading.Event(), threading.Event()
    at: dict[str, int] = {}

    def program(comm: Communicator) -> int:
        if comm.get_rank() == 1:
            comm._engine.executor.streams.call(lambda: released.wait(60))
            comm.all_reduce(torch.ones(4), SUM, False)
            assert begun.wait(60)
            at["released"] = time.monotonic_ns()
            released.set()
        else:
            comm.all_reduce(torch.ones(4), SUM, False)
            pending = comm._engine.executor._running[0]
            eventually(lambda: pending.reached)
            at["begun"] = time.monotonic_ns()
            begun.set()
        assert comm._engine.executor.drain(30)
        return comm._member.recorder_index

    waits, waited_for = run_ranks(program, 2, backend=double)
    found = {int(r["comm"]): r for r in records()}
    length = int(found[waits]["completed_ns"]) - int(found[waits]["started_ns"])
    assert length >= at["released"] - at["begun"]
    assert int(found[waited_for]["started_ns"]) >= at["released"]
    for r in found.values():
        assert int(r["created_ns"]) <= int(r["started_ns"]) <= int(r["completed_ns"])


@dataclass
class Fake:
    """A device whose events are seconds."""

    def elapsed(self, first: float, second: float) -> float:
        return second - first


def test_operations_are_placed_by_their_distance_and_never_where_they_cannot_be():
    ms = 1_000_000
    clock = DeviceClock(Fake())
    # Seen 15 ms late: there is nothing better yet.
    assert clock.place(0.000, 0.010, issued_ns=0, seen_ns=25 * ms) == (15 * ms, 25 * ms)
    # 20 ms after the one before by the device, although it was seen a little later.
    assert clock.place(0.025, 0.030, issued_ns=0, seen_ns=60 * ms) == (40 * ms, 45 * ms)
    # Seen earlier than its distance says: the one before was placed too late.
    assert clock.place(0.039, 0.040, issued_ns=0, seen_ns=50 * ms) == (49 * ms, 50 * ms)
    # Not before it was issued.
    assert clock.place(0.041, 0.042, issued_ns=60 * ms, seen_ns=90 * ms) == (60 * ms, 61 * ms)
    # Long idle: the clocks may have drifted apart, so it is placed anew.
    assert clock.place(0.050, 0.051, issued_ns=0, seen_ns=5000 * ms) == (4999 * ms, 5000 * ms)


def rows() -> list[dict]:
    table = profiling.finished[-1].table
    return [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]


def test_the_profilers_rows_have_the_devices_times(double):
    def program(comm: Communicator) -> None:
        released = threading.Event()
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as prof:
            comm._engine.executor.streams.call(lambda: released.wait(60))
            comm.all_reduce(torch.ones(4), SUM, False)
            work = comm.broadcast(torch.ones(2), 0, True)
            released.set()
            work.wait()
            comm._engine.executor.streams.synchronize()
        events = [e for e in prof.events() if e.name.startswith("unicomm::")]
        assert [e.name for e in events] == ["unicomm::all_reduce", "unicomm::broadcast"]
        assert [e.kwinputs["seq_num"] for e in events] == [1, 2]

    run_ranks(program, 1, backend=double)
    first, second = rows()
    assert [(r["op"], r["seq_num"], r["state"]) for r in (first, second)] == [
        ("all_reduce", 1, 3),
        ("broadcast", 2, 3),
    ]
    # The stream was held until both were issued.
    assert first["issued_ns"] < second["issued_ns"] < first["completed_ns"]
    assert first["started_ns"] <= first["completed_ns"]
    assert (first["is_async"], second["is_async"]) == (0, 1)


def test_what_the_device_has_not_done_when_the_profiler_ends_is_not_finished(double):
    def program(comm: Communicator) -> None:
        released = threading.Event()
        with profile(activities=[ProfilerActivity.CPU]):
            comm._engine.executor.streams.call(lambda: released.wait(60))
            work = comm.all_reduce(torch.ones(4), SUM, False)
        released.set()
        work.wait_blocking()

    run_ranks(program, 1, backend=double)
    (row,) = rows()
    assert (row["state"], row["started_ns"], row["completed_ns"]) == (1, 0, 0)
