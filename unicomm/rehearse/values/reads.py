"""Reads of made-up data: lines of the program that look at values which a rehearsal has made up.

Also reads of real data from whichever rank was first, because the program may go on in another way with
another sender.

`Received` is a torch function mode. It follows received tensors, and small results of hollow tensors, through
functions of torch that the program calls from Python, and notes where a value becomes a number of Python, a
branch or a shape. What C++ computes (gradients, DDP's buckets) is not followed, and neither are parameters
that an optimizer has updated from them.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..places import is_users

#: What values are made up of.
RECEIVED, HOLLOW = "received data", "data that --meta does not compute"
#: Real values that depend on which rank was first.
FROM_ANY = "data received from any rank"

_MARK = "_unicomm_made_up"
_TORCH = str(Path(torch.__file__).parent) + "/"
_OURS = str(Path(__file__).parent.parent) + "/"
#: Beginnings of files whose frames are between a read and the line that reads: ours, and those with which
#: torch wraps dispatch modes.
_BETWEEN = (_OURS, f"{_TORCH}_compile.py", f"{_TORCH}_dynamo/eval_frame.py")
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

#: (file, line, what becomes of it, what it is made of) -> how often; None outside of a `Received`.
_found: Counter[tuple[str, int, str, str]] | None = None


def mark(tensors: Iterable[torch.Tensor], why: str = RECEIVED) -> None:
    """Marks tensors as made up."""
    if _found is not None:
        for tensor in tensors:
            setattr(tensor, _MARK, why)


def note(what: str, why: str) -> None:
    """Notes that the line of the program that runs reads made-up data, unless torch reads it for itself."""
    if _found is None:
        return
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    # Reads within torch, as in its collectives of objects, are no branches of the program.
    if frame is not None and is_users(frame.f_code.co_filename):
        _found[frame.f_code.co_filename, frame.f_lineno, what, why] += 1


def _marked(values: Any, depth: int = 2) -> str:
    """Returns what a marked tensor among `values` is made of, "" if there is none."""
    if isinstance(values, torch.Tensor):
        return str(values.__dict__.get(_MARK, ""))
    if depth and isinstance(values, (list, tuple)):
        return next(filter(None, (_marked(value, depth - 1) for value in values)), "")
    return ""


def _pass_on(result: Any, why: str) -> None:
    if isinstance(result, torch.Tensor):
        if not isinstance(result, torch.nn.Parameter):
            setattr(result, _MARK, why)
    elif isinstance(result, (list, tuple)):
        for value in result:
            _pass_on(value, why)


class Received(TorchFunctionMode):
    """Follows received tensors while it is entered; `found` has the places that read them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[str, int, str, str]] = Counter()

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
        if why := _marked(args) or (_marked(tuple(kwargs.values())) if kwargs else ""):
            name = getattr(func, "__name__", "")
            if name in _READS:
                note(_READS[name], why)
            else:
                _pass_on(result, why)
        return result
