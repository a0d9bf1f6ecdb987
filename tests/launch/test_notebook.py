"""Live ranks: results, state, output and failures (test_live_parents.py: what can start them)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import unicomm
from tests.processes import forked_interpreters
from unicomm.launch.notebook import RankError, channel, launch, state
from unicomm.launch.notebook.rank_worker import _Worker

pytestmark = pytest.mark.processes

SIZE = 3
PATIENT = 60.0  # seconds of grace for a test in which nobody is to be killed


@pytest.fixture(scope="module", autouse=True)
def forked() -> Iterator[None]:
    """Ranks are forked here from a server with torch; those of test_live_parents.py are new interpreters."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", forked_interpreters.Popen)
        yield


@pytest.fixture(scope="module")
def lines() -> list[tuple[int, str, str]]:
    return []


@pytest.fixture(scope="module")
def ranks(lines: list[tuple[int, str, str]]) -> Any:
    with launch(SIZE, modules=(), grace=PATIENT, output=lambda *line: lines.append(line)) as started:
        yield started


def test_results_come_in_order_of_rank(ranks: Any) -> None:
    ten = 10

    def place(factor: int, add: int = 0) -> int:
        return int(os.environ["RANK"]) * factor + add + ten

    assert ranks.run(place, 2, add=1) == [11, 13, 15]
    assert ranks.run(place, 2, ranks=[2, 0]) == [10, 14]
    assert ranks.run(os.getpid) == list(ranks.pids)


def test_state_stays_with_the_rank(ranks: Any) -> None:
    def keep(value: int) -> None:
        state.value = value + int(os.environ["RANK"])

    ranks.run(keep, 5)
    ranks.run(keep, 50, ranks=[1])
    assert ranks.run(lambda: state.value) == [5, 51, 7]
    with pytest.raises(RankError, match=r"state\.nothing: no earlier run has set it"):
        ranks.run(lambda: state.nothing)
    with pytest.raises(AttributeError, match="belongs to the ranks"):
        state.value = 1
    with pytest.raises(AttributeError, match="belongs to the ranks"):
        _ = state.value


def test_communicators_and_groups_find_each_other(ranks: Any) -> None:
    def create() -> tuple[float, str]:
        import torch

        state.comm = unicomm.new_comm("auto", torch.device("cpu"), timeout=60)
        x = torch.full((2,), float(state.comm.get_rank()))
        state.comm.all_reduce(x, unicomm.ReduceOp.SUM, False)
        state.comm.barrier(False)
        state.comm.finalize()
        return x.sum().item(), state.comm.get_backend()

    assert ranks.run(create) == [(6.0, "shm")] * SIZE

    def group() -> tuple[float, str]:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        x = torch.ones(1)
        dist.all_reduce(x)
        kind = type(dist.group.WORLD._get_backend(torch.device("cpu"))).__name__  # type: ignore[union-attr]
        dist.destroy_process_group()
        return x.item(), kind

    for _ in range(2):  # a group can be made again
        assert ranks.run(group) == [(3.0, "UnicommProcessGroup")] * SIZE


def test_output_comes_by_rank_and_before_the_result(ranks: Any, lines: list[tuple[int, str, str]]) -> None:
    def talk() -> None:
        print("first\nsecond")
        print("10%\r50%\r100%", file=sys.stderr)
        os.system("echo of a child")
        print("no end", end="")

    lines.clear()
    ranks.run(talk, ranks=[0, 2])
    for rank in (0, 2):
        said = [(stream, line) for r, stream, line in lines if r == rank]
        assert [line for stream, line in said if stream == "stdout"] == [
            "first",
            "second",
            "of a child",
            "no end",
        ]
        assert ("stderr", "100%") in said
    assert not [line for line in lines if line[0] == 1]


def test_lines_on_the_screen_have_the_rank(capsys: pytest.CaptureFixture[str]) -> None:
    with launch(1, modules=()) as one:
        one.run(lambda: print("x" * 300))
        one.run(lambda: print("[bold]as it is", file=sys.stderr))
    said = capsys.readouterr()
    assert said.out == f"[0] {'x' * 300}\n"
    assert "[0] [bold]as it is\n" in said.err  # a slow start or end says something besides


def test_all_failed_ranks_are_named_with_their_tracebacks(ranks: Any) -> None:
    def fail() -> str:
        rank = int(os.environ["RANK"])
        if rank != 1:
            raise ValueError(f"bad value on {rank}")
        return "fine"

    with pytest.raises(RankError) as caught:
        ranks.run(fail)
    error = caught.value
    assert sorted(error.failures) == [0, 2]
    assert error.results == {1: "fine"}
    text = str(error)
    assert text.startswith("ranks 0, 2 of 3 failed")
    assert "rank 2: ValueError: bad value on 2" in text
    assert "in fail" in text
    assert "worker.py" not in text
    assert isinstance(error.failures[0].exception, ValueError)
    assert error.failures[0].kind == "raised"


def test_equal_failures_are_told_once(ranks: Any) -> None:
    with pytest.raises(RankError) as caught:
        ranks.run(lambda: 1 // 0)
    assert str(caught.value).count("ZeroDivisionError") == 2  # the summary and the traceback
    assert "--- ranks 0-2 ---" in str(caught.value)


def test_what_cannot_be_sent_back_is_a_failure(ranks: Any) -> None:
    class Odd(Exception):
        def __init__(self, a: int, b: int) -> None:
            super().__init__("odd")

    def odd() -> None:
        raise Odd(1, 2)

    with pytest.raises(RankError, match="Odd: odd") as caught:
        ranks.run(odd, ranks=[1])
    assert caught.value.failures[1].exception is None
    with pytest.raises(RankError, match="rank 0: TypeError: cannot pickle"):
        ranks.run(threading.Lock, ranks=[0])
    with pytest.raises(RankError, match="rank 0: SystemExit: 3"):
        ranks.run(lambda: sys.exit(3), ranks=[0])
    assert ranks.run(os.getpid) == list(ranks.pids)


def test_timeout_says_where_they_were_and_keeps_them(ranks: Any) -> None:
    def wait() -> None:
        if os.environ["RANK"] != "1":
            time.sleep(1000)

    with pytest.raises(RankError) as caught:
        ranks.run(wait, timeout=3)  # seconds, in which a busy machine begins the calls
    failures = caught.value.failures
    assert {r: failure.kind for r, failure in failures.items() if r != 1} == {0: "timeout", 2: "timeout"}
    assert "in wait" in failures[0].summary
    assert "not done after 3 s" in str(caught.value)
    assert ranks.run(os.getpid) == list(ranks.pids)


def test_timeout_of_ranks_that_print_all_the_time(ranks: Any) -> None:
    def talk() -> None:
        while True:
            print("on and on " * 100)

    with pytest.raises(RankError, match="not done after 1 s"):
        ranks.run(talk, timeout=1)
    assert ranks.run(os.getpid) == list(ranks.pids)


def test_an_interrupt_that_comes_before_the_call_begins() -> None:
    said: list[tuple[Any, ...]] = []
    pipe: Any = type("Channel", (), {"send": lambda _, *what: said.append(what)})()
    worker = _Worker(pipe)
    worker._interrupt(7)
    what, number, line, *_ = worker._run(7, channel.dump_call(os.getpid, (), {}))
    assert (what, number) == ("failed", 7)
    assert "KeyboardInterrupt" in line
    assert worker._run(8, channel.dump_call(os.getpid, (), {}))[:2] == ("done", 8)


def test_timeout_ends_waits_that_hear_no_signal(ranks: Any) -> None:
    def stuck() -> None:
        import torch

        with unicomm.new_comm("shm", torch.device("cpu"), name="stuck", timeout=600) as comm:
            comm.barrier(False)
            if comm.get_rank() != 1:
                comm.barrier(False)
            else:
                time.sleep(1000)

    with pytest.raises(RankError, match="not done after"):
        ranks.run(stuck, timeout=1.5)
    assert ranks.run(os.getpid) == list(ranks.pids)


def test_bad_arguments_start_nothing(ranks: Any) -> None:
    for wrong in (0, -1, True, "2"):
        with pytest.raises(unicomm.InvalidArgumentError, match="not a number of ranks"):
            launch(wrong)  # type: ignore[arg-type]
    with pytest.raises(unicomm.InvalidArgumentError, match="grace"):
        launch(1, grace=0)
    with pytest.raises(unicomm.CommError, match="nonesuch"):
        launch(1, backend="nonesuch")
    for chosen in ([], [3], [-1], [0, 0], ["0"]):
        with pytest.raises(unicomm.InvalidArgumentError, match="not ranks of these"):
            ranks.run(os.getpid, ranks=chosen)
    with pytest.raises(unicomm.InvalidArgumentError, match="timeout=0"):
        ranks.run(os.getpid, timeout=0)
    with pytest.raises(unicomm.InvalidArgumentError, match="cannot be called"):
        ranks.run(5)
    with pytest.raises(unicomm.InvalidArgumentError, match="cannot be sent"):
        ranks.run(print, threading.Lock())
    with pytest.raises(unicomm.InvalidArgumentError, match="leave it out of the function"):
        ranks.run(lambda: ranks.size)


def test_without_cloudpickle(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    assert ranks.run(os.getpid) == list(ranks.pids)
    with pytest.raises(unicomm.InvalidArgumentError) as caught:
        ranks.run(lambda: 1)
    assert channel.EXTRA in str(caught.value)

    def cell() -> None:
        pass

    cell.__module__ = "__main__"
    with pytest.raises(unicomm.InvalidArgumentError, match="notebook or a script"):
        ranks.run(cell)


def test_one_run_at_a_time(ranks: Any, tmp_path: Any) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    results: list[Any] = []
    other = threading.Thread(target=lambda: results.append(ranks.run(gate.read_text, ranks=[0])))
    other.start()
    with gate.open("w") as writer:  # opens when the rank reads
        with pytest.raises(unicomm.NotReadyError, match="one call at a time"):
            ranks.run(os.getpid)
        writer.write("open")
    other.join(60)
    assert results == [["open"]]


def test_killed_rank_is_named_and_restart_makes_new_ones() -> None:
    def die() -> str:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return "alive"

    def die_and_wait() -> None:
        if die() == "alive":
            time.sleep(1000)

    with launch(2, modules=(), grace=5.0) as two:
        pids = two.pids
        with pytest.raises(RankError, match="rank 1: its process was killed by SIGKILL") as caught:
            two.run(die_and_wait)
        assert [(f.rank, f.kind) for f in caught.value.failures.values()] == [
            (1, "ended"),
            (0, "interrupted"),
        ]
        with pytest.raises(RankError, match="killed by SIGKILL before"):
            two.run(os.getpid)
        assert "rank 1" in repr(two)
        two.restart()
        assert not set(two.pids) & set(pids)
        assert two.run(os.getpid) == list(two.pids)
        os.kill(two.pids[0], signal.SIGKILL)
        with pytest.raises(RankError, match="rank 0"):
            two.run(time.sleep, 0.2)  # noticed now, or before it starts
    with pytest.raises(unicomm.NotReadyError, match="closed"):
        two.run(os.getpid)
    two.close()


def test_rank_that_ignores_everything_is_killed() -> None:
    def deaf() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        while True:
            time.sleep(1000)

    with launch(1, modules=(), grace=3) as one:
        with pytest.raises(RankError, match="did not react to an interrupt and was killed") as caught:
            one.run(deaf, timeout=3)
        assert "in deaf" in caught.value.failures[0].traceback
        assert caught.value.failures[0].kind == "timeout"


def test_stopped_rank_is_killed() -> None:
    with launch(1, modules=(), grace=0.3) as one:
        os.kill(one.pids[0], signal.SIGSTOP)
        with pytest.raises(RankError, match="killed"):
            one.run(os.getpid, timeout=0.3)


def test_rank_that_cannot_start() -> None:
    with pytest.raises(unicomm.BackendError, match=r"(?s)rank \d did not start.*No module named 'nonesuch'"):
        launch(2, modules=("nonesuch",))


def test_foreign_launchers_are_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"OMPI_COMM_WORLD_RANK": "3", "PMI_RANK": "3", "TORCHCOMM_RANK": "3"}.items():
        monkeypatch.setenv(name, value)
        monkeypatch.setenv(name.replace("RANK", "SIZE"), "4")

    def who() -> Any:
        from unicomm.comms.membership.environment import detect_environment

        here = detect_environment()
        return here.rank, here.size, here.source, "UNICOMM_BACKEND" in os.environ, os.environ["MINE"]

    with launch(2, modules=(), backend=None, env={"MINE": "yes"}) as two:
        assert two.run(who) == [(r, 2, "torchrun", False, "yes") for r in range(2)]
