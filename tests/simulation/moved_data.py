"""The tensors of a program's operations, and what they have to become."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

import unicomm
from unicomm.comms.communicator import Communicator
from unicomm.comms.execution.issued import ANY_RANK
from unicomm.comms.work import Work


def collective(
    comm: Communicator, op: dict[str, Any], me: int, n: int
) -> tuple[Callable[[], Work], Callable[[], str]]:
    """The call of a collective, and what then compares its result: "" if that is right."""
    kind, count, later, root = op["kind"], op["count"], op["later"], op["root"] % n
    mine = torch.full((count,), float(me + 1))
    known: dict[str, Any] = {"async_op": later, "timeout": op["timeout"]}
    everyone = torch.arange(1.0, n + 1).repeat_interleave(count)
    if kind == "barrier":
        return lambda: comm.barrier(**known), lambda: ""
    if kind == "all_reduce":
        expected = torch.full((count,), n * (n + 1) / 2)
        return lambda: comm.all_reduce(mine, unicomm.ReduceOp.SUM, **known), lambda: _differs(mine, expected)
    if kind == "broadcast":
        expected = torch.full((count,), float(root + 1))
        return lambda: comm.broadcast(mine, root, **known), lambda: _differs(mine, expected)
    out = torch.zeros(n * count)
    if kind == "all_gather_single":
        return lambda: comm.all_gather_single(out, mine, **known), lambda: _differs(out, everyone)
    given = mine.repeat(n)
    return lambda: comm.all_to_all_single(out, given, **known), lambda: _differs(out, everyone)


def _differs(found: torch.Tensor, expected: torch.Tensor) -> str:
    if torch.equal(found, expected):
        return ""
    return f"wrong data: {found.tolist()[:8]} instead of {expected.tolist()[:8]}"


def _sends(op: dict[str, Any], n: int) -> list[tuple[int, int, int, int, float]]:
    """(from, to, tag, elements, value) of each message; with receives from any rank, all of one size."""
    found = []
    for i, (source, to, tag, count) in enumerate(op["sends"]):
        if source < n and to < n:
            # With any sources a tag of its own: a rank may be in its next operation already.
            tag_and_count = (op["tag"], 3) if op["any"] else (tag, count)
            found.append((source, to, *tag_and_count, float(i + 1)))
    return found


def posts(
    op: dict[str, Any], me: int, n: int, rng: random.Random
) -> list[tuple[bool, int, torch.Tensor, int, Callable[[], str]]]:
    """This rank's sends and receives, in an order that keeps that of each pair and tag."""
    found: list[tuple[bool, int, torch.Tensor, int, Callable[[], str]]] = []
    for source, to, tag, count, value in _sends(op, n):
        if source == me:
            tensor = torch.full((count,), value)
            found.append((True, to, tensor, tag, lambda: ""))
        elif to == me:
            tensor = torch.zeros(count)
            peer = ANY_RANK if op["any"] else source
            check = (lambda: "") if op["any"] else _comparison(tensor, torch.full((count,), value))
            found.append((False, peer, tensor, tag, check))
    if rng.random() < 0.5:  # receives first, or sends first
        found.sort(key=lambda one: one[0], reverse=rng.random() < 0.5)
    return found


def _comparison(tensor: torch.Tensor, expected: torch.Tensor) -> Callable[[], str]:
    return lambda: _differs(tensor, expected)


def all_came(op: dict[str, Any], me: int, n: int, tensors: list[torch.Tensor]) -> str:
    expected = sorted(value for _, to, _, _, value in _sends(op, n) if to == me)
    found = sorted(float(tensor[0]) for tensor in tensors)
    return "" if found == expected else f"wrong messages: {found} instead of {expected}"
