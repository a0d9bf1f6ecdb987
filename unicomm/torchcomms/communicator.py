"""TorchComm: `unicomm.Communicator` with torchcomms' signatures.

`async_op` has no default, hints of one operation are accepted, hooks get torchcomms' arguments. Each method
does what the method of `Communicator` with its name does.
"""

# mypy: disable-error-code="override"

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

from unicomm.c10d.compat import methods, not_traced
from unicomm.comms.communicator import Communicator
from unicomm.comms.errors import CommError
from unicomm.comms.execution.hooks import RemovableHandle, next_op_id
from unicomm.comms.membership.split import Split
from unicomm.comms.operations.arrays import Array
from unicomm.comms.operations.call import OpArgs
from unicomm.comms.operations.reduction import ReduceOp
from unicomm.comms.operations.table import OpName
from unicomm.comms.options import Timeout
from unicomm.comms.persistent import AllGatherHandle
from unicomm.comms.work import Work

from .batch import BatchSendRecv
from .hook_arguments import post_hook_arguments, pre_hook_arguments
from .options import CommOptions, Hints, as_torchcomms, check_hints
from .window import TorchCommWindow

Tensor = Array
#: The op_id of `finalize`, which does not count.
_FINALIZE_ID = 2**64 - 1


class TorchComm(Communicator):
    """A communicator with torchcomms' interface. Made by `new_comm` or `split`.

    docs/torchcomms.md says which methods differ from torchcomms' and how.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Not for users: see `new_comm`."""
        super().__init__(*args, **kwargs)
        # Recorders and logs that are to be registered with the children of this communicator, too.
        self._followers: list[Any] = []

    # --- operations -------------------------------------------------------------------------------------

    def broadcast(
        self, tensor: Tensor, root: int, async_op: bool, hints: Hints = None, timeout: Timeout = None
    ) -> Work:
        check_hints(hints)
        return super().broadcast(tensor, root, async_op, None, timeout)

    def all_reduce(
        self, tensor: Tensor, op: ReduceOp, async_op: bool, hints: Hints = None, timeout: Timeout = None
    ) -> Work:
        check_hints(hints)
        return super().all_reduce(tensor, op, async_op, None, timeout)

    def reduce(
        self,
        tensor: Tensor,
        root: int,
        op: ReduceOp,
        async_op: bool,
        hints: Hints = None,
        timeout: Timeout = None,
    ) -> Work:
        check_hints(hints)
        return super().reduce(tensor, root, op, async_op, None, timeout)

    def all_gather(
        self,
        tensor_list: Sequence[Tensor],
        tensor: Tensor,
        async_op: bool,
        hints: Hints = None,
        timeout: Timeout = None,
    ) -> Work:
        check_hints(hints)
        return super().all_gather(tensor_list, tensor, async_op, None, timeout)

    def all_gather_v(
        self,
        tensor_list: Sequence[Tensor],
        tensor: Tensor,
        async_op: bool,
        hints: Hints = None,
        timeout: Timeout = None,
    ) -> Work:
        check_hints(hints)
        return super().all_gather_v(tensor_list, tensor, async_op, None, timeout)

    def all_gather_single(
        self, output: Tensor, input: Tensor, async_op: bool, hints: Hints = None, timeout: Timeout = None
    ) -> Work:
        check_hints(hints)
        return super().all_gather_single(output, input, async_op, None, timeout)

    def reduce_scatter(
        self,
        output: Tensor,
        input_list: Sequence[Tensor],
        op: ReduceOp,
        async_op: bool,
        hints: Hints = None,
        timeout: Timeout = None,
    ) -> Work:
        check_hints(hints)
        return super().reduce_scatter(output, input_list, op, async_op, None, timeout)

    def reduce_scatter_v(
        self,
        output: Tensor,
        input_list: Sequence[Tensor],
        op: ReduceOp,
        async_op: bool,
        hints: Hints = None,
        timeout: Timeout = None,
    ) -> Work:
        check_hints(hints)
        return super().reduce_scatter_v(output, input_list, op, async_op, None, timeout)

    def reduce_scatter_single(
        self,
        output: Tensor,
        input: Tensor,
        op: ReduceOp,
        async_op: bool,
        hints: Hints = None,
        timeout: Timeout = None,
    ) -> Work:
        check_hints(hints)
        return super().reduce_scatter_single(output, input, op, async_op, None, timeout)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, async_op: bool, hints: Hints = None, timeout: Timeout = None
    ) -> Work:
        check_hints(hints)
        return super().all_to_all_single(output, input, async_op, None, timeout)

    def all_to_all_v_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        async_op: bool,
        hints: Hints = None,
        timeout: Timeout = None,
    ) -> Work:
        check_hints(hints)
        return super().all_to_all_v_single(
            output, input, output_split_sizes, input_split_sizes, async_op, None, timeout
        )

    def all_to_all(
        self,
        output_tensor_list: Sequence[Tensor],
        input_tensor_list: Sequence[Tensor],
        async_op: bool,
        hints: Hints = None,
        timeout: Timeout = None,
    ) -> Work:
        check_hints(hints)
        return super().all_to_all(output_tensor_list, input_tensor_list, async_op, None, timeout)

    def barrier(self, async_op: bool, hints: Hints = None, timeout: Timeout = None) -> Work:
        check_hints(hints)
        return super().barrier(async_op, None, timeout)

    def scatter(
        self,
        output_tensor: Tensor,
        input_tensor_list: Sequence[Tensor],
        root: int,
        async_op: bool,
        hints: Hints = None,
        timeout: Timeout = None,
    ) -> Work:
        check_hints(hints)
        return super().scatter(output_tensor, input_tensor_list, root, async_op, None, timeout)

    def gather(
        self,
        output_tensor_list: Sequence[Tensor],
        input_tensor: Tensor,
        root: int,
        async_op: bool,
        hints: Hints = None,
        timeout: Timeout = None,
    ) -> Work:
        check_hints(hints)
        return super().gather(output_tensor_list, input_tensor, root, async_op, None, timeout)

    def gather_single(
        self,
        output: Tensor | None,
        input: Tensor,
        root: int,
        async_op: bool,
        hints: Hints = None,
        timeout: Timeout = None,
    ) -> Work:
        check_hints(hints)
        return super().gather_single(output, input, root, async_op, None, timeout)

    def send(
        self, tensor: Tensor, dst: int, async_op: bool, hints: Hints = None, timeout: Timeout = None
    ) -> Work:
        check_hints(hints)
        return super().send(tensor, dst, async_op, None, timeout)

    def recv(
        self, tensor: Tensor, src: int, async_op: bool, hints: Hints = None, timeout: Timeout = None
    ) -> Work:
        check_hints(hints)
        return super().recv(tensor, src, async_op, None, timeout)

    def batch_op_create(self) -> BatchSendRecv:
        """Returns an empty batch."""
        return BatchSendRecv(self)

    def all_gather_p_init(
        self, output: Tensor, hints: Hints = None, timeout: Timeout = None
    ) -> AllGatherHandle:
        check_hints(hints)
        return super().all_gather_p_init(output, None, timeout)

    def all_gather_p_exec(
        self,
        handle: AllGatherHandle,
        input: Tensor,
        async_op: bool,
        hints: Hints = None,
        timeout: Timeout = None,
    ) -> Work:
        check_hints(hints)
        return super().all_gather_p_exec(handle, input, async_op, None, timeout)

    # --- groups, windows, memory --------------------------------------------------------------------------

    def split(
        self, ranks: Sequence[int], name: str, hints: Hints = None, timeout: Timeout = None
    ) -> TorchComm | None:
        return cast("TorchComm | None", super().split(ranks, name, hints, timeout))

    def _split(self, plan: Split) -> Communicator | None:
        child = cast("TorchComm | None", super()._split(plan))
        if child is not None:
            for follower in self._followers:
                follower.register_with_comm(child)
        return child

    def new_window(self, tensor: Tensor | None = None) -> TorchCommWindow:
        open_window = super().new_window

        def make() -> TorchCommWindow:
            return TorchCommWindow(open_window(tensor))

        return self._engine.control(OpArgs("new_window", next_op_id()), make)

    def get_mem_allocator(self) -> Any:
        """Returns what makes memory that the backend uses directly.

        On a GPU an allocator for `torch.cuda.MemPool`, as in torchcomms; on the CPU a
        `unicomm.MemAllocator`. Raises `UnsupportedError` if the backend has no such memory.
        """
        allocator = self.mem_allocator
        return allocator if self.get_device().type == "cpu" else allocator.pool.allocator

    def tensor_register(self, tensor: Tensor) -> None:
        """See `unicomm.MemAllocator.tensor_register`."""
        self.mem_allocator.tensor_register(tensor)

    def tensor_deregister(self, tensor: Tensor) -> None:
        """See `unicomm.MemAllocator.tensor_deregister`."""
        self.mem_allocator.tensor_deregister(tensor)

    # --- properties -------------------------------------------------------------------------------------

    def get_options(self) -> CommOptions:
        return as_torchcomms(self._member.options)

    def get_backend_impl(self) -> object:
        """Returns the backend's own object. unicomm promises nothing for its use."""
        return self.unsafe_backend

    def unsafe_get_backend(self) -> object:
        """Deprecated: see `get_backend_impl`."""
        warnings.warn("use get_backend_impl()", DeprecationWarning, stacklevel=2)
        return self.unsafe_backend

    def is_abort_supported(self) -> bool:
        """Returns True: every backend can abort."""
        return True

    def get_device_transport(self) -> NoReturn:
        """Raises `UnsupportedError`: torchcomms' kernels take a handle of its own library."""
        self._engine.refuse(
            "get_device_transport",
            "torchcomms' device interface is not here",
            "kernels use unicomm.symm",
        )

    # --- hooks and the end ------------------------------------------------------------------------------

    def register_pre_hook(self, callback: Callable[[OpName, int, Any], None]) -> RemovableHandle:
        """Calls `callback(name, op_id, args)` before each operation, which its exception stops."""
        _check_callable("pre", callback)

        def hook(name: OpName, op_id: int, args: OpArgs) -> None:
            if (typed := pre_hook_arguments(args)) is not None:
                callback(name, op_id, typed)

        return super().register_pre_hook(hook)

    def register_post_hook(self, callback: Callable[[int, Any], None]) -> RemovableHandle:
        """Calls `callback(op_id, args)` when the call of an operation returns."""
        _check_callable("post", callback)

        def hook(name: OpName, op_id: int, args: OpArgs) -> None:
            if (typed := post_hook_arguments(args)) is not None:
                callback(op_id, typed)

        return super().register_post_hook(hook)

    def register_abort_hook(self, callback: Callable[[], None]) -> RemovableHandle:
        """Calls `callback()` once, when the communicator breaks."""
        _check_callable("abort", callback)

        def hook(error: CommError) -> None:
            callback()

        return super().register_abort_hook(hook)

    def finalize(self) -> None:
        run = super().finalize
        if self._engine.closing:
            run()
        else:
            self._engine.control(OpArgs("finalize", _FINALIZE_ID), run)


def _check_callable(kind: str, callback: object) -> None:
    if not callable(callback):
        raise TypeError(f"a {kind}-hook must be callable, not a {type(callback).__name__}")


not_traced(methods(TorchComm))
