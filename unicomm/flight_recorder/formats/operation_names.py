"""Names of operations and element types in c10d, torchcomms and vendor libraries, and our names for them."""

from __future__ import annotations

import enum
import re
from functools import lru_cache


class OpKind(enum.IntEnum):
    """What an operation moves, and how it is numbered."""

    COLLECTIVE = 0
    SEND = 1
    RECV = 2
    OTHER = 3  # recorded without a number: split, finalize, operations on symmetric memory, ...


# Names of c10d and of vendor libraries -> ours. Other names stay.
_OPERATIONS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_reduce_barrier": "barrier",
    "_broadcast_oop": "broadcast",
    "_reduce_oop": "reduce",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "ALLGATHER_coalesced": "all_gather_v",
    "_all_gather_base": "all_gather_single",
    "_allgather_base": "all_gather_single",
    "all_gather_into_tensor": "all_gather_single",
    "all_gather_into_tensor_coalesced": "all_gather_single",
    "allgather_into_tensor_coalesced": "all_gather_single",
    "all_gather_single_coalesced": "all_gather_single",
    "reducescatter": "reduce_scatter",
    "reduce_scatter_coalesced": "reduce_scatter",
    "REDUCE_SCATTER_coalesced": "reduce_scatter_v",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_tensor": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single",
    "reduce_scatter_single_coalesced": "reduce_scatter_single",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "isend": "send",
    "irecv": "recv",
    "recv_anysource": "recv",
}
COLLECTIVES = frozenset(
    {
        "broadcast",
        "all_reduce",
        "reduce",
        "all_gather",
        "all_gather_v",
        "all_gather_single",
        "reduce_scatter",
        "reduce_scatter_v",
        "reduce_scatter_single",
        "all_to_all_single",
        "all_to_all_v_single",
        "all_to_all",
        "barrier",
        "scatter",
        "gather",
        "gather_single",
    }
)
# torch's names of element types -> c10::ScalarType's.
SCALAR_TYPES = {
    "float64": "Double",
    "float32": "Float",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "float8_e4m3fn": "Float8_e4m3fn",
    "float8_e5m2": "Float8_e5m2",
    "float8_e4m3fnuz": "Float8_e4m3fnuz",
    "float8_e5m2fnuz": "Float8_e5m2fnuz",
    "float8_e8m0fnu": "Float8_e8m0fnu",
    "float4_e2m1fn_x2": "Float4_e2m1fn_x2",
    "int8": "Char",
    "int16": "Short",
    "int32": "Int",
    "int64": "Long",
    "uint8": "Byte",
    "uint16": "UInt16",
    "uint32": "UInt32",
    "uint64": "UInt64",
    "bool": "Bool",
    "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
}
_OURS = {theirs: ours for ours, theirs in SCALAR_TYPES.items()}
_PAIR = re.compile(r"(\d{1,9})\s*(?:->|<-)\s*(\d{1,9})")


def operation(name: str) -> str:
    """Returns our name for an operation of any layer; an unknown name is returned as it is."""
    plain = name.strip()
    found = _OPERATIONS.get(plain) or _OPERATIONS.get(plain.lower())
    return found or (plain.lower() if plain.lower() in COLLECTIVES else plain)


def dtype(name: str) -> str:
    """Returns torch's name for an element type: "float32" for "Float" and for "torch.float32"."""
    return _OURS.get(name, name.removeprefix("torch."))


def item_size(dtype: str) -> int:
    """Returns the bytes of one element of the type `dtype`, 1 if its name has no number of bits."""
    bits = re.search(r"(?<=[a-z])[0-9]{1,4}(?![0-9])", dtype)
    return max(1, int(bits.group()) // 8) if bits else 1


@lru_cache(4096)
def profiling_name(text: str) -> tuple[str, str, int, int]:
    """Splits a dump's `profiling_name` into (backend, operation, own rank, peer).

    The ranks are ranks of the group, -1 if the text has none. "nccl:send 0->1" and "nccl:recv 1<-0" name the
    own rank first and the peer second.
    """
    backend, colon, rest = text.partition(":")
    if not colon:
        backend, rest = "", text
    pair = _PAIR.search(rest)
    own, peer = (int(pair[1]), int(pair[2])) if pair else (-1, -1)
    words = rest.split()
    return backend, operation(words[0] if words else ""), own, peer


_ON_SYMMETRIC_MEMORY = (
    *("symm_init", "symm_allocate", "symm_free", "symm_barrier", "put", "get", "put_signal", "signal"),
    *("wait_signal", "fetch_add", "compare_swap", "symm_broadcast", "symm_all_to_all", "symm_all_to_all_v"),
    *("one_shot_all_reduce", "two_shot_all_reduce_", "symm_reduce_scatter", "all_to_all_vdev"),
    *("all_to_all_vdev_2d", "all_to_all_vdev_2d_offset", "tensor_register"),
    *("tile_reduce", "multi_root_tile_reduce", "reduce_scatter_offset"),
)
_UNNUMBERED = frozenset(
    {
        *("coalesced", "split", "new_window", "batch", "finalize", "abort", "reconfigure", ""),
        *_ON_SYMMETRIC_MEMORY,
    }
)


def kind(op: str, p2p: bool = False) -> OpKind:
    """Returns the kind of an operation.

    An unknown operation is a collective, because it is numbered like one.
    """
    if op in ("send", "recv"):
        return OpKind.SEND if op == "send" else OpKind.RECV
    if p2p or op in _UNNUMBERED:
        return OpKind.OTHER
    return OpKind.COLLECTIVE
