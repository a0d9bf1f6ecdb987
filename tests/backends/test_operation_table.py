"""Every row of the operation table is served by every built-in backend, or by completion from its messages.

Whether it is served rightly is what the conformance suite finds out, which has cases for every row.
"""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest

from unicomm.backends.auto import AutoBackend
from unicomm.backends.gloo.backend import GlooBackend
from unicomm.backends.hosts import collectives as hosts_collectives
from unicomm.backends.hosts.backend import HostsBackend
from unicomm.backends.mpi.backend import MpiBackend
from unicomm.backends.registry import built_in_backends, find_backend
from unicomm.comms.backend import Backend, RunsCollectives
from unicomm.comms.execution.composed.completion import composed_operations, is_native
from unicomm.comms.operations.call import Call
from unicomm.comms.operations.dtypes import DTYPES
from unicomm.comms.operations.reduction import RedOpType, ReduceOp, why_not
from unicomm.comms.operations.table import OPERATIONS, Kind, Operation
from unicomm.testing import conformance

# `auto` only chooses among the others, of which `hosts` has no name of its own.
BACKENDS = [find_backend(name) for name in built_in_backends()]
BACKENDS = [backend for backend in BACKENDS if backend is not AutoBackend] + [HostsBackend]
COLLECTIVES = [row for row in OPERATIONS.values() if row.kind is Kind.COLLECTIVE]
MESSAGES = [row for row in OPERATIONS.values() if row.kind is Kind.P2P]


def calls(row: Operation) -> list[Call]:
    """The row with every element type and reduction that the checks let through."""
    if not row.tensors:
        return [Call(row)]
    if not row.reduces:
        return [Call(row, dtype=dtype) for dtype in DTYPES]
    kinds = [ReduceOp(t) for t in RedOpType if t is not RedOpType.PREMUL_SUM] + [ReduceOp.PREMUL_SUM(2.0)]
    return [Call(row, dtype=dtype, op=op) for dtype in DTYPES for op in kinds if why_not(op, dtype) is None]


def unserved(backend: type[Backend], row: Operation) -> list[Call]:
    """Returns the calls of a collective that neither the backend nor completion runs."""
    if row.name in composed_operations():
        return []
    runs = issubclass(backend, RunsCollectives)
    return [call for call in calls(row) if not (runs and is_native(backend.capabilities, call))]


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
@pytest.mark.parametrize("row", COLLECTIVES, ids=lambda row: row.name)
def test_collectives(backend: type[Backend], row: Operation):
    assert calls(row)
    assert not unserved(backend, row)
    assert row.name in conformance.OPERATIONS


def test_a_row_that_is_not_served_is_noticed():
    added = replace(OPERATIONS["reduce_scatter"], name="added")
    assert all(unserved(backend, added) for backend in BACKENDS)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
@pytest.mark.parametrize("row", MESSAGES, ids=lambda row: row.name)
def test_messages(backend: type[Backend], row: Operation):
    assert not inspect.isabstract(backend)
    assert backend.exchange is not Backend.exchange
    assert row.name in ("send", "recv")  # the two kinds of a `Message`


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_declared_collectives_are_rows_and_have_a_way(backend: type[Backend]):
    """A backend that declares a collective has the code that runs it."""
    declared = backend.capabilities.operations
    assert declared <= {row.name for row in COLLECTIVES}
    assert not declared or issubclass(backend, RunsCollectives)
    if issubclass(backend, (GlooBackend, MpiBackend)):  # `run` finds the method by the operation's name
        assert all(callable(getattr(backend, f"_{name}", None)) for name in declared)
    if backend is HostsBackend:
        assert declared == frozenset(hosts_collectives.OPERATIONS_HERE)
