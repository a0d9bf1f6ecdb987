"""Hooks around operations: before, after, and when a communicator breaks.

A pre-hook gets `(name: OpName, op_id: int, args: OpArgs)` before the operation is recorded or sent. An
exception that it raises goes to the caller, and the operation does not happen. A post-hook gets the same
arguments when the call returns, which for an asynchronous operation is before it has run. Splits and
reconfigurations have hooks, too. `op_id` counts the operations of all communicators of the process from 0 and
is the same in both hooks. An abort hook gets the error, once, when the communicator breaks; pending
operations have been told to end by then. Hooks of one kind run in the order of their registration, in the
caller's thread.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from unicomm import _core
from unicomm.comms.errors import CommError
from unicomm.comms.operations.call import OpArgs
from unicomm.comms.operations.table import OpName

PreHook = Callable[[OpName, int, OpArgs], None]
PostHook = Callable[[OpName, int, OpArgs], None]
AbortHook = Callable[[CommError], None]

#: Numbers the operations of all communicators of this process.
next_op_id = _core.next_op_id


class RemovableHandle:
    """Returned by `register_*_hook`: `remove()` takes the hook away; calling it again does nothing.

    As a context manager it removes the hook at the end of the block. Dropping it removes nothing.
    """

    def __init__(self, owner: Hooks, hooks: dict[int, Callable[..., None]], key: int) -> None:
        self._owner = owner
        self._hooks = hooks
        self._key = key

    def remove(self) -> None:
        """Takes the hook away. Again it does nothing."""
        if self._hooks.pop(self._key, None) is not None:
            self._owner.changed()

    def __enter__(self) -> RemovableHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class Hooks:
    """The hooks of one communicator."""

    def __init__(self, on_active: Callable[[bool], None]) -> None:
        """Calls `on_active(True)` when there is a first hook, `on_active(False)` when the last is removed."""
        self.pre: dict[int, PreHook] = {}
        self.post: dict[int, PostHook] = {}
        self.abort: dict[int, AbortHook] = {}
        # For observers of this package (clog): called when an operation is over, in the thread that ran it.
        self.over: dict[int, Callable[[OpArgs, BaseException | None], None]] = {}
        self._keys = itertools.count()
        self._lock = threading.Lock()
        self.active = False  # whether an operation has to call a hook
        self._on_active = on_active

    def add(self, kind: str, hook: Callable[..., None]) -> RemovableHandle:
        if not callable(hook):
            raise TypeError(f"a {kind}-hook must be callable, not a {type(hook).__name__}")
        hooks = getattr(self, kind)
        key = next(self._keys)
        hooks[key] = hook
        self.changed()
        return RemovableHandle(self, hooks, key)

    def changed(self) -> None:
        with self._lock:
            active = bool(self.pre or self.post or self.over)
            if active != self.active:
                self.active = active
                self._on_active(active)

    def move(self, on_active: Callable[[bool], None]) -> None:
        """Makes these the hooks of another engine of the same communicator."""
        with self._lock:
            self._on_active = on_active
            if self.active:
                on_active(True)

    def finished(self, args: OpArgs, error: BaseException | None) -> None:
        for hook in list(self.over.values()):
            hook(args, error)

    def before(self, args: OpArgs) -> None:
        for hook in list(self.pre.values()):
            hook(OpName[args.name], args.op_id, args)

    def after(self, args: OpArgs) -> None:
        for hook in list(self.post.values()):
            hook(OpName[args.name], args.op_id, args)

    def broken(self, error: CommError) -> None:
        """Runs the abort hooks. Logs what a hook raises, since it must not hide the communicator's error."""
        for hook in list(self.abort.values()):
            try:
                hook(error)
            except Exception:
                logging.getLogger("unicomm").exception("an abort hook failed")


class Hookable(Protocol):
    """A communicator, as objects that register hooks see it. `_engine.hooks` are its hooks."""

    _engine: Any

    def get_name(self) -> str: ...

    def get_uid(self) -> str: ...

    def get_rank(self) -> int: ...

    def get_size(self) -> int: ...

    def get_backend(self) -> str: ...

    def register_pre_hook(self, hook: PreHook) -> RemovableHandle: ...


class NanCheckHook:
    """Raises `CommError` for an operation with a NaN: before it for inputs, after it for outputs.

    Call `register_with_comm(comm)` for each communicator to check. It costs one pass over the tensors.
    Outputs of an asynchronous operation are not checked, because the call returns before they are written.

    Args:
        check_inputs: whether to check what the operation reads on this rank.
        check_outputs: whether to check what a synchronous operation has written on this rank.
    """

    def __init__(self, check_inputs: bool = True, check_outputs: bool = False) -> None:
        self._check_inputs = check_inputs
        self._check_outputs = check_outputs
        self._handles: list[RemovableHandle] = []

    def is_enabled(self) -> bool:
        """Whether it is registered with a communicator."""
        return bool(self._handles)

    def register_with_comm(self, comm: Hookable) -> None:
        """Checks the operations of `comm` from now on."""
        name = comm.get_name()

        def check(kind: str, tensors: Iterable[torch.Tensor], args: OpArgs) -> None:
            for i, tensor in enumerate(tensors):
                if (tensor.is_floating_point() or tensor.is_complex()) and bool(tensor.isnan().any()):
                    raise CommError(
                        f"NaN detected in {kind} tensor {i} for '{args.name}'",
                        op=args.name,
                        comm=name,
                        rank=comm.get_rank(),  # reconfigure may have changed it
                        hint="find the layer that made it: torch.autograd.set_detect_anomaly(True)",
                    )

        def before(op: OpName, op_id: int, args: OpArgs) -> None:
            if args.name != "broadcast" or args.root == comm.get_rank():
                check("input", [*args.inputs, *(m.tensor for m in args.messages if m.send)], args)

        def after(op: OpName, op_id: int, args: OpArgs) -> None:
            if not args.async_op and (args.name != "reduce" or args.root == comm.get_rank()):
                check("output", [*args.outputs, *(m.tensor for m in args.messages if not m.send)], args)

        hooks = comm._engine.hooks
        if self._check_inputs:
            self._handles.append(hooks.add("pre", before))
        if self._check_outputs:
            self._handles.append(hooks.add("post", after))

    def remove(self) -> None:
        """Checks no communicator any more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
