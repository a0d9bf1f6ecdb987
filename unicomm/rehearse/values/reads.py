"""Reads of received data: lines of the program that look at values which a rehearsal has made up.

`Received` is a torch function mode. It follows received tensors through functions of torch that the program
calls from Python, and notes where a value becomes a number of Python, a branch or a shape. What C++ computes
(gradients, DDP's buckets) is not followed, and neither are parameters that an optimizer has updated from
them.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..places import is_users

_MARK = "_unicomm_received"
_READS: Mapping[str, str] = {
    "item": "a number",
    "tolist": "numbers",
    "numpy": "an array",
    "__bool__": "a branch",
    "__int__": "a number",
    "__float__": "a number",
    "__index__": "an index",
    "__contains__": "a branch",
    "equal": "a branch",
    "allclose": "a branch",
    "nonzero": "a shape",
    "masked_select": "a shape",
    "unique": "a shape",
    "repeat_interleave": "a shape",
}

#: (file, line, what becomes of it) -> how often; None outside of a `Received`.
_found: Counter[tuple[str, int, str]] | None = None


def mark(tensors: Iterable[torch.Tensor]) -> None:
    """Marks tensors as received."""
    if _found is not None:
        for tensor in tensors:
            setattr(tensor, _MARK, True)


def _marked(values: Any, depth: int = 2) -> bool:
    if isinstance(values, torch.Tensor):
        return _MARK in values.__dict__
    if depth and isinstance(values, (list, tuple)):
        return any(_marked(value, depth - 1) for value in values)
    return False


def _pass_on(result: Any) -> None:
    if isinstance(result, torch.Tensor):
        if not isinstance(result, torch.nn.Parameter):
            setattr(result, _MARK, True)
    elif isinstance(result, (list, tuple)):
        for value in result:
            _pass_on(value)


class Received(TorchFunctionMode):
    """Follows received tensors while it is entered; `found` has the places that read them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[str, int, str]] = Counter()

    def __enter__(self) -> Received:
        global _found
        _found = self.found
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        global _found
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _found = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.compiler.is_compiling():  # only shapes are known
            return result
        if _marked(args) or (kwargs and _marked(tuple(kwargs.values()))):
            name = getattr(func, "__name__", "")
            if name in _READS:
                self._note(_READS[name])
            else:
                _pass_on(result)
        return result

    def _note(self, what: str) -> None:
        frame = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename == __file__:
            frame = frame.f_back  # type: ignore[assignment]
        # Reads within torch, as in its collectives of objects, are no branches of the program.
        if frame is not None and is_users(frame.f_code.co_filename):
            self.found[frame.f_code.co_filename, frame.f_lineno, what] += 1
