"""Wire formats whose chunks travel while others are encoded: bits, order, failures."""

import threading

import pytest
import torch

import unicomm
from tests.comms import inside
from unicomm import ReduceOp
from unicomm.comms.execution.composed import encoded, exchanges
from unicomm.testing import run_ranks

SUM, AVG = ReduceOp.SUM, ReduceOp.AVG
COUNT = 70001
PLACES = [("gloo", "ab"), ("gloo", "abc"), ("tcp", "abc"), ("auto", "aabb"), ("auto", "abab")]


@pytest.fixture
def swaps(monkeypatch):
    """How many swaps have begun that go on while a rank computes."""
    begun, begin = [], exchanges.Overlapping.begin

    def counted(self, ins, outs):
        begun.append(1)
        return begin(self, ins, outs)

    monkeypatch.setattr(exchanges.Overlapping, "begin", counted)
    return begun


def run(program, place, **more):
    backend, hosts = place
    hints = {"hosts": ",".join(hosts)} if backend == "auto" else None
    return run_ranks(program, len(hosts), backend=backend, hints=hints, **more)


def values(rank, count=COUNT):
    return torch.randn(count, generator=torch.Generator().manual_seed(rank)) * (1 + rank)


def bits(*tensors):
    return [bytes(t.contiguous().view(torch.uint8).numpy()) for t in tensors]


@pytest.mark.parametrize("rounding", ["nearest", "stochastic:3"])
@pytest.mark.parametrize("fmt", ["bfloat16", "float8_e4m3fn", "mxfp8"])
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_chunks_change_no_bits(place, fmt, rounding, monkeypatch, swaps):
    hints, size = {"wire": fmt, "wire_rounding": rounding}, len(place[1])

    def program(comm):
        me, found, engine = comm.get_rank(), [], inside.engine(comm)
        for op in (SUM, AVG, ReduceOp.PREMUL_SUM(0.5)):
            for lost in (None, torch.full((COUNT,), 0.25)):
                x = values(me)
                engine.collective("all_reduce", (x,), False, hints, None, op=op, residual=lost)
                found += [x] if lost is None else [x, lost]
        parts = [values(size * me + r, 3000 + 700 * r) for r in range(size)]
        lost = torch.full((sum(part.numel() for part in parts),), 0.125)
        out = torch.empty(3000 + 700 * me)
        engine.collective("reduce_scatter_v", (out, parts), False, hints, None, op=AVG, residual=lost)
        whole = torch.empty(size * COUNT)
        comm.all_gather_single(whole, values(me), hints=hints)
        uneven = [torch.empty(2000 + 900 * r) for r in range(size)]
        comm.all_gather_v(uneven, values(me, 2000 + 900 * me), hints=hints)
        swapped = torch.empty(size * 5000)
        comm.all_to_all_single(swapped, values(me, size * 5000), hints=hints)
        return bits(*found, out, lost, whole, *uneven, swapped)

    whole = run(program, place)
    assert not swaps
    monkeypatch.setattr(encoded, "CHUNK", 1280)  # ten of the longest blocks
    chunks = run(program, place)
    assert len(swaps) > 100
    assert whole == chunks


@pytest.mark.parametrize("place", [("gloo", "abc"), ("tcp", "abc"), ("auto", "aabb")], ids=str)
def test_a_rank_that_fails_in_a_chunk_ends_the_operation_on_all(place, monkeypatch):
    monkeypatch.setattr(encoded, "CHUNK", 1280)
    begin, begun = exchanges.Overlapping.begin, threading.local()

    def failing(self, ins, outs):
        begun.count = getattr(begun, "count", 0) + 1
        if getattr(begun, "fails", False) and begun.count > 7:
            raise ValueError("a defect in this rank")
        return begin(self, ins, outs)

    monkeypatch.setattr(exchanges.Overlapping, "begin", failing)

    def program(comm):
        begun.fails = comm.get_rank() == 1
        expected = ValueError if begun.fails else unicomm.CommError
        with pytest.raises(expected):
            comm.all_reduce(values(0, 1 << 17), SUM, hints={"wire": "int8"})
        with pytest.raises(unicomm.CommError):
            comm.barrier()

    run(program, place)


@pytest.mark.parametrize("place", [("gloo", "ab"), ("tcp", "ab"), ("auto", "aabb")], ids=str)
def test_a_rank_that_stays_away_in_a_chunk_is_a_timeout(place, monkeypatch):
    monkeypatch.setattr(encoded, "CHUNK", 1280)
    begin, here, others_done = exchanges.Overlapping.begin, threading.local(), threading.Event()

    def stuck(self, ins, outs):
        here.count = getattr(here, "count", 0) + 1
        if getattr(here, "stays", False) and here.count == 7:
            others_done.wait(60)
        return begin(self, ins, outs)

    monkeypatch.setattr(exchanges.Overlapping, "begin", stuck)

    def program(comm):
        here.stays = comm.get_rank() == 1
        kinds = unicomm.CommError if here.stays or place[0] == "auto" else unicomm.CommTimeoutError
        with pytest.raises(kinds):
            comm.all_reduce(values(0, 1 << 17), SUM, hints={"wire": "int8"}, timeout=2.0)
        others_done.set()

    run(program, place)


def test_stages_keep_some_chunks_under_way():
    log = []

    def stage(name):
        def begin(chunk):
            log.append((name, chunk))
            return lambda: log.append((f"{name} over", chunk))

        return begin

    exchanges.run_stages(3, 2, stage("a"), stage("b"))
    begins = [("a", 0), ("a", 1), ("a", 2)]
    ends = [x for chunk in range(3) for x in (("a over", chunk), ("b", chunk))]
    assert log == begins + ends
    log.clear()
    exchanges.run_stages(5, 1, stage("a"), stage("b"))
    assert log[:5] == [("a", 0), ("a", 1), ("a over", 0), ("b", 0), ("a", 2)]
    log.clear()
    exchanges.run_stages(1, 3, stage("a"), stage("b"), stage("c"))
    assert log == [("a", 0), ("a over", 0), ("b", 0), ("b over", 0), ("c", 0)]
