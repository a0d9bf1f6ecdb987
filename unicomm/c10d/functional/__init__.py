"""Collectives as differentiable functions that take a tensor and return a new one.

    y = unicomm.functional.all_reduce(x, "sum", group)        # is torch.ops.unicomm.all_reduce
    torch.compile(f, fullgraph=True)                          # `group` is an input of the graph

`group` is a `Communicator` or a `ProcessGroup` over communicators. Each operator has an overload for either.
With torch 2.11, whose operators take no process groups, the functions here pass the group's communicator.
The functions are synchronous: their results may be used at once (on a device in stream order). Those whose
name ends in `_async` are not; asynchronous.py says what they return.

Every operator has a kernel, a shape function for tracing, and, if the result depends smoothly on the input, a
gradient (table.py, kernels.py). A gradient follows from the chain rule for the sum of
the losses of all ranks: the gradient of `all_reduce` by "sum" is the sum of all ranks' gradients. All ranks
must therefore run the same backward.

A graph has this rank's number and the number of ranks as constants: the result of `gather` has rows on the
root alone. A group in which either differs gets another graph.

table.py         the operators
kernels.py       kernel, shape function and gradient of each
declare.py       declares them to torch
asynchronous.py  asynchronous forms, which Inductor reorders
messages.py      send, receive and barrier in graphs
methods.py       what torch.compile traces for a communicator's methods
"""

from __future__ import annotations

from . import asynchronous, messages
from .declare import define, function
from .kernels import communicator, group_size
from .methods import trace_methods
from .table import OPS, FunctionalOp

for _name, _row in OPS.items():
    define(_name, _row)
    globals()[_name] = function(_name, _row)
globals().update(asynchronous.declare_all())
globals().update(messages.declare_all())
trace_methods()

__all__ = ["OPS", "FunctionalOp", "communicator", "group_size"]
__all__ += [*OPS, *asynchronous.ASYNC_OPS, *messages.MESSAGE_OPS]  # noqa: PLE0604
