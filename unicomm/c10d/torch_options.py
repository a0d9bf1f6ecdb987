"""Where torch's `AllreduceOptions` keeps what the fast path has to know.

A process group's all_reduce gets its reduction, its timeout and whether it is asynchronous in such an object,
whose getters cost 100 to 300 ns each: more together than the operation itself for one rank. The object is a
pybind11 instance, which holds the address of a C++ struct. Where in that struct the three lie is found out
here by setting values and looking at what changes. Nothing is assumed that was not seen: when torch is built
in another way than expected, nothing is learned and the getters serve.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist

from unicomm import _core

_POINTER = 16  # in the instance, behind Python's own header
_STRUCT = 56  # bytes to look at: the struct has an optional tensor at its end
_WORD = 8


def learn(reds: Mapping[int, int]) -> bool:
    """Teaches the native fast path to read the options; `reds`: its reductions, by torch's numbers."""
    found = layout()
    if found is None:
        return False
    red, timeout, later, unset = found
    table = bytes(reds.get(n, 0) for n in range(16))
    _core.learn_all_reduce_options(dist.AllreduceOptions, _POINTER, red, timeout, later, unset, table)
    return True


def layout() -> tuple[int, int, int, int] | None:
    """Offsets of the reduction, the timeout and `asyncOp` in the struct, and what no timeout looks like."""
    kind = dist.AllreduceOptions
    if [base.__name__ for base in kind.__mro__] != ["AllreduceOptions", "pybind11_object", "object"]:
        return None
    options = kind()
    offsets = []
    for name, values in _EXPERIMENTS.items():
        usual = getattr(options, name)
        seen = []
        for value, _ in values:
            setattr(options, name, value)
            seen.append(_look(options))
            setattr(options, name, usual)
        if any(bytes_ is None for bytes_ in seen):
            return None
        width = _WORD if name == "timeout" else 1
        places = [
            at
            for at in range(0, _STRUCT - width + 1, width)
            if all(
                bytes_ is not None and bytes_[at : at + width] == number.to_bytes(width, "little")
                for bytes_, (_, number) in zip(seen, values, strict=True)
            )
        ]
        if len(places) != 1:
            return None
        offsets.append(places[0])
    red, timeout, later = offsets
    bytes_ = _look(kind())
    if bytes_ is None:
        return None
    return red, timeout, later, int.from_bytes(bytes_[timeout : timeout + _WORD], "little", signed=True)


def _look(options: object) -> bytes | None:
    pointer = _core.peek(id(options) + _POINTER, _WORD)
    return None if pointer is None else _core.peek(int.from_bytes(pointer, "little"), _STRUCT)


_REDUCTIONS = [getattr(dist.ReduceOp, name) for name in ("MAX", "SUM", "BXOR", "MIN", "PRODUCT", "AVG")]
# Values to set, and the numbers that are to be seen for them.
_EXPERIMENTS: dict[str, list[tuple[object, int]]] = {
    "reduceOp": [(op, int(op)) for op in _REDUCTIONS],
    "timeout": [(timedelta(milliseconds=n), n) for n in (0x0123456789, 1, 0x7654321)],
    "asyncOp": [(flag, int(flag)) for flag in (True, False, True, True, False)],
}
