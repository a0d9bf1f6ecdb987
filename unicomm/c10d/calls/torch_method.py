"""What the methods of a process group have in common: `torch_method`.

A method takes both of torch's forms of its arguments (overloads.py). It becomes an operator of torch's
dispatcher if somebody looks at those, and for meta tensors, with which torch does nothing (dispatcher.py).
Tensors that the communicator refuses for their layout are copied (layouts.py) or, if sparse, gathered
(sparse.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from unicomm.c10d.process_group_work import ProcessGroupWork
from unicomm.comms.errors import InvalidArgumentError, UnsupportedError
from unicomm.comms.execution.profiling import events as profiling

from .dispatcher import by_operator, is_observed
from .layouts import Contiguous, is_permuted, tensors_in
from .overloads import first_form
from .table import METHODS
from .titles import titled

Method = TypeVar("Method", bound=Callable[..., Any])


def torch_method(name: str, sparse: Callable[..., Any] | None = None) -> Callable[[Method], Method]:
    """Makes a method of a process group, written for torch's first form, what torch calls by `name`.

    `sparse`: the method for sparse tensors, with the same arguments.
    """

    takes_options = METHODS[name].options if METHODS[name].second_form else None

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def called(self: Any, *arguments: Any, opts: Any = None, **named: Any) -> Any:
            if opts is not None:
                arguments = (*arguments, opts)
            if takes_options is not None and (
                named or not arguments or arguments[-1].__class__ is not takes_options
            ):
                arguments = first_form(name, arguments, named)
            if is_observed(arguments):
                return by_operator(self, name, arguments)
            if profiling.session is not None:
                return titled(self, name, arguments, lambda: run(self, arguments))
            return run(self, arguments)

        def run(self: Any, arguments: Sequence[Any]) -> Any:
            check_lists(name, arguments)
            try:  # a method refuses before it has issued anything
                return method(self, *arguments)
            except (InvalidArgumentError, UnsupportedError):
                again = _otherwise(name, method, sparse, arguments)
                if again is None:
                    raise
            return again(self)

        return called  # type: ignore[return-value]

    return decorate


def check_lists(name: str, arguments: Sequence[Any]) -> None:
    """Raises `InvalidArgumentError` if a list does not hold the one tensor, or list, that it has to."""
    row = METHODS[name]
    for what, value in zip(row.single, arguments, strict=False):
        if len(value) != 1 and (value or what != row.may_lack):
            raise InvalidArgumentError(
                f"{name} takes one element in {what}, not {len(value)}",
                op=row.title,
                hint="call it for each tensor, or a method whose name ends in _coalesced",
            )


def _otherwise(
    name: str, method: Callable[..., Any], sparse: Callable[..., Any] | None, arguments: Sequence[Any]
) -> Callable[[Any], Any] | None:
    """Returns a way to call the method with tensors that the communicator has refused, or None."""
    tensors = list(tensors_in(arguments))
    if sparse is not None and any(t.is_sparse for t in tensors):
        return lambda group: sparse(group, *arguments)
    if any(t.is_meta for t in tensors):
        return lambda group: by_operator(group, name, arguments)
    # torch's Gloo takes no other layout in messages either.
    if METHODS[name].options is not None and any(map(is_permuted, tensors)):
        return lambda group: _with_copies(group, method, arguments)
    return None


def _with_copies(group: Any, method: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    copies = Contiguous(arguments)
    work: ProcessGroupWork = method(group, *copies.arguments)
    copies.attach(work, arguments[0])
    return work
