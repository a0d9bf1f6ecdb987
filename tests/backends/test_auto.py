"""`auto` chooses by where the ranks are, for each communicator anew."""

import re
import threading
from functools import partial

import pytest
import torch

import unicomm
from tests.backends.hosts.between import BETWEEN
from tests.threads import results
from tests.ucx_here import needs_ucx
from unicomm.backends import auto
from unicomm.backends.out_of_band import refuse
from unicomm.testing import conformance, run_ranks


def test_one_host_is_shared_memory():
    def program(comm):
        conformance.check(comm, "all_reduce", lambda case: case.count < 100)
        return comm.get_backend()

    assert run_ranks(program, 3, backend="auto") == ["shm"] * 3


def test_several_hosts_share_what_memory_they_can(monkeypatch):
    """Ranks 0 and 1 on one host, rank 2 on another: told apart by what each says of its host."""
    here = threading.local()
    monkeypatch.setattr(auto, "host_identity", lambda: f"name boot-{here.host} ns")

    store = torch.distributed.HashStore()

    def rank_program(rank):
        here.host = rank // 2
        with unicomm.new_comm("auto", "cpu", store=store, rank=rank, size=3, timeout=20) as comm:
            x = torch.ones(3)
            comm.all_reduce(x, unicomm.ReduceOp.SUM, False)
            together = comm.split([0, 1], "host") if rank < 2 else None
            apart = comm.split([2, 0], "apart") if rank != 1 else None
            kinds = [c.get_backend() if c else None for c in (comm, together, apart)]
            for child in (together, apart):
                if child is not None:
                    child.barrier(False)
                    child.finalize()
            return kinds, x.tolist()

    assert results([partial(rank_program, rank) for rank in range(3)]) == [
        (["hosts", "shm", BETWEEN], [3.0] * 3),
        (["hosts", "shm", None], [3.0] * 3),
        (["hosts", None, BETWEEN], [3.0] * 3),
    ]


def test_hints_of_both_are_taken():
    assert run_ranks(lambda c: c.get_size(), 2, backend="auto", hints={"slot_bytes": "64K", "interface": ""})


HOSTS = {"hosts": "a,b"}


def kind(comm):
    return comm.get_backend()


def two(**hints):
    """What `auto` makes of two ranks on two hosts."""
    return run_ranks(kind, 2, backend="auto", hints=HOSTS | hints)


def test_tcp_between_hosts_unless_asked_for_another():
    assert two() == ["tcp"] * 2
    assert two(between="gloo") == ["gloo"] * 2


@pytest.fixture
def _every_rank_has_rdma(monkeypatch):
    monkeypatch.setattr(auto, "rdma_ports", lambda: ["mlx5_0:1"])


@needs_ucx
@pytest.mark.usefixtures("_every_rank_has_rdma")
def test_ucx_where_every_rank_has_a_network_for_it():
    assert two(devices="lo", tls="tcp") == ["ucx"] * 2
    assert two(between="tcp") == ["tcp"] * 2


@needs_ucx
def test_ucx_where_every_rank_was_told_how_to_use_it(monkeypatch):
    assert two(tls="tcp") == ["ucx"] * 2
    monkeypatch.setenv("UCX_TLS", "tcp")
    assert two() == ["ucx"] * 2


def test_tcp_where_a_rank_has_no_rdma(monkeypatch):
    ports = [["mlx5_0:1"], []]
    monkeypatch.setattr(auto, "rdma_ports", ports.pop)
    assert two() == ["tcp"] * 2
    assert not ports


@pytest.mark.usefixtures("_every_rank_has_rdma")
@pytest.mark.parametrize(
    ("versions", "reason"),
    [
        (["", "1.22.0"], "rank [01]: there is none"),
        (["1.22.0", "1.13.1"], r"rank 0 has UCX 1.[0-9.]+, rank 1 1.[0-9.]+"),
    ],
)
def test_tcp_where_not_all_have_the_same_ucx(monkeypatch, caplog, versions, reason):
    mine = threading.local()

    def lacks(path):
        mine.version = left.pop()
        return "" if mine.version else "there is none"

    monkeypatch.setattr(auto, "why_not", lacks)
    monkeypatch.setattr(auto, "open_library", lambda path: None)
    monkeypatch.setattr(auto, "version_text", lambda library: mine.version)
    left = list(versions)
    with caplog.at_level("INFO", "unicomm"):
        assert two() == ["tcp"] * 2
    assert re.search(f"'ranks': tcp, as there is no ucx between hosts, {reason}", caplog.text)
    left = list(versions)
    with pytest.raises(unicomm.UnsupportedError, match=f"no ucx between hosts, {reason}"):
        two(between="ucx")


@pytest.mark.usefixtures("_every_rank_has_rdma")
def test_tcp_where_ucx_does_not_connect(monkeypatch, caplog):
    def connect(setup):
        refuse(["", "no way"], setup.rendezvous, setup.name, "ucx")

    monkeypatch.setattr(auto, "_lack_of_ucx", lambda setup: "")
    monkeypatch.setattr(auto.UcxBackend, "connect", connect)
    assert two() == ["tcp"] * 2
    assert "tcp between hosts, because of this: ucx could not connect on rank 1: no way" in caplog.text
    with pytest.raises(unicomm.BackendError, match="no way"):
        two(between="ucx")
