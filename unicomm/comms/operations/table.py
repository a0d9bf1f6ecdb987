"""The operation table: each operation of a communicator, described once.

Argument checks, hooks, the recorder, signatures, completion, the capability table in the docs and the
conformance suite all read `OPERATIONS`.
"""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass


class Kind(enum.Enum):
    COLLECTIVE = "collective"
    P2P = "point-to-point"
    CONTROL = "control"  # no data of the user moves; recorded by name only
    SYMMETRIC = "symmetric"  # on symmetric memory; recorded without a number


class Role(enum.Enum):
    IN = "in"
    OUT = "out"
    INOUT = "inout"


class Size(enum.Enum):
    """The number of elements of a tensor argument: `count` is the operation's unit, n the number of ranks."""

    COUNT = "count"
    WORLD = "n x count"
    EACH = "n tensors of count"
    OWN = "n tensors, the one of this rank of count"
    FREE = "n tensors of any size"
    SPLIT = "the sum of the split sizes"


@dataclass(frozen=True)
class TensorArg:
    name: str
    role: Role
    size: Size
    root_only: bool = False  # other ranks pass nothing, an empty list or None

    @functools.cached_property  # asked for at every call
    def many(self) -> bool:
        return self.size in (Size.EACH, Size.OWN, Size.FREE)


@dataclass(frozen=True)
class Operation:
    """One row of the table. `code` is in rings and signatures, so it is never used for another operation."""

    name: str
    code: int
    kind: Kind
    tensors: tuple[TensorArg, ...] = ()
    rooted: bool = False  # has a `root`
    reduces: bool = False  # has an `op`
    splits: bool = False  # has split sizes along the first dimension
    shared: bool = False  # each rank has an equal part of every tensor
    same_count: bool = True  # the count is part of the signature: all ranks must agree on it
    alike: bool = False  # the outputs of all ranks have the same bits
    read_at_root: bool = False  # of the inputs, only the root's are read
    written_at_root: bool = False  # of the outputs, only the root's are written
    doc: str = ""

    @functools.cached_property  # asked for at every call
    def is_collective(self) -> bool:
        return self.kind is Kind.COLLECTIVE

    @functools.cached_property
    def is_message(self) -> bool:
        return self.kind is Kind.P2P


def _in(name: str, size: Size, root_only: bool = False) -> TensorArg:
    return TensorArg(name, Role.IN, size, root_only)


def _out(name: str, size: Size, root_only: bool = False) -> TensorArg:
    return TensorArg(name, Role.OUT, size, root_only)


def _both(name: str) -> TensorArg:
    return TensorArg(name, Role.INOUT, Size.COUNT)


_C, _P, _X, _S = Kind.COLLECTIVE, Kind.P2P, Kind.CONTROL, Kind.SYMMETRIC

_TABLE = (
    Operation("send", 1, _P, (_in("tensor", Size.COUNT),), doc="Sends `tensor` to rank `dst`."),
    Operation("recv", 2, _P, (_out("tensor", Size.COUNT),), doc="Receives into `tensor` from rank `src`."),
    Operation(
        "broadcast",
        3,
        _C,
        (_both("tensor"),),
        rooted=True,
        alike=True,
        read_at_root=True,
        doc="Copies the root's `tensor` to all ranks.",
    ),
    Operation(
        "all_reduce",
        4,
        _C,
        (_both("tensor"),),
        reduces=True,
        alike=True,
        doc="Reduces `tensor` in place on all ranks.",
    ),
    Operation(
        "reduce",
        5,
        _C,
        (_both("tensor"),),
        rooted=True,
        reduces=True,
        written_at_root=True,
        doc="Reduces into the root's `tensor`; the other ranks' tensors stay as they are.",
    ),
    Operation(
        "all_gather",
        6,
        _C,
        (_out("tensor_list", Size.EACH), _in("tensor", Size.COUNT)),
        alike=True,
        doc="Rank i's `tensor` goes to `tensor_list[i]` of all ranks.",
    ),
    Operation(
        "all_gather_v",
        7,
        _C,
        (_out("tensor_list", Size.OWN), _in("tensor", Size.COUNT)),
        same_count=False,
        alike=True,
        doc="`all_gather` where each rank's tensor has its own size.",
    ),
    Operation(
        "all_gather_single",
        8,
        _C,
        (_out("output", Size.WORLD), _in("input", Size.COUNT)),
        alike=True,
        doc="All ranks' `input` one after the other in `output`.",
    ),
    Operation(
        "reduce_scatter",
        9,
        _C,
        (_out("output", Size.COUNT), _in("input_list", Size.EACH)),
        reduces=True,
        doc="`output` of rank i is the reduction of all ranks' `input_list[i]`.",
    ),
    Operation(
        "reduce_scatter_v",
        10,
        _C,
        (_out("output", Size.COUNT), _in("input_list", Size.OWN)),
        reduces=True,
        same_count=False,
        doc="`reduce_scatter` where each rank's part has its own size.",
    ),
    Operation(
        "reduce_scatter_single",
        11,
        _C,
        (_out("output", Size.COUNT), _in("input", Size.WORLD)),
        reduces=True,
        doc="`output` of rank i is the reduction of the i-th part of all ranks' `input`.",
    ),
    Operation(
        "all_to_all_single",
        12,
        _C,
        (_out("output", Size.COUNT), _in("input", Size.COUNT)),
        shared=True,
        doc="The j-th part of rank i's `input` becomes the i-th part of rank j's `output`.",
    ),
    Operation(
        "all_to_all_v_single",
        13,
        _C,
        (_out("output", Size.SPLIT), _in("input", Size.SPLIT)),
        splits=True,
        same_count=False,
        doc="`all_to_all_single` whose parts have the given numbers of rows.",
    ),
    Operation(
        "all_to_all",
        14,
        _C,
        (_out("output_tensor_list", Size.FREE), _in("input_tensor_list", Size.FREE)),
        same_count=False,
        doc="Rank i's `input_tensor_list[j]` goes to rank j's `output_tensor_list[i]`.",
    ),
    Operation("barrier", 15, _C, doc="Returns when all ranks have called it."),
    Operation(
        "scatter",
        16,
        _C,
        (_out("output_tensor", Size.COUNT), _in("input_tensor_list", Size.EACH, root_only=True)),
        rooted=True,
        doc="The root's `input_tensor_list[i]` goes to rank i's `output_tensor`.",
    ),
    Operation(
        "gather",
        17,
        _C,
        (_out("output_tensor_list", Size.EACH, root_only=True), _in("input_tensor", Size.COUNT)),
        rooted=True,
        doc="Rank i's `input_tensor` goes to the root's `output_tensor_list[i]`.",
    ),
    Operation(
        "gather_single",
        18,
        _C,
        (_out("output", Size.WORLD, root_only=True), _in("input", Size.COUNT)),
        rooted=True,
        doc="All ranks' `input` one after the other in the root's `output`.",
    ),
    Operation("split", 32, _X, doc="Creates a communicator of some of the ranks."),
    Operation("new_window", 33, _X, doc="Opens a tensor to one-sided access."),
    Operation("batch", 34, _X, doc="Issues several sends and receives together."),
    Operation("finalize", 35, _X, doc="Closes the communicator."),
    Operation("abort", 36, _X, doc="Ends the communicator at once, without the other ranks' help."),
    Operation("reconfigure", 37, _X, doc="Rebuilds the communicator with other ranks."),
    Operation("symm_init", 64, _S, doc="Connects a communicator's symmetric memory."),
    Operation("symm_allocate", 65, _S, doc="Memory that all ranks have at the same offset."),
    Operation("symm_free", 66, _S, doc="Frees such memory, on all ranks."),
    Operation(
        "symm_barrier", 67, _S, doc="Returns when all ranks have called it; their earlier writes are visible."
    ),
    Operation("put", 68, _S, doc="Writes into another rank's memory."),
    Operation("get", 69, _S, doc="Reads from another rank's memory."),
    Operation("put_signal", 70, _S, doc="Writes into another rank's memory and then signals it."),
    Operation("signal", 71, _S, doc="Signals another rank."),
    Operation("wait_signal", 72, _S, doc="Waits for another rank's signal."),
    Operation("fetch_add", 73, _S, doc="Adds to a number of another rank and returns its old value."),
    Operation("compare_swap", 74, _S, doc="Replaces a number of another rank if it is as expected."),
    Operation("symm_broadcast", 75, _S, doc="Copies the root's symmetric tensor to all ranks."),
    Operation(
        "symm_all_to_all", 76, _S, doc="Block p of `out` becomes this rank's block of rank p's `input`."
    ),
    Operation("symm_all_to_all_v", 77, _S, doc="The same with blocks of given numbers of rows."),
    Operation("one_shot_all_reduce", 78, _S, doc="Each rank reads all ranks' tensors and reduces them."),
    Operation("two_shot_all_reduce_", 79, _S, doc="Each rank reduces a part and writes it to all ranks."),
    Operation("symm_reduce_scatter", 80, _S, doc="Each rank reduces its part of all ranks' tensors."),
    Operation("all_to_all_vdev", 81, _S, doc="All-to-all with splits in symmetric memory."),
    Operation("all_to_all_vdev_2d", 82, _S, doc="Rows go to the ranks of their experts (dispatch)."),
    Operation("all_to_all_vdev_2d_offset", 83, _S, doc="Rows come back from their experts (combine)."),
    Operation("tensor_register", 84, _S, doc="Tells the library of a tensor's memory."),
    Operation("tile_reduce", 85, _S, doc="The root reduces a part of all ranks' matrices."),
    Operation("multi_root_tile_reduce", 86, _S, doc="Several roots reduce a part each."),
    Operation("reduce_scatter_offset", 87, _S, doc="Each rank reduces its blocks of all ranks' matrices."),
)

OPERATIONS: dict[str, Operation] = {row.name: row for row in _TABLE}
BY_CODE: dict[int, Operation] = {row.code: row for row in _TABLE}

OpName = enum.Enum("OpName", {row.name: row.name for row in _TABLE})  # type: ignore[misc]
OpName.__doc__ = "Names of the operations, as hooks receive them."
