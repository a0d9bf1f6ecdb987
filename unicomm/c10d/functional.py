"""Collectives as differentiable functions that take a tensor and return a new one.

    y = unicomm.functional.all_reduce(x, "sum", group)        # is torch.ops.unicomm.all_reduce
    torch.compile(f, fullgraph=True)                          # `group` is an input of the graph

`group` is a `Communicator` or a `ProcessGroup` over communicators. Each operator has an overload for either.
With torch 2.11, whose operators take no process groups, the functions here pass the group's communicator.
The functions are synchronous: their results may be used at once (on a device in stream order). Those whose
name ends in `_async` are not; functional_async.py says what they return.

Every operator has a kernel, a shape function for tracing, and, if the result depends smoothly on the input, a
gradient (functional_table.py, functional_kernels.py). A gradient follows from the chain rule for the sum of
the losses of all ranks: the gradient of `all_reduce` by "sum" is the sum of all ranks' gradients. All ranks
must therefore run the same backward.

A graph has this rank's number and the number of ranks as constants: the result of `gather` has rows on the
root alone. A group in which either differs gets another graph.
"""

from __future__ import annotations

from . import functional_async, functional_messages
from .functional_declare import define, function
from .functional_kernels import communicator, group_size
from .functional_methods import trace_methods
from .functional_table import OPS, FunctionalOp

for _name, _row in OPS.items():
    define(_name, _row)
    globals()[_name] = function(_name, _row)
globals().update(functional_async.declare_all())
globals().update(functional_messages.declare_all())
trace_methods()

__all__ = ["OPS", "FunctionalOp", "communicator", "group_size"]
__all__ += [*OPS, *functional_async.ASYNC_OPS, *functional_messages.MESSAGE_OPS]  # noqa: PLE0604
