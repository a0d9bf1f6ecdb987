"""The asynchronous forms: values and gradients of the synchronous ones, and graphs that Inductor reorders."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable

import pytest
import torch

from tests.c10d.test_functional import CASES, check_values_and_gradients, group_of
from tests.old_torch import not_with_old_torch
from unicomm import Communicator, InvalidArgumentError, functional, new_comm
from unicomm.c10d.compat import HashStore
from unicomm.testing import run_ranks

pytestmark = not_with_old_torch("has no custom operators that take process groups")
NAMES = [name.removesuffix("_async") for name in functional.__all__ if name.endswith("_async")]
ASYNC_CASES = [case for case in CASES if case.split()[0] in NAMES]


def test_every_form_has_a_case():
    assert {case.split()[0] for case in ASYNC_CASES} == {*NAMES}
    assert len(NAMES) == 6


@pytest.mark.parametrize("kind", ["communicator", "process group"])
@pytest.mark.parametrize("case", ASYNC_CASES)
def test_values_and_gradients(case, kind):
    def compare(y, expected):
        assert type(y).__name__ == "AsyncCollectiveTensor"
        assert y.shape == expected.shape
        torch.testing.assert_close(y * 1, expected * 1)

    check_values_and_gradients(getattr(functional, case.split()[0] + "_async"), case, kind, compare)


def test_a_rank_goes_on_before_the_others_have_started():
    """Rank 0 starts, and then sends what rank 1 waits for before it starts."""

    def program(comm: Communicator, messages: Communicator) -> None:
        x, word = torch.ones(3), torch.zeros(1)
        if comm.get_rank() == 1:
            messages.recv(word, 0)
        y = functional.all_reduce_async(x, "sum", comm)
        if comm.get_rank() == 0:
            messages.send(word, 1)
        assert (y + 1).tolist() == [3.0] * 3

    def with_two(comm: Communicator) -> None:
        with comm.split([0, 1], "messages") as messages:
            program(comm, messages)

    run_ranks(with_two, 2)


def test_errors_come_before_anything_happens(raised):
    def program(comm: Communicator) -> None:
        x = torch.ones(3)
        for error in (
            raised(functional.all_reduce_async, x, "median", comm),
            raised(functional.reduce_scatter_single_async, x, "sum", comm),
            raised(functional.all_to_all_single_async, x, comm),
        ):
            assert type(error) is InvalidArgumentError
        assert (functional.all_reduce_async(torch.ones(1), "sum", comm) * 1).item() == 2.0

    run_ranks(program, 2)


def overlapping(x: torch.Tensor, w: torch.Tensor, group: object) -> torch.Tensor:
    y = functional.all_reduce_async(x * 2, "sum", group)
    z = torch.mm(w, w).relu()
    return y.sin() + z


def order_in_code(function: Callable[..., object], *arguments: object) -> list[str]:
    """The starts, waits and matrix products in the code that Inductor makes."""
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    _, code = run_and_get_code(torch.compile(function, fullgraph=True), *arguments)
    calls = code[0][code[0].index("def call(") :]
    return re.findall(r"(?<=extern_kernels\.)mm(?=\()|(?<=_c10d_functional\.)\w+(?=\.default\()", calls)


@pytest.mark.parametrize("kind", ["communicator", "process group"])
def test_inductor_moves_the_wait_to_the_first_use(kind):
    """If it is told to reorder, as with torch's own functions; without, it waits where the program starts."""
    import torch._inductor.config as inductor

    moving = {
        "reorder_for_compute_comm_overlap": True,
        "reorder_for_compute_comm_overlap_passes": ["sink_waits"],
    }
    with new_comm("fake", torch.device("cpu"), rank=0, size=2) as comm:
        arguments = (torch.ones(4, 4), torch.ones(4, 4), group_of(comm, kind))
        with inductor.patch(reorder_for_compute_comm_overlap=False):  # the docs' examples set it
            assert order_in_code(overlapping, *arguments) == ["all_reduce_", "wait_tensor", "mm"]
        with inductor.patch(moving):
            assert order_in_code(overlapping, *arguments) == ["all_reduce_", "mm", "wait_tensor"]


def test_the_backward_is_asynchronous_too():
    graphs: list[torch.fx.Graph] = []

    def note(module: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        graphs.append(module.graph)
        return module

    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    with new_comm("fake", torch.device("cpu"), rank=0, size=2) as comm:
        compiled = torch.compile(
            lambda x: functional.all_gather_single_async(x, comm) * 2,
            fullgraph=True,
            backend=aot_autograd(fw_compiler=note, bw_compiler=note),
        )
        x = torch.ones(2, 3, requires_grad=True)
        compiled(x).sum().backward()
        assert x.grad is not None
    targets = [[str(n.target) for n in graph.nodes if "c10d" in str(n.target)] for graph in graphs]
    assert targets == [
        ["_c10d_functional.all_gather_into_tensor.default", "_c10d_functional.wait_tensor.default"],
        ["_c10d_functional.reduce_scatter_tensor.default", "_c10d_functional.wait_tensor.default"],
    ]


@pytest.mark.parametrize("kind", ["communicator", "process group"])
def test_a_graph_serves_another_group(kind):
    """The group is an input: another one of the same size takes part itself, in the same graph."""
    torch._dynamo.reset()
    device, seen = torch.device("cpu"), []
    compiled = torch.compile(
        lambda x, group: functional.all_reduce_async(x, "sum", group) * 2, fullgraph=True, backend="aot_eager"
    )
    counts = torch._dynamo.utils.counters["stats"]
    graphs = []
    for name in ("first", "second"):
        with new_comm("fake", device, name, rank=0, size=2) as comm:
            comm.register_pre_hook(lambda *_, name=name, **__: seen.append(name))
            compiled(torch.ones(2), group_of(comm, kind))
        graphs.append(counts["unique_graphs"])
    assert seen == ["first", "second"]
    assert graphs[0] == graphs[1]


def test_a_communicator_is_let_go():
    """The process group of the asynchronous forms, which holds it, does not outlive it."""
    comm = new_comm("shm", "cpu", name="let go", rank=0, size=1, store=HashStore())
    assert (functional.all_reduce_async(torch.ones(1), "sum", comm) * 1).item() == 1.0
    comm.finalize()
    known = weakref.ref(comm)
    del comm
    gc.collect()
    assert known() is None
