"""Dispatch and combine with gradients, against the same arithmetic on all rows in one place; the example."""

import contextlib
import gc
import importlib.util
import json
import sys
import weakref

import numpy as np
import pytest
import torch

from tests import ROOT
from tests.symm.exchanges import plans
from unicomm import CommError, InvalidArgumentError, NotReadyError, symm
from unicomm.testing import run_ranks

EXAMPLE = ROOT / "examples" / "moe.py"
WIDTH = 3


def in_one_place(plan, rows, weights, after):
    """Loss of all ranks, where expert g makes weights[g] * row ** 3 of each row; a graph over all ranks."""
    loss = rows[0].new_zeros(())
    for splits, mine, factor in zip(plan, rows, after, strict=True):
        expert = torch.repeat_interleave(torch.arange(len(splits)), torch.as_tensor(splits))
        loss = loss + (factor * weights[expert] * mine**3).sum()
    return loss


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("experts", "align"), [(1, 1), (2, 8), (3, 16)])
def test_gradients_are_those_of_one_place(n, experts, align):
    def program(comm):
        me, k = comm.get_rank(), n * experts
        symm.init(comm)
        rng = np.random.default_rng(5 * n + experts)  # the same numbers on all ranks
        exchange = symm.ExpertExchange(comm, experts, 40 * k, WIDTH, dtype=torch.float64, major_align=align)
        for plan in plans(rng, n, experts):
            rows = [torch.from_numpy(rng.standard_normal((int(s.sum()), WIDTH))) for s in plan]
            after = [torch.from_numpy(rng.standard_normal(r.shape)) for r in rows]
            weights = torch.from_numpy(rng.standard_normal((k, WIDTH)))

            wanted = [r.clone().requires_grad_() for r in rows]
            wanted_weights = weights.clone().requires_grad_()
            loss = in_one_place(plan, wanted, wanted_weights, after)
            first = torch.autograd.grad(loss, [*wanted, wanted_weights], create_graph=True)
            second = torch.autograd.grad(sum((g**2).sum() for g in first[:-1]), wanted)

            x = rows[me].clone().requires_grad_()
            own = weights[me * experts : (me + 1) * experts].clone().requires_grad_()
            there, route = exchange.dispatch(x, plan[me].tolist())
            assert route.splits.tolist() == plan[me].tolist()
            came = route.splits_offsets[0].view(experts, n).sum(1)
            for block, expected, count in zip(
                route.blocks, plan[:, me * experts : (me + 1) * experts].sum(0), came, strict=True
            ):
                assert count == expected
                assert block.start % align == 0
                assert (block.stop - block.start) % align == 0
                assert not there[block.start + int(count) : block.stop].any()  # padding
            done = torch.cat([own[e] * there[b] ** 3 for e, b in enumerate(route.blocks)])
            back = exchange.combine(done, route)
            grads = torch.autograd.grad((after[me] * back).sum(), [x, own], create_graph=True)
            torch.testing.assert_close(grads[0], first[me])
            torch.testing.assert_close(grads[1], first[-1][me * experts : (me + 1) * experts])
            (again,) = torch.autograd.grad((grads[0] ** 2).sum(), x)
            torch.testing.assert_close(again, second[me])
        exchange.free()

    run_ranks(program, n)


def test_an_earlier_graph_is_not_spoilt_by_a_later_exchange():
    def program(comm):
        symm.init(comm)
        exchange = symm.ExpertExchange(comm, 1, 4, WIDTH, dtype=torch.float64)
        x, y = (torch.full((4, WIDTH), v, dtype=torch.float64, requires_grad=True) for v in (2.0, 5.0))
        ends = []
        for tensor in (x, y):
            there, route = exchange.dispatch(tensor, [2, 2])
            ends.append(exchange.combine(there**2, route))
        for end in ends:  # of the earlier one first
            end.sum().backward()
        return x.grad.unique().tolist(), y.grad.unique().tolist()

    assert run_ranks(program, 2) == [([4.0], [10.0])] * 2


def test_bad_calls_say_so_before_anything_moves(raised):
    def program(comm):
        symm.init(comm)
        made = symm.ExpertExchange(comm, 2, 4, WIDTH)
        x = torch.ones(4, WIDTH)
        _, route = made.dispatch(x, [1, 1, 1, 1])
        bad = [
            (made.dispatch, (x, [1, 1, 1]), "splits has 3 numbers"),
            (made.dispatch, (x, torch.ones(4)), "torch.float32"),
            (made.dispatch, (x, "abc"), "whole numbers"),
            (made.dispatch, (x, [5, -1, 0, 0]), "negative number -1"),
            (made.dispatch, (x, [1, 1, 1, 2]), r"not \(5, 3\)"),
            (made.dispatch, (x.double(), [1, 1, 1, 1]), "torch.float64"),
            (made.dispatch, ([1.0], [1, 1, 1, 1]), "list"),
            (made.dispatch, (torch.ones(5, WIDTH), [2, 1, 1, 1]), "make it with more"),
            (made.combine, (x[:1], route), "as dispatch returned"),
            (symm.ExpertExchange, (comm, 0, 4, WIDTH), "experts=0"),
        ]
        errors = [raised(call, *arguments) for call, arguments, _ in bad]
        made.combine(torch.ones(4, WIDTH), route)  # the communicator is as good as before
        made.free()
        errors.append(raised(made.dispatch, x, [1, 1, 1, 1]))
        return errors, [text for _, _, text in bad]

    for errors, texts in run_ranks(program, 2):
        for error, text in zip(errors[:-1], texts, strict=True):
            assert isinstance(error, InvalidArgumentError)
            with pytest.raises(InvalidArgumentError, match=text):
                raise error
        assert isinstance(errors[-1], NotReadyError)


def test_too_little_capacity_is_an_error_on_all_ranks(raised):
    def program(comm):
        symm.init(comm)
        made = symm.ExpertExchange(comm, 1, 4, WIDTH, capacity=6)
        x = torch.ones(4, WIDTH)
        error = raised(made.dispatch, x, [4, 0])
        there, _ = made.dispatch(x, [2, 2])
        return error, len(there)

    for error, rows in run_ranks(program, 2):
        assert isinstance(error, InvalidArgumentError)
        assert error.culprits == (0,)
        assert rows == 4


def test_a_failed_backward_keeps_nothing_alive():
    """Its error's traceback holds the graph, which holds the exchange and its communicator."""

    def program(comm):
        symm.init(comm)
        exchange = symm.ExpertExchange(comm, 1, 4, WIDTH)
        x = torch.ones(4, WIDTH, requires_grad=True)
        rows, route = exchange.dispatch(x, [2, 2])
        out = exchange.combine(rows * 2, route)
        comm.abort()
        with contextlib.suppress(CommError):
            out.sum().backward()
        return weakref.ref(comm), weakref.ref(exchange)

    kept = run_ranks(program, 2)
    gc.collect()
    assert [(comm(), exchange()) for comm, exchange in kept] == [(None, None)] * 2


def test_the_example(monkeypatch, tmp_path):
    pytest.importorskip("sklearn")
    spec = importlib.util.spec_from_file_location("moe_example", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    result = tmp_path / "result.json"
    monkeypatch.setattr(sys, "argv", ["moe.py", "--epochs=2", f"--result={result}"])
    monkeypatch.delenv("RANK", raising=False)
    threads = torch.get_num_threads()
    try:
        assert example.main() == 0  # it compares outputs, gradients and losses itself
    finally:
        torch.set_num_threads(threads)
    figures = json.loads(result.read_text())
    assert figures["ranks"] == 4
    assert figures["losses"][-1] < 0.5 * figures["losses"][0]


def test_combine_returns_more_rows_than_the_capacity():
    """Of which there is as much as comes: rank 0 sends twice as many rows as any rank gets."""

    def program(comm):
        symm.init(comm)
        exchange = symm.ExpertExchange(comm, 1, 4, WIDTH, capacity=2)
        sent = 4 if comm.get_rank() == 0 else 0
        x = torch.randn(sent, WIDTH)
        there, route = exchange.dispatch(x, [2, 2] if sent else [0, 0])
        assert torch.equal(exchange.combine(there * 2, route), x * 2)
        exchange.free()

    run_ranks(program, 2)


def test_combine_takes_what_dispatch_returns_with_a_small_capacity():
    """The last expert's padding goes beyond the capacity, which counts rows; gradients come back, too."""

    def program(comm):
        symm.init(comm)
        exchange = symm.ExpertExchange(comm, 2, 4, WIDTH, major_align=8, capacity=10)
        x = torch.randn(4, WIDTH, requires_grad=True)
        there, route = exchange.dispatch(x, [1, 1, 1, 1])
        assert len(there) == 16
        exchange.combine(there * 2, route).sum().backward()
        assert x.grad.tolist() == [[2.0] * WIDTH] * 4
        exchange.free()

    run_ranks(program, 2)
