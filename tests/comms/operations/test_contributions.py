"""Several contributions a rank: sums whose bits do not depend on which rank gives which."""

import pytest
import torch

import unicomm
from benchmarks.text_rank import train_reproducibly
from unicomm import ReduceOp
from unicomm.testing import run_ranks
from unicomm.torchcomms.hooks import NanCheckHook

#: As (backend, hosts of the ranks, more hints).
LAYOUTS = [
    *(("shm", "a", {}), ("shm", "aa", {}), ("shm", "aaaa", {}), ("gloo", "ab", {}), ("gloo", "abcd", {})),
    *(("auto", "aabb", {}), ("auto", "aabb", {"between": "gloo"}), ("tcp", "ab", {}), ("tcp", "abcd", {})),
]


def run(program, layout):
    backend, hosts, hints = layout
    if backend == "auto":
        hints = {**hints, "hosts": ",".join(hosts)}
    return run_ranks(program, len(hosts), backend=backend, hints=hints or None)


def parts(dtype, count):
    generator = torch.Generator().manual_seed(count)
    scale = torch.exp2(torch.randint(-12, 12, (4, count), generator=generator).double())
    return (torch.randn(4, count, generator=generator, dtype=torch.float64) * scale).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int32], ids=str)
def test_all_layouts_give_the_same_bits(dtype):
    def program(comm):
        n, me, found = comm.get_size(), comm.get_rank(), []
        for count in (1, 3, 5000):
            for op in (ReduceOp.SUM, ReduceOp.AVG):
                rows = parts(dtype, count).flip(0)[me::n].contiguous()
                out = torch.empty(count, dtype=dtype)
                comm.all_reduce_contributions(out, rows, op)
                assert torch.equal(rows, parts(dtype, count).flip(0)[me::n])
                found.append(bytes(out.view(torch.uint8).numpy()))
        return found

    def four_ranks(comm):
        found = []
        for count in (1, 3, 5000):
            for op in (ReduceOp.SUM, ReduceOp.AVG):
                x = parts(dtype, count)[comm.get_rank()].clone()
                comm.all_reduce(x, op, hints={"reduction": "reproducible"})
                found.append(bytes(x.view(torch.uint8).numpy()))
        return found

    want = run_ranks(four_ranks, 4)[0]
    for layout in LAYOUTS:
        assert run(program, layout) == [want] * len(layout[1]), layout


def test_what_does_not_fit_is_refused():
    def program(comm):
        out = torch.zeros(3)
        for bad in (torch.zeros(3), torch.zeros(2, 4), torch.zeros(0, 3), torch.zeros(2, 3).double(), [out]):
            with pytest.raises(unicomm.InvalidArgumentError, match="do not fit"):
                comm.all_reduce_contributions(out, bad, ReduceOp.SUM)
        rows = torch.ones(2, 3)
        for op in (ReduceOp.PRODUCT, ReduceOp.PREMUL_SUM(2.0)):
            with pytest.raises(unicomm.UnsupportedError):
                comm.all_reduce_contributions(out, rows, op)
        with pytest.raises(unicomm.UnsupportedError, match="no wire format"):
            comm.all_reduce_contributions(out, rows, ReduceOp.SUM, hints={"wire": "int8"})
        with pytest.raises(unicomm.MismatchError):
            comm.all_reduce_contributions(out, torch.ones(1 + comm.get_rank(), 3), ReduceOp.SUM)
        comm.all_reduce_contributions(out, rows.numpy(), ReduceOp.SUM)
        return out.tolist()

    for layout in (("shm", "aa", {}), ("gloo", "ab", {}), ("auto", "aab", {})):
        assert run(program, layout) == [[2.0 * len(layout[1])] * 3] * len(layout[1])


def test_training_has_the_same_bits_in_every_layout():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = [
            one
            for layout in LAYOUTS
            for one in run(lambda comm: train_reproducibly(comm, 3, 32, 1, 16, 8), layout)
        ]
    finally:
        torch.set_num_threads(before)
    assert all(one == found[0] for one in found)
    assert len(set(found[0][1])) == 3


def test_tensors_are_checked_as_those_of_any_operation(raised):
    def program(comm):
        n, out, values = comm.get_size(), torch.zeros(3), torch.arange(6.0).reshape(2, 3)
        for rows, total in (
            (values.clone().requires_grad_(), values.sum(0)),
            (values.repeat(1, 2)[:, ::2], values.repeat(1, 2)[:, ::2].sum(0)),
        ):
            comm.all_reduce_contributions(out, rows, ReduceOp.SUM)
            assert torch.equal(out, total * n)
        freed = torch.ones(2, 3)
        freed.untyped_storage().resize_(0)
        for rows, why in (
            (torch.complex(values, -values).conj().imag, "lazy negation"),
            (freed, "no memory"),
            (values.to_sparse(), "sparse"),
        ):
            assert why in str(raised(comm.all_reduce_contributions, out, rows, ReduceOp.SUM))

    for layout in (("shm", "aa", {}), ("gloo", "ab", {}), ("auto", "aab", {})):
        run(program, layout)


def test_hooks_get_what_is_read():
    def program(comm):
        checks = NanCheckHook(check_inputs=True, check_outputs=False)
        checks.register_with_comm(comm)
        out, rows = torch.full((3,), torch.nan), torch.ones(2, 3)
        comm.all_reduce_contributions(out, rows, ReduceOp.SUM)
        assert out.tolist() == [4.0] * 3
        rows[1, 1] = torch.nan
        with pytest.raises(unicomm.CommError, match="NaN detected in input"):
            comm.all_reduce_contributions(out, rows, ReduceOp.SUM)

    run(program, ("shm", "aa", {}))
