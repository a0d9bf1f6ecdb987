"""Communicators of some of the ranks, again and again, over every kind of store."""

import threading

import pytest
import torch
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore

import unicomm
from unicomm.testing import run_ranks


def total(comm, value):
    x = torch.tensor([value])
    comm.all_reduce(x, unicomm.ReduceOp.SUM, False)
    return x.item()


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_order_of_the_list_is_the_order_of_the_ranks(backend):
    def program(comm):
        child = comm.split([2, 0, 1], "turned")
        out = torch.empty(3, dtype=torch.int64)
        child.all_gather_single(out, torch.tensor([comm.get_rank()]), False)
        facts = child.get_rank(), child.get_size(), child.get_ranks(), child.get_name(), out.tolist()
        child.finalize()
        return facts

    everyone = run_ranks(program, 3, backend=backend)
    assert [f[0] for f in everyone] == [1, 2, 0]
    assert all(f[1:] == (3, [2, 0, 1], "turned", [2, 0, 1]) for f in everyone)


def test_only_members_take_part():
    """Overlapping groups, made in an order of their own on each rank; others pass [] or do not call."""

    def program(comm):
        me = comm.get_rank()
        results = {}
        for ranks in ([0, 1], [1, 2], [2, 3], [0, 3]):
            if me in ranks:
                with comm.split(ranks, "pair") as child:
                    results[tuple(ranks)] = total(child, 10.0**me)
        assert comm.split([], "nobody") is None
        if me == 2:
            with comm.split([2], "alone") as child:
                results["alone"] = total(child, 5.0)
        return results

    everyone = run_ranks(program, 4)
    assert everyone[0] == {(0, 1): 11.0, (0, 3): 1001.0}
    assert everyone[2] == {(1, 2): 110.0, (2, 3): 1100.0, "alone": 5.0}


def test_nested_and_longer_lived_than_the_parent():
    def program(comm):
        half = comm.split([r for r in range(4) if r % 2 == comm.get_rank() % 2], "half")
        quarter = half.split([half.get_rank()], "quarter")
        both = half.split([1, 0], "both")
        comm.finalize()
        half.finalize()
        facts = quarter.get_ranks(), both.get_ranks(), total(both, 1.0 + comm.get_rank())
        quarter.finalize()
        both.finalize()
        return facts

    everyone = run_ranks(program, 4)
    assert everyone[1] == ([1], [3, 1], 6.0)
    assert everyone[2] == ([2], [2, 0], 4.0)


def test_same_name_again_and_again():
    def program(comm):
        sums = []
        for i in range(20):
            with comm.split([0, 1, 2], "again") as child:
                sums.append(total(child, float(i)))
        return sums

    assert run_ranks(program, 3) == [[3.0 * i for i in range(20)]] * 3


def test_timeout_and_hints_are_inherited():
    def program(comm):
        child = comm.split([0, 1], "a")
        other = comm.split([0, 1], "b", hints={"slot_bytes": "32K"}, timeout=7)
        facts = [(c.get_timeout(), dict(c.get_options().hints)) for c in (child, other)]
        child.finalize()
        other.finalize()
        return facts

    everyone = run_ranks(program, 2, timeout=21, hints={"slot_bytes": "64K"})
    assert everyone == [[(21.0, {"slot_bytes": "64K"}), (7.0, {"slot_bytes": "32K"})]] * 2


@pytest.mark.parametrize("ranks", [[0, 0], [0, 5], [1], [-1, 0], ["0"], [0, 1.0], 3])
def test_bad_ranks(ranks):
    def program(comm):
        if comm.get_rank() == 0:
            with pytest.raises(unicomm.InvalidArgumentError) as caught:
                comm.split(ranks, "bad")
            assert caught.value.op == "split"
            assert caught.value.comm == comm.get_name()
        return total(comm, 1.0)

    assert run_ranks(program, 2) == [2.0, 2.0]


@pytest.fixture(params=["hash", "file", "tcp", "prefix"])
def stores(request, tmp_path):
    """One store for each of three ranks, of the same contents."""
    if request.param == "file":
        return [FileStore(str(tmp_path / "store"), 3) for _ in range(3)]
    if request.param == "tcp":
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        clients = [TCPStore("127.0.0.1", server.port, is_master=False) for _ in range(2)]
        return [server, *clients]
    store = HashStore()
    return [PrefixStore("deep", PrefixStore("er", store)) if request.param == "prefix" else store] * 3


def test_created_and_finalized_under_one_name_and_store(stores):
    results = {}

    def rank_main(rank):
        sums = []
        for i in range(5):
            with unicomm.new_comm(
                "shm", "cpu", name="again", store=stores[rank], rank=rank, size=3, timeout=30
            ) as comm:
                sums.append(total(comm, float(i)))
                with comm.split([0, 1, 2], "child") as child:
                    sums.append(total(child, 1.0))
        results[rank] = sums

    threads = [threading.Thread(target=rank_main, args=(r,), daemon=True) for r in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    expected = [0.0, 3.0, 3.0, 3.0, 6.0, 3.0, 9.0, 3.0, 12.0, 3.0]
    assert results == dict.fromkeys(range(3), expected)
