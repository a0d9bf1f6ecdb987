"""Operations as torch's c10d operators, for whoever looks at those.

The methods of unicomm's groups call communicators directly. A dispatch mode (CommDebugMode, make_fx,
FakeTensorMode) or a tensor subclass (AsyncCollectiveTensor) instead sees the operators of torch's dispatcher,
such as `c10d::allreduce_`. If there is one, `is_observed` says so, and the method calls the operator
(`by_operator`), whose kernel calls the method again.

The kernels of this module stand before torch's for CPU and CUDA tensors, which need a backend in C++;
torch's dispatcher calls them by the key BackendSelect. They pass groups of other classes on to torch's
through the dispatcher, which releases the interpreter lock: a thread of Gloo that destroys a Work waits for
this lock while it holds the one that the group's next operation needs. C++ code that calls an operator
itself also reaches unicomm's groups by these kernels: the `_out` forms of torch's functional collectives,
which Inductor makes of FSDP's.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from unicomm.c10d import compat
from unicomm.c10d.compat import dispatch_mode_at, dispatch_modes
from unicomm.c10d.process_group_work import held_by_cpp
from unicomm.comms.errors import UnsupportedError

from .table import METHODS

#: An attribute of dispatch modes that do not look at collectives: methods take their usual way.
LOOKS_AWAY = "_unicomm_looks_away"


class Group(Protocol):
    """What this module needs of a group of unicomm. `stand_in` is for `by_operator` alone."""

    stand_in: dist.ProcessGroup | None

    def rank(self) -> int: ...
    def size(self) -> int: ...
    def getGroupName(self) -> str: ...  # noqa: N802
    def getGroupDesc(self) -> str: ...  # noqa: N802


# Arguments of operators that belong into the options, and their names there. The other arguments, apart from
# the group, are those of the method. `tensor` is that of a barrier, whose device counts.
_SETTINGS = {"root_rank": "rootRank", "root_tensor": "rootTensor", "async_op": "asyncOp"}
_NO_ARGUMENTS = {
    *_SETTINGS,
    "process_group",
    "reduce_op",
    "timeout",
    "sparse_indices",
    "device_ids",
    "tensor",
}


class _Call(threading.local):
    """What this thread's `by_operator` and the kernel tell each other."""

    depth = 0  # kernels that are running: what they call is not to become an operator again
    asked = False  # whether `by_operator` called the operator
    reduction: Any = None  # of the method's options
    work: dist.Work | None = None  # what the kernel's method returned


_call = _Call()
_library: Any = None
# The process group under which operators know a unicomm group -> that group.
_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.ref[Group]]
_groups = weakref.WeakKeyDictionary()


# Classes of arguments that nobody looks at. Asking whether a value is a tensor takes longer.
_PLAIN = {torch.Tensor, torch.nn.Parameter, int, type(None), *(row.options for row in METHODS.values())}


def is_observed(arguments: Sequence[Any]) -> bool:
    """Whether a call with these arguments has to go through torch's dispatcher."""
    looked_at = dispatch_modes() > 0 and _modes_look()
    return (looked_at or not _are_plain(arguments)) and not _call.depth


def _modes_look() -> bool:
    return not all(hasattr(dispatch_mode_at(n), LOOKS_AWAY) for n in range(dispatch_modes()))


def _are_plain(values: Sequence[Any]) -> bool:
    for value in values:
        cls = value.__class__
        if cls in _PLAIN:
            continue
        if cls is list or cls is tuple:
            if not _are_plain(value):
                return False
        elif isinstance(value, torch.Tensor) and cls.__torch_dispatch__ != torch.Tensor.__torch_dispatch__:
            return False
    return True


def by_operator(group: Group, name: str, arguments: Sequence[Any]) -> dist.Work:
    """Calls method `name` of `group` by its operator. Returns the method's Work.

    If nobody calls the operator's kernel (FakeTensorMode, meta tensors), the Work is torch's.
    """
    stand_in = group.stand_in
    if stand_in is None:
        # A group of torch's own class, whose methods in C++ call the operators; `group` overrides them.
        stand_in = group.stand_in = dist.ProcessGroup(group.rank(), group.size())  # type: ignore[call-arg]
        compat.name_group(stand_in, group.getGroupName(), group.getGroupDesc())
        _groups[stand_in] = weakref.ref(group)
    before = _call.asked, _call.reduction, _call.work
    _call.asked, _call.work = True, None
    _call.reduction = getattr(arguments[-1], "reduceOp", None) if arguments else None
    try:
        theirs: dist.Work = getattr(stand_in, name)(*arguments)
        return theirs if _call.work is None else _call.work
    finally:
        _call.asked, _call.reduction, _call.work = before


def install() -> None:
    """Registers the kernels, once in a process."""
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    for method, row in METHODS.items():
        if compat.has_kernel(f"c10d::{row.operator}", "CPU"):
            _library.impl(row.operator, _kernel(method), "BackendSelect", with_keyset=True)


def _ours(boxed: Any) -> Any:
    """Returns unicomm's group behind an operator's argument, or None."""
    group = dist.ProcessGroup.unbox(boxed)
    if hasattr(group, "stand_in"):
        return group
    found = _groups.get(group)
    return None if found is None else found()


def _kernel(method: str) -> Callable[..., Any]:
    """Returns the kernel of a method's operator."""
    options = METHODS[method].options
    schema = compat.declared_schema(f"c10d::{METHODS[method].operator}")
    operator = getattr(torch.ops.c10d, METHODS[method].operator).default
    names = [argument.name for argument in schema.arguments]
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    group_at, many = names.index("process_group"), len(schema.returns) > 1

    def kernel(keys: Any, *given: Any, **named: Any) -> Any:
        group = _ours(named["process_group"] if "process_group" in named else given[group_at])
        below, on_device = compat.after_backend_select(keys)
        if group is None or not on_device:  # as when FakeTensorMode asks for shapes
            return operator.redispatch(below, *given, **named)
        values = defaults | dict(zip(names, given, strict=False)) | named
        arguments = [values[name] for name in names if name not in _NO_ARGUMENTS]
        if options is not None:
            arguments.append(_options(options(), values))
        asked, _call.asked = _call.asked, False
        _call.depth += 1
        try:
            _call.work = work = getattr(group, method)(*arguments)
        finally:
            _call.depth -= 1
            _call.asked = asked
        boxed = held_by_cpp(work).boxed()  # also if `asked`: a mode may keep what the operator returned
        return (arguments[0], boxed) if many else boxed

    return kernel


def _options(options: Any, values: dict[str, Any]) -> Any:
    if "reduce_op" in values:
        options.reduceOp = _call.reduction or _reduction(values["reduce_op"])
    for name, attribute in _SETTINGS.items():
        if name in values and hasattr(options, attribute):
            setattr(options, attribute, values[name])
    if "tensor" in values:
        options.device = values["tensor"].device
    if "timeout" in values and hasattr(options, "timeout"):
        options.timeout = timedelta(milliseconds=values["timeout"])
    return options


def _reduction(boxed: Any) -> Any:
    number = boxed.op()
    kinds: Mapping[str, Any] = dist.ReduceOp.RedOpType.__members__
    name, kind = next((name, kind) for name, kind in kinds.items() if int(kind) == number)
    if name == "PREMUL_SUM":
        raise UnsupportedError(
            "an operator of torch does not tell the factor of PREMUL_SUM",
            hint="multiply the tensor, then reduce it by SUM",
        )
    return dist.ReduceOp(kind)
