"""DeviceDomain: a symmetric heap on devices, with the operations of the native core's heap on the host.

The table (csrc/symm/table.hpp) allocates and copies; everything else is done by kernels that address the
other ranks' memory. Operations are put on the current stream and do not block the host unless they say so.
The kernels write refusals and timeouts into a record that `outcome` reads.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from unicomm.comms.errors import CommTimeoutError, UnsupportedError
from unicomm.comms.operations.dtypes import DTYPES
from unicomm.comms.operations.reduction import RedOpType
from unicomm.comms.operations.table import OPERATIONS
from unicomm.comms.streams import Streams

from .device_kernels import FIELDS, INDEX, Launcher

_THREADS = 256
_MOST_BLOCKS = 1024
_UNIT = 16 * 4  # bytes that a thread has under way
_HEAD, _BLOCK, _EACH = 8, 8, 8  # words: kHead, kArrived and kEach of kernels.cu
_SIGN, _WORD = 1 << 63, 1 << 64
_NAP, _LONGEST_NAP = 20e-6, 1e-3
# Kernels may read and write these words after this process has stopped waiting for them, and torch's
# allocator would reuse such memory at once.
_aborted: list[torch.Tensor] = []

#: Kinds of errors in a record: two refusals, a mismatch, a timeout, an abort.
FULL, SPLITS, MISMATCH, LATE, ABORTED = 1, 2, 3, 4, 5
_REDUCED = {"float64", "float32", "float16", "bfloat16"} | {
    f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)
}
_RED_OPS = (RedOpType.SUM, RedOpType.PRODUCT, RedOpType.MIN, RedOpType.MAX)

# (operation, dtype, reduction, root, relaxed, further value that all ranks must share, seconds)
Head = tuple[int, int, int, int, bool, int, float]
Tile = tuple[int, int, int, int, int]  # address, rows, columns, strides of both in elements


def _rows(tensor: torch.Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 1


def _row_bytes(tensor: torch.Tensor) -> int:
    return tensor.nbytes // max(_rows(tensor), 1)


def reduces(dtype: torch.dtype, red: int) -> bool:
    """Whether a kernel has this reduction of this element type."""
    info = DTYPES.get(dtype)
    return info is not None and info.name in _REDUCED and red in _RED_OPS


@dataclass(frozen=True)
class Outcome:
    """The first error: its kind, the operation's code, the culprits, rows, and four words of each rank."""

    kind: int
    op: int
    who: int
    rows: int
    each: list[list[int]]


class DeviceDomain:
    """Has the interface of the native `SymmDomain`; csrc/symm/composites.hpp describes the operations."""

    def __init__(self, native: Any, streams: Streams, launcher: Launcher, device: torch.device) -> None:
        self.native, self._streams, self._launcher, self._device = native, streams, launcher, device
        self.begins, self.holds, self.leave = native.begins, native.holds, native.leave
        self.allocate, self.free, self.ptr = native.allocate, native.free, native.ptr
        self.far: list[int] = []  # ranks whose memory this process cannot address
        self._scratches: list[torch.Tensor] = []  # graphs may use the earlier memory
        self._words: torch.Tensor | None = None

    # --- life ---------------------------------------------------------------------------------------------

    @staticmethod
    def said_bytes(world: int) -> int:
        """Bytes that `open` needs: the control block of kernels.cu."""
        return 8 * (_BLOCK + world + 2 * (_HEAD + world))

    def open(self, rank: int, world: int, control: int) -> None:
        """Opens the heap. `control`: zeroed symmetric memory. No rank may go on before all have opened it."""
        self.rank, self.world, self._control = rank, world, control
        distances = []
        for pe in range(world):
            fault, address = self.native.ptr(control, self.said_bytes(world), pe)
            if fault is not None or not address:
                self.far.append(pe)
            distances.append(address - control if address else 0)
        self._distances = torch.tensor(distances, dtype=torch.int64, device=self._device)
        # The status record, the word that ends waits, the result of an atomic operation.
        words = self._launcher.host_words(_EACH + 4 * world + 2)
        self._record = words[:-2].numpy()
        self._last_words = words[-2:].numpy()
        self._words = words  # last, since the watchdog checks for it
        self._base = np.zeros(len(FIELDS), np.int64)
        self._result = words.data_ptr() + 8 * (len(words) - 1)
        self._set(
            self._base,
            rank=rank,
            world=world,
            distances=self._distances.data_ptr(),
            control=control,
            status=words.data_ptr(),
            abort=words.data_ptr() + 8 * (len(words) - 2),
            root=-1,
        )

    def abort(self, code: int = 0, culprits: Sequence[int] = ()) -> Any:
        """Ends all waits on the device and disables later operations. May be called from any thread."""
        if self._words is not None:
            self._last_words[0] = 1
            _aborted.append(self._words)
        try:
            return self.native.abort(code, culprits)
        except AttributeError:  # the library has no waits of its own
            return None

    def barrier(self, limit: float, _: int = 0) -> Any:
        """The library's own barrier. Blocks the host if the library has no barrier on streams."""
        return self.native.barrier(limit, self._stream())

    def team_split(self, start: int, stride: int, size: int, limit: float) -> tuple[Any, Any]:
        fault, team = self.native.team_split(start, stride, size, limit)
        made = None if team is None else DeviceDomain(team, self._streams, self._launcher, self._device)
        return fault, made

    def outcome(self, clear: bool = True) -> Outcome | None:
        """Returns the first error that kernels have recorded since the record was cleared, or None.

        `clear`: clears the record, unless a wait was given up: that breaks the communicator, and until then
        others that look must find it as well.
        """
        if self._words is None or not self._record[0]:
            return None
        kind, called, who, rows = self._record[:4].tolist()
        each = self._record[_EACH:].reshape(-1, 4).tolist()
        if clear and kind not in (LATE, ABORTED):
            self._record[:] = 0
        return Outcome(kind, called & 0xFFFFFFFF, who, rows, each)

    def wait(self, limit: float) -> None:
        """Blocks the host until the current stream is done. Must not be called while a graph captures it."""
        if self._streams.is_capturing():
            raise UnsupportedError(
                "the host would have to wait, which a graph cannot capture",
                hint="use an operation whose results stay on the device, such as all_to_all_vdev",
            )
        event = self._streams.record(self._streams.current())
        end, nap = time.monotonic() + limit, _NAP
        while not self._streams.is_over(event):
            if time.monotonic() > end:
                raise CommTimeoutError(
                    f"the device had not come to it after {limit:g} s",
                    hint="a kernel before it still runs there; timeout= allows more",
                )
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP)

    # --- launching ----------------------------------------------------------------------------------------

    def _stream(self) -> int:
        return self._streams.handle(self._streams.current())

    @staticmethod
    def _set(args: NDArray[np.int64], **values: int) -> None:
        for name, value in values.items():
            args[INDEX[name]] = (value + _SIGN) % _WORD - _SIGN

    def _launch(self, kernel: str, args: NDArray[np.int64], blocks: int = 1, **values: int) -> None:
        self._set(args, **values)
        self._launcher.launch(kernel, blocks, _THREADS, args, self._stream())

    def _args(self, limit: float) -> NDArray[np.int64]:
        if self.far:
            raise UnsupportedError(
                f"the memory of ranks {self.far} cannot be addressed from this device",
                hint="use a communicator, or a team, of ranks whose devices reach each other",
            )
        args = self._base.copy()
        self._set(args, limit_ns=min(int(limit * 1e9), _SIGN - 1))
        return args

    def _call(
        self, head: Head, tensors: Sequence[torch.Tensor], *more: int, ends: bool = False
    ) -> NDArray[np.int64]:
        """The arguments of all kernels of an operation. `ends`: it always ends with a barrier."""
        op, dtype, red, root, relaxed, other, limit = head
        relaxed = relaxed and not ends
        said = [op, dtype, red, root, int(relaxed), other, *more]
        for tensor in tensors:
            said += [tensor.data_ptr() - self._control if tensor.nbytes else 0, tensor.nbytes]
        packed = struct.pack(f"{len(said)}q", *said)
        signature = int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")
        args = self._args(limit)
        called = op | dtype << 32 | red << 40
        self._set(args, called=called, signature=signature, root=root, relaxed=relaxed, red=red)
        return args

    def _scratch(self, words: int) -> int:
        """Device memory that operations share, since they run one after the other."""
        if not self._scratches or len(self._scratches[-1]) < words:
            made = torch.empty(max(2 * words, 1024), dtype=torch.int64, device=self._device)
            self._scratches.append(made)
        return self._scratches[-1].data_ptr()

    def _blocks(self, nbytes: int) -> int:
        """Number of thread blocks for so many bytes from each rank."""
        return max(1, min(-(-nbytes // (_THREADS * _UNIT)), _MOST_BLOCKS // self.world, 64))

    # --- the operations of csrc/symm/composites.hpp ---------------------------------------------------------

    def meet(self, head: Head, tensors: Sequence[torch.Tensor]) -> None:
        self._launch("symm_meet", self._call(head, tensors))

    def broadcast(self, head: Head, tensor: torch.Tensor) -> None:
        args = self._call(head, [tensor])
        self._launch("symm_meet", args)
        at, lanes = tensor.data_ptr(), self._blocks(tensor.nbytes)
        self._launch("symm_move_blocks", args, lanes, **{"in": at}, out=at, row_bytes=tensor.nbytes)
        self._launch("symm_leave", args)

    def all_to_all(self, head: Head, input: torch.Tensor, out: torch.Tensor) -> None:
        args = self._call(head, [input, out])
        self._launch("symm_meet", args)
        block = input.nbytes // self.world
        places = {"in": input.data_ptr(), "out": out.data_ptr(), "row_bytes": block}
        self._launch("symm_move_blocks", args, self.world * self._blocks(block), **places)
        self._launch("symm_leave", args)

    def all_to_all_v(
        self, head: Head, input: torch.Tensor, out: torch.Tensor, splits: Sequence[int]
    ) -> tuple[None, tuple[int, int, int] | None, list[int]]:
        """Blocks the host until the numbers of received rows are known."""
        n, limit = self.world, head[-1]
        if self._streams.is_capturing():
            self.wait(limit)
        said = torch.tensor(splits, dtype=torch.int64, device=self._device)
        came = torch.empty(2 * n, dtype=torch.int64, device=self._device)
        args = self._call(head, [input, out], _row_bytes(input))
        self._set(args, said_splits=said.data_ptr(), results=came.data_ptr(), experts=1)
        self._exchange("symm_meet_dispatch", args, input, out)
        self.wait(limit)
        found = self.outcome(clear=False)
        if found is None:
            return None, None, came[:n].tolist()
        if found.op == head[0] and found.kind in (FULL, SPLITS):
            self.outcome()
            return None, (found.kind, found.who, found.rows), []
        return None, None, []

    def dispatch(
        self,
        head: Head,
        input: torch.Tensor,
        out: torch.Tensor,
        splits: torch.Tensor,
        results: torch.Tensor,
        align: int,
    ) -> tuple[None, None]:
        args = self._call(head, [input, out, splits, results], align, _row_bytes(input))
        at = {"splits": splits.data_ptr(), "results": results.data_ptr()}
        self._set(args, experts=splits.numel() // self.world, align=align, **at)
        self._exchange("symm_meet_dispatch", args, input, out)
        return None, None

    def combine(
        self,
        head: Head,
        input: torch.Tensor,
        out: torch.Tensor,
        splits: torch.Tensor,
        results: torch.Tensor,
    ) -> tuple[None, None]:
        args = self._call(head, [input, out, splits, results], _row_bytes(input))
        at = {"splits": splits.data_ptr(), "results": results.data_ptr()}
        self._set(args, experts=splits.numel() // 2 // self.world, by_rank=1, **at)
        self._exchange("symm_meet_combine", args, input, out)
        return None, None

    def _exchange(self, plan: str, args: NDArray[np.int64], input: torch.Tensor, out: torch.Tensor) -> None:
        experts = int(args[INDEX["experts"]])
        columns = self.world * experts
        scratch = self._scratch(3 * columns + 2 * self.world + experts + 1)
        self._set(
            args, **{"in": input.data_ptr()}, out=out.data_ptr(), in_rows=_rows(input), out_rows=_rows(out)
        )
        self._set(args, row_bytes=_row_bytes(input), sources=scratch, scratch=scratch + 8 * columns)
        self._launch(plan, args)
        self._launch("symm_move_rows", args, self.world * self._blocks(out.nbytes // self.world))
        self._launch("symm_leave", args)

    def one_shot(self, head: Head, input: torch.Tensor, out: torch.Tensor) -> None:
        args = self._call(head, [input])
        self._launch("symm_meet", args)
        count = input.numel()
        self._reduce(args, input.dtype, (input.data_ptr(), 1, count, 0, 1), (out.data_ptr(), 1, count, 0, 1))
        self._launch("symm_leave", args)

    def two_shot(self, head: Head, input: torch.Tensor) -> None:
        args = self._call(head, [input], ends=True)
        self._launch("symm_meet", args)
        # Parts are aligned to 16 bytes if the tensor is.
        pack, count = 16 // input.element_size(), input.numel()
        begin, end = (count * r // self.world // pack * pack for r in (self.rank, self.rank + 1))
        end = count if self.rank == self.world - 1 else end
        part = (input.data_ptr() + begin * input.element_size(), 1, end - begin, 0, 1)
        self._reduce(args, input.dtype, part, part, spread=1)
        self._launch("symm_leave", args)

    def reduce_scatter(self, head: Head, input: torch.Tensor, out: torch.Tensor, rows: int) -> None:
        args = self._call(head, [input], rows)
        self._launch("symm_meet", args)
        part = input.numel() // max(rows, 1) // self.world
        first = input.data_ptr() + self.rank * part * input.element_size()
        own = (first, rows, part, part * self.world, 1)
        self._reduce(args, input.dtype, own, (out.data_ptr(), rows, part, part, 1))
        self._launch("symm_leave", args)

    def reduce_tiles(
        self, head: Head, ins: Sequence[Tile], owners: Sequence[int], outs: Sequence[Tile]
    ) -> None:
        said = []
        for (at, *shape), owner in zip(ins, owners, strict=True):
            said += [at - self._control if shape[0] and shape[1] else 0, *shape, owner]
        args = self._call(head, [], *said)
        self._launch("symm_meet", args)
        dtype = next(dtype for dtype, info in DTYPES.items() if info.code == head[1])
        own = [tile for tile, owner in zip(ins, owners, strict=True) if owner == self.rank]
        for tile, out in zip(own, outs, strict=True):
            self._reduce(args, dtype, tile, out)
        self._launch("symm_leave", args)

    def _reduce(
        self, args: NDArray[np.int64], dtype: torch.dtype, tile: Tile, out: Tile, spread: int = 0
    ) -> None:
        """Reduces all ranks' `tile` into this rank's `out`, or into the `out` of all ranks."""
        if tile[3] == 1 and tile[4] != 1:  # neighbouring threads read neighbouring memory
            tile, out = ((t[0], t[2], t[1], t[4], t[3]) for t in (tile, out))
        at, rows, columns, row_step, column_step = tile
        if not rows or not columns:
            return
        if columns == 1:
            column_step, out = 1, (*out[:4], 1)
        # Rows without gaps between them become one row.
        if column_step == out[4] == 1 and row_step == out[3] == columns:
            rows, columns = 1, rows * columns
        places = {"in": at, "out": out[0], "rows": rows, "columns": columns}
        steps = {"in_row_step": row_step, "in_column_step": column_step, "spread": spread}
        blocks = min(-(-rows * columns * dtype.itemsize // (_THREADS * 16)), _MOST_BLOCKS)
        name = f"symm_reduce_{DTYPES[dtype].name}"
        self._launch(name, args, blocks, out_row_step=out[3], out_column_step=out[4], **places, **steps)

    # --- one-sided ----------------------------------------------------------------------------------------

    def transfer(self, put: bool, rows: Any, _: int = 0) -> Any:
        return self.native.transfer(put, rows, self._stream())

    def put_signal(
        self, to: int, source: int, nbytes: int, word: int, value: int, op: int, pe: int, _: int = 0
    ) -> Any:
        if nbytes:
            rows = torch.tensor([[source, to, nbytes, pe]], dtype=torch.int64, device="cpu").numpy()
            if (fault := self.transfer(True, rows)) is not None:
                return fault
        self._launch("symm_signal", self._args(0), word=word, value=value, compare=int(op), peer=pe)
        return None

    def wait_signal(self, word: int, compare: int, value: int, source: int, limit: float, _: int = 0) -> None:
        self._wait_for(limit, source, word=word, compare=int(compare), value=value)

    def wait_next(self, word: int, counter: int, source: int, limit: float) -> None:
        """Waits until `word` reaches this rank's `counter` plus one, and raises `counter` by one."""
        self._wait_for(limit, source, word=word, compare=3, counter=counter)

    def _wait_for(self, limit: float, source: int, **values: int) -> None:
        peer = source if source >= 0 else ~source
        self._launch(
            "symm_wait", self._args(limit), called=OPERATIONS["wait_signal"].code, peer=peer, **values
        )

    def atomic(self, op: str, words: Sequence[int], pe: int, limit: float) -> tuple[None, int]:
        """Runs `fetch_add` or `compare_swap` with the native arguments. Blocks the host for the old value."""
        names = ("word", "value") if op == "fetch_add" else ("word", "expected", "value")
        if self._streams.is_capturing():
            self.wait(limit)
        values = dict(zip(names, words, strict=True))
        self._launch(f"symm_{op}", self._args(limit), out=self._result, peer=pe, **values)
        self.wait(limit)
        return None, int(self._last_words[1]) % _WORD
