"""clog: a line for each step of each operation."""

from __future__ import annotations

import io
import re
import threading
import time

import pytest
import torch

from unicomm import Communicator, InvalidArgumentError, MismatchError, ReduceOp
from unicomm.hooks import clog
from unicomm.testing import run_ranks

SUM = ReduceOp.SUM


def steps(text: str) -> list[str]:
    """The lines without times, with operations numbered from 1."""
    ids: dict[str, int] = {}
    lines = []
    for line in text.splitlines():
        found = re.fullmatch(r"(C\d+\|[QEX]\|)op_id=(\d+)\|(seq=\d+)\|\+\d+\.\d{6}(.*)", line)
        number = ids.setdefault(found[2], len(ids) + 1) if found else 0
        lines.append(f"{found[1]}{number}|{found[3]}{found[4]}" if found else line)
    return lines


def test_the_lines():
    output = io.StringIO()

    def program(comm: Communicator) -> str:
        log = clog(output)
        log.register_with_comm(comm)
        x = torch.ones(4)
        comm.all_reduce(x, SUM, False)
        comm.all_reduce(x, SUM, False)
        comm.all_reduce(x, SUM, True).wait()
        comm.all_reduce(x, ReduceOp.PREMUL_SUM(2), False)
        comm.scatter(x, [torch.ones(4)], 0, False)
        comm.barrier(False)
        comm.finalize()
        return comm.get_uid()

    (uid,) = run_ranks(program, 1)
    first, *rest = steps(output.getvalue())
    stamp = re.fullmatch(r"V\|1\|base_timestamp=(\d+\.\d{6})", first)
    assert stamp
    assert abs(float(stamp[1]) - time.time()) < 600
    assert rest == [
        f"new_comm|comm=ranks|rank=0|world_size=1|backend=shm|uid={uid}",
        "C1|sig|all_reduce|in_count=4|dtype=float32|red_op=sum|async_op=f|comm=ranks",
        "C1|Q|1|seq=1",
        "C1|E|1|seq=1",
        "C1|Q|2|seq=2",
        "C1|E|2|seq=2",
        "C2|sig|all_reduce|in_count=4|dtype=float32|red_op=sum|async_op=t|comm=ranks",
        "C2|Q|3|seq=3",
        "C2|E|3|seq=3",
        "C3|sig|all_reduce|in_count=4|dtype=float32|red_op=premul_sum|async_op=f|comm=ranks",
        "C3|Q|4|seq=4",
        "C3|E|4|seq=4",
        "C4|sig|scatter|in_count=4|dtype=float32|root=0|async_op=f|comm=ranks",
        "C4|Q|5|seq=5",
        "C4|E|5|seq=5",
        "C5|sig|barrier|async_op=f|comm=ranks",
        "C5|Q|6|seq=6",
        "C5|E|6|seq=6",
    ]


def test_messages_and_splits(tmp_path):
    def program(comm: Communicator) -> list[str]:
        me, other = comm.get_rank(), 1 - comm.get_rank()
        path = tmp_path / f"{me}.log"
        log = clog(path)
        log.register_with_comm(comm)
        x, y = torch.ones(2), torch.zeros(2)
        if me == 0:
            comm.send(x, other, False)
        else:
            comm.recv(y, other, False)
        comm.batch_op_create().send(x, other).recv(y, other).issue(False)
        child = comm.split([0, 1], "child")
        log.close()
        child.finalize()
        comm.barrier(False)
        return steps(path.read_text())[2:]

    zero, one = run_ranks(program, 2)
    assert zero[:3] == [
        "C1|sig|send|in_count=2|dtype=float32|peer=1|async_op=f|comm=ranks",
        "C1|Q|1|seq=1",
        "C1|E|1|seq=1",
    ]
    assert one[:3] == [
        "C1|sig|recv|in_count=0|dtype=float32|peer=0|async_op=f|comm=ranks",
        "C1|Q|1|seq=1",
        "C1|E|1|seq=1",
    ]
    assert (
        zero[3:]
        == one[3:]
        == [
            "C2|sig|batch|num_ops=2|async_op=f|comm=ranks",
            "C2|Q|2|seq=0",
            "C2|E|2|seq=0",
            "C3|sig|split|async_op=f|comm=ranks",
            "C3|Q|3|seq=0",
            "C3|E|3|seq=0",
        ]
    )


def test_an_error_is_named(raised):
    outputs = [io.StringIO(), io.StringIO()]

    def program(comm: Communicator) -> None:
        log = clog(outputs[comm.get_rank()])
        log.register_with_comm(comm)
        x = torch.ones(2 + comm.get_rank())
        assert type(raised(comm.all_reduce, x, SUM, False)) is MismatchError
        work = comm.all_reduce(x, SUM, True)
        assert type(raised(work.wait)) is MismatchError
        comm.finalize()

    run_ranks(program, 2)
    for output in outputs:
        assert [line for line in steps(output.getvalue()) if re.match(r"C\d+\|[^s]", line)] == [
            "C1|Q|1|seq=1",
            "C1|X|1|seq=1|MismatchError",
            "C2|Q|2|seq=2",
            "C2|X|2|seq=2|MismatchError",
        ]


def test_an_asynchronous_operation_ends_when_it_has_run():
    come = threading.Event()
    output = io.StringIO()

    def program(comm: Communicator) -> None:
        if comm.get_rank() == 1:
            assert come.wait(20)
            comm.barrier(False)
            return
        log = clog(output)
        log.register_with_comm(comm)
        work = comm.barrier(True)
        assert "|Q|" in output.getvalue()
        assert "|E|" not in output.getvalue()
        come.set()
        work.wait()
        assert "|E|" in output.getvalue()

    run_ranks(program, 2)


def test_registering_twice():
    """Refused, and nothing is written; but ranks that are threads, and other communicators, may share one."""
    output = io.StringIO()
    log = clog(output)

    def program(comm: Communicator) -> None:
        log.register_with_comm(comm)
        with pytest.raises(InvalidArgumentError, match="already registered"):
            log.register_with_comm(comm)
        child = comm.split([0, 1])
        log.register_with_comm(child)
        child.finalize()

    run_ranks(program, 2)
    new = sorted(re.findall(r"new_comm\|comm=(\w+)\|rank=(\d)", output.getvalue()))
    assert new == [("ranks", "0"), ("ranks", "1"), ("ranks_0", "0"), ("ranks_0", "1")]


def test_where_it_goes(tmp_path, capsys):
    def program(comm: Communicator) -> None:
        log = clog()
        log.register_with_comm(comm)
        comm.barrier(False)
        log.close()
        comm.barrier(False)
        for _ in range(2):
            log = clog(str(tmp_path / "log"))  # appends
            log.close()

    run_ranks(program, 1)
    assert capsys.readouterr().err.count("|Q|") == 1
    assert (tmp_path / "log").read_text().count("V|1|") == 2
