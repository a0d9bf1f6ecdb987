"""Dispatch and combine with gradients: the exchange of a mixture-of-experts layer.

What dispatch does, combine undoes. So the gradient of one is the other with the same splits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch

from unicomm.comms.communicator import Communicator
from unicomm.comms.errors import CommError, InvalidArgumentError, NotReadyError
from unicomm.comms.operations.numbers import tensor_shape

from .experts import all_to_all_vdev_2d, all_to_all_vdev_2d_offset
from .memory import empty, free, synchronize

Timeout = timedelta | float | None


@dataclass(frozen=True)
class Route:
    """Where the rows of one dispatch went: what combine, and both gradients, need to know.

    Attributes:
        splits: [n * e], the rows that this rank sent to expert x of rank p, at p * e + x.
        splits_offsets: [2, e * n], the rows that came for expert x from rank p, and where they begin, at
            x * n + p.
        blocks: for each of this rank's experts the part of the dispatched rows that is its.
    """

    splits: torch.Tensor
    splits_offsets: torch.Tensor
    blocks: tuple[slice, ...]


class ExpertExchange:
    """Sends rows to the ranks of their experts and gets them back, differentiably.

    Each of the n ranks has e experts. It holds the symmetric memory that all exchanges of one layer need; its
    tensors are ordinary ones, in which autograd may keep what it wants. All ranks have to dispatch, combine
    and go backward through both in the same order.
    """

    def __init__(
        self,
        comm: Communicator,
        experts: int,
        rows: int,
        width: int,
        *,
        capacity: int | None = None,
        dtype: torch.dtype | None = None,
        major_align: int = 1,
        timeout: Timeout = None,
    ) -> None:
        """Collective, with the same arguments on all ranks; `symm.init(comm)` comes first.

        Args:
            experts: e, of each rank.
            rows: the most that a rank sends at once. width: elements of a row.
            capacity: the most rows that a rank can receive, padding included. By default all ranks' rows may
                go to one; memory is used only as far as it was ever filled.
            dtype: of the rows; by default torch's default.
            major_align: each expert's rows begin at a multiple of it, and are padded with zeros up to one.
            timeout: of each exchange, in seconds; by default the communicator's.
        """
        self._comm, self._timeout = comm, timeout
        self._rank, self._size = comm.get_rank(), comm.get_size()
        given = {"experts": experts, "rows": rows, "width": width, "major_align": major_align}
        if capacity is not None:
            given["capacity"] = capacity
        for name, number in given.items():
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                self._fail("symm_allocate", f"{name}={number!r}", "a whole number, 1 or more")
        most = self._size * rows + experts * major_align if capacity is None else capacity
        self.experts, self.rows, self.width, self.capacity = experts, rows, width, most
        self.dtype = torch.get_default_dtype() if dtype is None else dtype
        self.major_align = major_align
        count, whole = experts * self._size, torch.int64
        tensors = self._allocate(
            # What comes back is as long as what dispatch returned, which pads the last experts' rows as well.
            *(((n, width), self.dtype) for n in (rows, most + experts * major_align, most)),
            *(((count,), whole), ((2, count), whole), ((2, count), whole)),
        )
        self._own, self._sorted, self._arrived, self._splits, self._there, self._back = tensors
        self._open = True

    def _allocate(self, *kinds: tuple[tuple[int, ...], torch.dtype]) -> list[torch.Tensor]:
        """Makes tensors of these shapes and dtypes, all or none. Collective."""
        with self._comm._engine.located("symm_allocate"):
            for shape, dtype in kinds:  # before any is allocated, since this rank alone may refuse one
                tensor_shape(shape, dtype)
        made: list[torch.Tensor] = []
        try:
            for shape, dtype in kinds:
                made.append(empty(shape, dtype=dtype, comm=self._comm, timeout=self._timeout))
        except CommError:
            # What leaves the communicator usable is raised on all ranks; they have made the same tensors.
            if not self._comm.is_aborted():
                for tensor in reversed(made):
                    free(tensor, self._comm, self._timeout)
            raise
        return made

    def dispatch(
        self, rows: torch.Tensor, splits: torch.Tensor | Sequence[int]
    ) -> tuple[torch.Tensor, Route]:
        """Sends the rows to their experts; returns those that came for this rank's, sorted by expert.

        Args:
            rows: [k, width], sorted by the experts that they go to.
            splits: n * e numbers, how many go to expert x of rank p, at p * e + x; their sum is k.

        Raises `InvalidArgumentError` on all ranks when one of them has no capacity for what it would receive.
        """
        counts = self._checked_splits(splits)
        self._check_rows("all_to_all_vdev_2d", rows, int(counts.sum()))
        out, there = _Dispatch.apply(rows, self, counts)  # type: ignore[no-untyped-call]
        return out, Route(counts, there, self._blocks(there))

    def combine(self, rows: torch.Tensor, route: Route) -> torch.Tensor:
        """Sends what became of dispatched rows back: [k, width], in the order that dispatch got them.

        `rows` is as long as what dispatch returned with this route; what it has as padding goes nowhere.
        """
        self._check_rows("all_to_all_vdev_2d_offset", rows, route.blocks[-1].stop)
        back: torch.Tensor = _Combine.apply(rows, self, route)  # type: ignore[no-untyped-call]
        return back

    def free(self) -> None:
        """Gives the symmetric memory back. Collective. Graphs through it cannot go backward any more."""
        self._check_open("symm_free")
        self._open = False
        for tensor in (self._own, self._sorted, self._arrived, self._splits, self._there, self._back):
            free(tensor, self._comm, self._timeout)

    # --- the exchanges, which gradients call too ----------------------------------------------------------

    def _send(self, rows: torch.Tensor, splits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self._check_open("all_to_all_vdev_2d")
        self._own[: len(rows)].copy_(rows)
        self._splits.copy_(splits)
        all_to_all_vdev_2d(
            self._own,
            self._arrived,
            self._splits,
            self._there,
            self._comm,
            self.major_align,
            timeout=self._timeout,
        )
        synchronize(self._comm, self._timeout)  # a device's refusal, before its numbers are used
        there = self._there.clone()
        blocks = self._blocks(there)
        out = rows.new_zeros(blocks[-1].stop, self.width)
        ends = there.view(2, self.experts, self._size).sum(0)[:, -1].tolist()
        for block, end in zip(blocks, ends, strict=True):
            out[block.start : end].copy_(self._arrived[block.start : end])
        return out, there

    def _send_back(self, rows: torch.Tensor, route: Route) -> torch.Tensor:
        self._check_open("all_to_all_vdev_2d_offset")
        self._sorted[: len(rows)].copy_(rows)
        self._there.copy_(route.splits_offsets)
        all_to_all_vdev_2d_offset(
            self._sorted, self._own, self._there, self._back, self._comm, timeout=self._timeout
        )
        return self._own[: int(route.splits.sum())].clone()

    def _blocks(self, there: torch.Tensor) -> tuple[slice, ...]:
        """Each expert's part, padding included."""
        counts, offsets = there.view(2, self.experts, self._size)
        align = self.major_align
        lengths = (-(-counts.sum(1) // align)).clamp(min=1) * align
        return tuple(
            slice(start, start + length)
            for start, length in zip(offsets[:, 0].tolist(), lengths.tolist(), strict=True)
        )

    # --- checks -------------------------------------------------------------------------------------------

    def _checked_splits(self, splits: torch.Tensor | Sequence[int]) -> torch.Tensor:
        op, count = "all_to_all_vdev_2d", self.experts * self._size
        try:
            numbers = torch.as_tensor(splits, device="cpu")
        except (TypeError, ValueError, RuntimeError):
            self._fail(op, f"splits={splits!r}", f"pass {count} whole numbers")
        if numbers.numel() != count or numbers.is_floating_point() or numbers.is_complex():
            self._fail(
                op,
                f"splits has {numbers.numel()} numbers of {numbers.dtype}",
                f"pass {count} whole numbers: {self.experts} experts for each of {self._size} ranks",
            )
        if int(numbers.min()) < 0:
            self._fail(op, f"splits has the negative number {int(numbers.min())}", "rows, 0 or more")
        return numbers.detach().to(torch.int64, copy=True).view(-1)

    def _check_rows(self, op: str, rows: Any, needed: int) -> None:
        self._check_open(op)
        device = self._own.device
        if not isinstance(rows, torch.Tensor) or rows.dtype != self.dtype or rows.device != device:
            what = f"{rows.dtype} on {rows.device}" if isinstance(rows, torch.Tensor) else type(rows).__name__
            self._fail(op, f"rows are {what}", f"pass a tensor of {self.dtype} on {device}")
        if tuple(rows.shape) != (needed, self.width):
            self._fail(
                op,
                f"rows are {tuple(rows.shape)}, not {(needed, self.width)}",
                "as many rows as the splits add up to, or as dispatch returned with this route",
            )
        if op == "all_to_all_vdev_2d" and needed > self.rows:
            self._fail(op, f"{needed} rows", f"the exchange was made for {self.rows}: make it with more")

    def _check_open(self, op: str) -> None:
        if not self._open:
            raise NotReadyError(
                "the exchange was freed",
                op=op,
                comm=self._comm.get_name(),
                rank=self._rank,
                hint="make a new one, and go backward before you free it",
            )

    def _fail(self, op: str, message: str, hint: str) -> NoReturn:
        raise InvalidArgumentError(message, op=op, comm=self._comm.get_name(), rank=self._rank, hint=hint)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, exchange: ExpertExchange, splits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, there = exchange._send(rows, splits)
        ctx.mark_non_differentiable(there)
        ctx.save_for_backward(there)
        ctx.exchange, ctx.splits = exchange, splits
        return out, there

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: object) -> tuple[torch.Tensor, None, None]:
        (there,) = ctx.saved_tensors
        route = Route(ctx.splits, there, ctx.exchange._blocks(there))
        return _Combine.apply(grad, ctx.exchange, route), None, None  # type: ignore[no-untyped-call]


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, exchange: ExpertExchange, route: Route) -> torch.Tensor:
        ctx.exchange, ctx.route = exchange, route
        return exchange._send_back(rows, route)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        rows, _ = _Dispatch.apply(grad, ctx.exchange, ctx.route.splits)  # type: ignore[no-untyped-call]
        return rows, None, None
