"""Argument checks: from a call's arguments to a validated `Call`, by the operation table alone.

All checks are local: they look at this rank's arguments, send nothing, and raise `InvalidArgumentError`
before anything is recorded.
"""

from __future__ import annotations

import itertools
import operator
import zlib
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from unicomm.comms.errors import InvalidArgumentError

from .arrays import NoTensorError, as_tensor, is_array
from .call import CHECKED, Call, Message
from .dtypes import OTHER
from .numbers import as_index
from .reduction import ReduceOp, why_not
from .table import OPERATIONS, Operation, Role, Size, TensorArg

_MASK = CHECKED - 1


class Checker:
    """Checks arguments for one communicator: its rank, size, device and name.

    Without `moves_data` tensors need no memory: tensors on the meta device and FakeTensors are accepted.
    """

    def __init__(
        self, comm: str, rank: int, size: int, device: torch.device, moves_data: bool = True
    ) -> None:
        self.comm = comm
        self.rank = rank
        self.size = size
        self.device = device
        self._any_index = device.type == "cpu"
        self._moves_data = moves_data

    def call(
        self,
        name: str,
        tensors: Sequence[Any],
        *,
        root: Any = None,
        op: Any = None,
        out_splits: Sequence[int] | None = None,
        in_splits: Sequence[int] | None = None,
    ) -> Call:
        """The Call of operation `name`; `tensors` in the order of its row in the table."""
        row = OPERATIONS[name]
        call = Call(row)
        if row.rooted:
            call.root = self.check_rank(row, "root", root)
        given, tensors = tensors, []  # loops here and in _add: comprehensions would slow all names down
        for arg, value in zip(row.tensors, given, strict=True):
            tensors.append(self._add(call, row, arg, value))
        if row.reduces:
            self._check_reduction(call, row, op)
        if row.tensors:
            self._check_sizes(call, row, tensors)
        if row.splits:
            self._check_splits(call, row, tensors, out_splits, in_splits)
        elif row.shared and tensors[1].numel() % self.size:
            self.fail(
                row,
                f"input has {tensors[1].numel()} elements, which {self.size} ranks cannot share equally",
                "pad it, or use all_to_all_v_single with split sizes",
            )
        if call.inputs and call.outputs and len(row.tensors) > 1:
            self._check_overlap(call, row)
        if call.dtype_code == OTHER:  # types that share a number have elements of different sizes
            call.extra ^= zlib.crc32(str(call.dtype).encode())
        return call

    def batch(self, messages: Sequence[Message]) -> None:
        """Checks a batch: its messages run together, so none may write what another one reads or writes."""
        call = Call(OPERATIONS["batch"])
        call.inputs = [m.tensor for m in messages if m.send]
        call.outputs = [m.tensor for m in messages if not m.send]
        self._check_overlap(call, call.operation)

    def check_rank(self, row: Operation, what: str, value: Any) -> int:
        try:
            rank = as_index(value)
        except TypeError:
            self.fail(row, f"{what}={value!r} is no rank", f"pass a whole number from 0 to {self.size - 1}")
        if not 0 <= rank < self.size:
            self.fail(
                row,
                f"{what} must be in range [0, {self.size}), but got {rank}",
                "ranks are those of this communicator, from 0; see get_size()",
            )
        return rank

    def check_tensor(
        self, row: Operation, name: str, value: Any, writes: bool = True, strided: bool = False
    ) -> torch.Tensor:
        """The tensor, or a tensor on the memory of an array. It can be used as it is.

        It has to be contiguous unless `strided` is set.
        """
        tensor = value if isinstance(value, torch.Tensor) else self._from_array(row, name, value, writes)
        if tensor.layout != torch.strided:
            self.fail(row, f"{name} is sparse ({tensor.layout})", "pass tensor.to_dense()")
        device = tensor.device
        if device != self.device and (
            device.type != self.device.type or (device.index != self.device.index and not self._any_index)
        ):
            self.fail(
                row,
                f"{name} is on {device}, the communicator on {self.device}",
                f"move it there (tensor.to('{self.device}')), or create a communicator for {device}",
            )
        if not strided and not tensor.is_contiguous():
            self.fail(
                row,
                f"{name} is not contiguous (shape {tuple(tensor.shape)}, strides {tensor.stride()})",
                "pass tensor.contiguous() and, for an output, copy the result back",
            )
        if tensor.is_conj():
            self.fail(row, f"{name} is a lazy conjugate", "pass tensor.resolve_conj()")
        if tensor.is_neg():
            self.fail(row, f"{name} is a lazy negation", "pass tensor.resolve_neg()")
        try:
            lacks = self._moves_data and not tensor.data_ptr() and tensor.numel()
        except RuntimeError:  # torch refuses to tell the address
            self.fail(
                row,
                f"{name} has no memory of its own, or was freed ({_kind(tensor)})",
                "pass a tensor with data: make another one if unicomm.symm.free has freed it",
            )
        if lacks:
            self.fail(
                row,
                f"{name} has no memory ({_kind(tensor)})",
                "pass a tensor with data: no FakeTensor, and none whose storage was freed",
            )
        return tensor

    def _from_array(self, row: Operation, name: str, value: Any, writes: bool) -> torch.Tensor:
        if not is_array(value):
            self.fail(
                row,
                f"{name} is a {type(value).__name__}, not a tensor",
                "pass a torch.Tensor, a numpy array, or an array with __dlpack__",
            )
        try:
            return as_tensor(value, writes)
        except NoTensorError as error:
            self.fail(row, f"{name} (a {type(value).__name__}) {error}", error.hint)

    def _add(self, call: Call, row: Operation, arg: TensorArg, value: Any) -> Any:
        """Checks an argument and adds it to the call. Returns it with tensors in place of arrays."""
        if arg.root_only and self.rank != call.root:
            if value is not None and not (isinstance(value, (list, tuple)) and not value):
                if isinstance(value, (list, tuple)) or is_array(value):
                    return value  # permitted, as in torch.distributed, and not looked at
                self.fail(row, f"{arg.name} is a {type(value).__name__}", "pass [] or None where not root")
            return value
        writes = arg.role is not Role.IN
        if arg.many:
            if not isinstance(value, (list, tuple)):
                self.fail(row, f"{arg.name} is a {type(value).__name__}", "pass a list, one tensor per rank")
            if len(value) != self.size:
                self.fail(
                    row,
                    f"{arg.name} has {len(value)} tensors, the communicator {self.size} ranks",
                    "pass exactly one tensor per rank",
                )
            items = list(value)
            for i, tensor in enumerate(items):
                items[i] = self.check_tensor(row, f"{arg.name}[{i}]", tensor, writes)
        else:
            items = [self.check_tensor(row, arg.name, value, writes)]
        for i, tensor in enumerate(items):
            if call.dtype is None:
                call.dtype = tensor.dtype
            elif tensor.dtype != call.dtype:
                label = f"{arg.name}[{i}]" if arg.many else arg.name
                self.fail(
                    row,
                    f"{label} is {tensor.dtype}, the other tensors {call.dtype}",
                    "all tensors of one operation have one dtype",
                )
        if arg.role is not Role.OUT:
            call.inputs = items
        if writes:
            call.outputs = items
        return items if arg.many else items[0]

    def _check_reduction(self, call: Call, row: Operation, op: Any) -> None:
        if not isinstance(op, ReduceOp):
            self.fail(
                row,
                f"op is a {type(op).__name__}",
                "pass a unicomm.ReduceOp such as ReduceOp.SUM or ReduceOp.PREMUL_SUM(0.5)",
            )
        assert call.dtype is not None
        reason = why_not(op, call.dtype)
        if reason is not None:
            self.fail(row, reason, "convert the tensor, or choose another operation")
        call.op = op

    def _check_sizes(self, call: Call, row: Operation, tensors: Sequence[Any]) -> None:
        if len(row.tensors) == 1 and row.tensors[0].size is Size.COUNT:  # the unit itself
            if row.same_count:
                call.count = tensors[0].numel()
            return
        if row.tensors[0].size is Size.FREE:
            out, own = (side[self.rank].numel() for side in tensors)
            self._check_own_part(row, out, own, "elements")
        unit = next((a for a in row.tensors if a.size is Size.COUNT), None)
        if unit is None:
            return
        count = tensors[row.tensors.index(unit)].numel()
        for arg, value in zip(row.tensors, tensors, strict=True):
            if arg.root_only and self.rank != call.root:
                continue
            if arg.size is Size.COUNT:
                self._expect(row, arg.name, value, count, unit.name, count)
            elif arg.size is Size.WORLD:
                self._expect(row, arg.name, value, count * self.size, unit.name, count)
            elif arg.size is Size.EACH:
                for i, tensor in enumerate(value):
                    self._expect(row, f"{arg.name}[{i}]", tensor, count, unit.name, count)
            elif arg.size is Size.OWN:
                label = f"{arg.name}[{self.rank}] (this rank's own)"
                self._expect(row, label, value[self.rank], count, unit.name, count)
                call.extra = hash(tuple(t.numel() for t in value)) & _MASK
        if row.same_count:
            call.count = count

    def _check_own_part(self, row: Operation, got: int, sent: int, unit: str) -> None:
        if got != sent:
            self.fail(
                row,
                f"this rank sends {sent} {unit} to itself, but expects {got}",
                "make this rank's own entry equal on both sides",
            )

    def _expect(self, row: Operation, name: str, tensor: Any, numel: int, unit: str, count: int) -> None:
        if tensor.numel() != numel:
            self.fail(
                row,
                f"{name} has {tensor.numel()} elements, but {numel} are needed with {unit} of {count}"
                f" on {self.size} ranks",
                "pass tensors of these sizes",
            )

    def _check_splits(
        self, call: Call, row: Operation, tensors: Sequence[Any], out_splits: Any, in_splits: Any
    ) -> None:
        for side, tensor, splits in (("output", tensors[0], out_splits), ("input", tensors[1], in_splits)):
            name = f"{side}_split_sizes"
            rows = _rows(tensor)
            try:
                sizes = [] if splits is None else [operator.index(s) for s in splits]
            except TypeError:
                self.fail(row, f"{name}={splits!r} is no list of whole numbers", "pass ints, one per rank")
            if not sizes:
                if rows % self.size:
                    self.fail(
                        row,
                        f"{side} has {rows} rows, which {self.size} ranks cannot share equally",
                        f"pass {name}",
                    )
                sizes = [rows // self.size] * self.size
            else:
                if len(sizes) != self.size:
                    self.fail(
                        row,
                        f"{name} has {len(sizes)} entries, the communicator {self.size} ranks",
                        "pass one number of rows per rank",
                    )
                if min(sizes) < 0:
                    self.fail(row, f"{name} holds the negative size {min(sizes)}", "sizes are at least 0")
                if sum(sizes) != rows:
                    self.fail(
                        row,
                        f"{name} adds up to {sum(sizes)}, but {side} has {rows} rows",
                        "split sizes count rows of the first dimension and must cover the tensor",
                    )
            if side == "output":
                call.out_splits = sizes
            else:
                call.in_splits = sizes
        assert call.out_splits is not None
        assert call.in_splits is not None
        self._check_own_part(row, call.out_splits[self.rank], call.in_splits[self.rank], "rows")
        out_row, in_row = (t.numel() // _rows(t) if _rows(t) else None for t in tensors)
        if out_row is not None and in_row is not None and out_row != in_row:
            self.fail(
                row, f"a row of output has {out_row} elements, of input {in_row}", "make the rows equal"
            )

    def _check_overlap(self, call: Call, row: Operation) -> None:
        """Outputs must not overlap inputs or each other, except this rank's own part in place."""
        outs, ins = _extents(call.outputs), _extents(call.inputs)
        if len(outs) > 1:
            outs.sort()
            for (_, end, i), (begin, _, j) in itertools.pairwise(outs):
                if begin < end:
                    self.fail(
                        row,
                        f"output tensors {i} and {j} share memory",
                        "use a tensor of its own for each; [t] * n repeats one",
                    )
        if not outs or not ins:
            return
        if outs[0][0] >= max(e for _, e, _ in ins) or min(b for b, _, _ in ins) >= max(e for _, e, _ in outs):
            return
        ins.sort()
        own = self._own_part(call, row) if row.tensors else None
        in_place = own is not None and _same(own, call)
        whole = len(call.inputs) == len(call.outputs) == 1
        at = 0
        for begin, end, _ in outs:
            while at > 0 and ins[at - 1][1] > begin:
                at -= 1
            while at < len(ins) and ins[at][0] < end:
                allowed = in_place and (whole or ins[at][:2] == (begin, end))
                if ins[at][1] > begin and not allowed:
                    self.fail(
                        row,
                        "input and output share memory",
                        "use separate tensors, or exactly this rank's own part where the operation gathers"
                        " or reduce-scatters in place",
                    )
                at += 1

    def _own_part(self, call: Call, row: Operation) -> int | None:
        """Where this rank's own part begins in memory, for operations that work in place there."""
        sizes = [a.size for a in row.tensors]
        many = call.outputs if row.tensors[0].size is not Size.COUNT else call.inputs
        if Size.WORLD in sizes and len(many) == 1:
            part = many[0].numel() // self.size * many[0].element_size()
            return int(many[0].data_ptr()) + self.rank * part
        if (Size.EACH in sizes or Size.OWN in sizes) and len(many) == self.size:
            return int(many[self.rank].data_ptr())
        return None

    def fail(self, row: Operation, message: str, hint: str) -> NoReturn:
        raise InvalidArgumentError(message, op=row.name, comm=self.comm, rank=self.rank, hint=hint)


def _kind(tensor: torch.Tensor) -> str:
    return f"{type(tensor).__name__} of shape {tuple(tensor.shape)}"


def _rows(tensor: torch.Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 1


def _extents(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int, int]]:
    """(first byte, one past the last byte, index) of the tensors that are not empty."""
    out = []
    for i, t in enumerate(tensors):
        if bytes_ := t.numel() * t.element_size():
            begin = t.data_ptr()
            out.append((begin, begin + bytes_, i))
    return out


def _same(own: int, call: Call) -> bool:
    """Whether the one tensor of the operation's unit lies exactly at this rank's own part."""
    unit = call.inputs[0] if call.operation.tensors[0].size is not Size.COUNT else call.outputs[0]
    return int(unit.data_ptr()) == own
