"""Communicator: the methods that users call.

Each method hands its arguments to the engine. The operation table (operations/table.py) describes the
operations, operations/check.py checks their arguments, execution/engine.py runs them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn, TypeVar

import torch

from unicomm.c10d.compat import methods, not_traced
from unicomm.comms.execution.assembly import new_engine
from unicomm.comms.execution.expect_slow import expect_slow
from unicomm.comms.execution.fast_path import shorten
from unicomm.comms.execution.hooks import AbortHook, PostHook, PreHook, RemovableHandle
from unicomm.comms.execution.point_to_point import messages
from unicomm.comms.failures import open_communicators
from unicomm.comms.membership import finalize, reconfigure
from unicomm.comms.membership.create import Created
from unicomm.comms.membership.split import Split, plan_split
from unicomm.comms.operations.arrays import Array
from unicomm.comms.operations.reduction import ReduceOp

from .backend import ChangesHints
from .batch import BatchSendRecv
from .errors import AbortedError, CommError, UnsupportedError
from .options import Hints, Timeout, read_hints
from .persistent import AllGatherHandle, check_handle
from .properties import CommunicatorProperties
from .work import Work

if TYPE_CHECKING:
    from unicomm.comms.execution.member import Member
    from unicomm.comms.membership.epoch import ReconfigureState
    from unicomm.comms.memory.window import Window

Tensor = Array  # numpy arrays and arrays with `__dlpack__` are taken as well


class Communicator(CommunicatorProperties):
    """A group of ranks that communicate on one device, over one underlying communicator.

    Made by `unicomm.new_comm` or `split`, and connected when that returns. All ranks must call the same
    collectives in the same order; each call returns a `Work`. With `async_op=False` the operation has
    completed when the call returns. With `async_op=True` it runs in the background, in the order of the
    calls, and its tensors must not be touched before `work.wait()` has returned.

    Parameters that many methods have: `op` is a `ReduceOp`; `root`, `src` and `dst` are ranks of this
    communicator; `hints` are options of this call, text to text, and an unknown one is an error; `timeout`
    counts from the operation's start (seconds or timedelta; None or 0: the communicator's). `output`,
    `output_list` and so on are written, `input`, `input_list` and so on only read.
    Wrong arguments raise `InvalidArgumentError` before anything is sent. On backends that compare
    signatures (see `get_capabilities`), ranks that call different operations all get `MismatchError` before
    any tensor is written. comms/errors.py says which errors leave the communicator usable.

    A numpy array, or an array with `__dlpack__` such as cupy's, may be passed wherever a tensor is expected.
    Its memory is used in place, results included. A read-only array cannot be an output.

    Methods may be called from any thread; operations happen in the order of the calls.
    """

    def __init__(
        self, member: Member, dynamic: ReconfigureState | None = None, vacant: CommError | None = None
    ) -> None:
        """Not for users: see `unicomm.new_comm`."""
        # `reconfigure` replaces both.
        self._member = member
        self._engine = new_engine(member, vacant=vacant)
        self._dynamic = dynamic
        #: Communicators of the same ranks on other devices, for a process group over this one.
        self.beside: list[Communicator] = []
        #: The device that the program named in init_process_group(device_id=), if any.
        self.bound_device: torch.device | None = None

    def __copy__(self) -> Communicator:
        return self

    def __deepcopy__(self, memo: object) -> Communicator:
        """Returns itself: the copy of a model that holds a communicator belongs to the same group."""
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a communicator belongs to its process: create one in the other, do not pickle it")

    # --- collectives --------------------------------------------------------------------------------

    def broadcast(
        self, tensor: Tensor, root: int, async_op: bool = False, hints: Hints = None, timeout: Timeout = None
    ) -> Work:
        """Copies the root's `tensor` into all ranks' `tensor`."""
        done = self._engine.fast.broadcast(tensor, root, async_op, hints, timeout)
        if done:
            return done if isinstance(done, Work) else self._engine.fast_failed("broadcast", done)
        return self._engine.collective("broadcast", (tensor,), async_op, hints, timeout, root=root)

    def all_reduce(
        self,
        tensor: Tensor,
        op: ReduceOp,
        async_op: bool = False,
        hints: Hints = None,
        timeout: Timeout = None,
    ) -> Work:
        """Replaces `tensor` by its reduction over all ranks; all ranks get the same bits."""
        done = self._engine.fast.all_reduce(tensor, op, async_op, hints, timeout)
        if done:
            return done if isinstance(done, Work) else self._engine.fast_failed("all_reduce", done)
        return self._engine.collective("all_reduce", (tensor,), async_op, hints, timeout, op=op)

    def all_reduce_contributions(
        self,
        tensor: Tensor,
        contributions: Tensor,
        op: ReduceOp,
        async_op: bool = False,
        hints: Hints = None,
        timeout: Timeout = None,
    ) -> Work:
        """Replaces `tensor` by the reduction of all ranks' rows of `contributions`, each of its size.

        The reduction is reproducible, and each row counts as a rank does in `all_reduce`: 2 ranks with 2 rows
        each get the bits of 4 ranks with one. `contributions` has the shape (rows, *tensor.shape), with the
        same number of rows on all ranks, and does not change. `ReduceOp.AVG` divides by the number of rows.
        """
        return self._engine.collective(
            "all_reduce", (tensor,), async_op, hints, timeout, contributions=contributions, op=op
        )

    def reduce(
        self,
        tensor: Tensor,
        root: int,
        op: ReduceOp,
        async_op: bool = False,
        hints: Hints = None,
        timeout: Timeout = None,
    ) -> Work:
        """Replaces the root's `tensor` by the reduction over all ranks; other tensors do not change."""
        return self._engine.collective("reduce", (tensor,), async_op, hints, timeout, root=root, op=op)

    def all_gather(
        self,
        tensor_list: Sequence[Tensor],
        tensor: Tensor,
        async_op: bool = False,
        hints: Hints = None,
        timeout: Timeout = None,
    ) -> Work:
        """Rank i's `tensor` goes into `tensor_list[i]` on all ranks; all have the same number of elements."""
        return self._engine.collective("all_gather", (tensor_list, tensor), async_op, hints, timeout)

    def all_gather_v(
        self,
        tensor_list: Sequence[Tensor],
        tensor: Tensor,
        async_op: bool = False,
        hints: Hints = None,
        timeout: Timeout = None,
    ) -> Work:
        """`all_gather` of tensors of different sizes; `tensor_list` has the same sizes on all ranks."""
        return self._engine.collective("all_gather_v", (tensor_list, tensor), async_op, hints, timeout)

    def all_gather_single(
        self,
        output: Tensor,
        input: Tensor,
        async_op: bool = False,
        hints: Hints = None,
        timeout: Timeout = None,
    ) -> Work:
        """Concatenates all ranks' `input` in `output`, which has n times its elements.

        `input` may be exactly this rank's part of `output`.
        """
        done = self._engine.fast.all_gather_single(output, input, async_op, hints, timeout)
        if done:
            return done if isinstance(done, Work) else self._engine.fast_failed("all_gather_single", done)
        return self._engine.collective("all_gather_single", (output, input), async_op, hints, timeout)

    def reduce_scatter(
        self,
        output: Tensor,
        input_list: Sequence[Tensor],
        op: ReduceOp,
        async_op: bool = False,
        hints: Hints = None,
        timeout: Timeout = None,
    ) -> Work:
        """Rank i's `output` becomes the reduction of all ranks' `input_list[i]`; inputs do not change."""
        return self._engine.collective(
            "reduce_scatter", (output, input_list), async_op, hints, timeout, op=op
        )

    def reduce_scatter_v(
        self,
        output: Tensor,
        input_list: Sequence[Tensor],
        op: ReduceOp,
        async_op: bool = False,
        hints: Hints = None,
        timeout: Timeout = None,
    ) -> Work:
        """`reduce_scatter` of parts of different sizes; `input_list` has the same sizes on all ranks."""
        return self._engine.collective(
            "reduce_scatter_v", (output, input_list), async_op, hints, timeout, op=op
        )

    def reduce_scatter_single(
        self,
        output: Tensor,
        input: Tensor,
        op: ReduceOp,
        async_op: bool = False,
        hints: Hints = None,
        timeout: Timeout = None,
    ) -> Work:
        """Rank i's `output` becomes the reduction of the i-th of n equal parts of all ranks' `input`.

        `output` may be exactly this rank's part of `input`.
        """
        done = self._engine.fast.reduce_scatter_single(output, input, op, async_op, hints, timeout)
        if done:
            return done if isinstance(done, Work) else self._engine.fast_failed("reduce_scatter_single", done)
        return self._engine.collective(
            "reduce_scatter_single", (output, input), async_op, hints, timeout, op=op
        )

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        async_op: bool = False,
        hints: Hints = None,
        timeout: Timeout = None,
    ) -> Work:
        """The j-th of n equal parts of rank i's `input` becomes the i-th part of rank j's `output`."""
        done = self._engine.fast.all_to_all_single(output, input, async_op, hints, timeout)
        if done:
            return done if isinstance(done, Work) else self._engine.fast_failed("all_to_all_single", done)
        return self._engine.collective("all_to_all_single", (output, input), async_op, hints, timeout)

    def all_to_all_v_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        async_op: bool = False,
        hints: Hints = None,
        timeout: Timeout = None,
    ) -> Work:
        """`all_to_all_single` with parts of different numbers of rows of the first dimension.

        `input_split_sizes[j]` rows go to rank j, and `output_split_sizes[i]` rows come from rank i.
        """
        return self._engine.collective(
            "all_to_all_v_single",
            (output, input),
            async_op,
            hints,
            timeout,
            out_splits=output_split_sizes,
            in_splits=input_split_sizes,
        )

    def all_to_all(
        self,
        output_tensor_list: Sequence[Tensor],
        input_tensor_list: Sequence[Tensor],
        async_op: bool = False,
        hints: Hints = None,
        timeout: Timeout = None,
    ) -> Work:
        """Rank i's `input_tensor_list[j]` goes into rank j's `output_tensor_list[i]`, which has its size."""
        return self._engine.collective(
            "all_to_all", (output_tensor_list, input_tensor_list), async_op, hints, timeout
        )

    def barrier(self, async_op: bool = False, hints: Hints = None, timeout: Timeout = None) -> Work:
        """Completes when all ranks have called it."""
        done = self._engine.fast.barrier(async_op, hints, timeout)
        if done:
            return done if isinstance(done, Work) else self._engine.fast_failed("barrier", done)
        return self._engine.collective("barrier", (), async_op, hints, timeout)

    def scatter(
        self,
        output_tensor: Tensor,
        input_tensor_list: Sequence[Tensor],
        root: int,
        async_op: bool = False,
        hints: Hints = None,
        timeout: Timeout = None,
    ) -> Work:
        """The root's `input_tensor_list[i]` goes into rank i's `output_tensor`; other ranks pass []."""
        return self._engine.collective(
            "scatter", (output_tensor, input_tensor_list), async_op, hints, timeout, root=root
        )

    def gather(
        self,
        output_tensor_list: Sequence[Tensor],
        input_tensor: Tensor,
        root: int,
        async_op: bool = False,
        hints: Hints = None,
        timeout: Timeout = None,
    ) -> Work:
        """Rank i's `input_tensor` goes into the root's `output_tensor_list[i]`; others pass []."""
        return self._engine.collective(
            "gather", (output_tensor_list, input_tensor), async_op, hints, timeout, root=root
        )

    def gather_single(
        self,
        output: Tensor | None,
        input: Tensor,
        root: int,
        async_op: bool = False,
        hints: Hints = None,
        timeout: Timeout = None,
    ) -> Work:
        """Concatenates all ranks' `input` in the root's `output`; other ranks pass None."""
        return self._engine.collective("gather_single", (output, input), async_op, hints, timeout, root=root)

    # --- point-to-point -----------------------------------------------------------------------------

    def send(
        self, tensor: Tensor, dst: int, async_op: bool = False, hints: Hints = None, timeout: Timeout = None
    ) -> Work:
        """Sends `tensor` to rank `dst`. Completes when `tensor` may be changed, maybe before its arrival."""
        done = self._engine.fast.send(tensor, dst, async_op, hints, timeout)
        if done:
            return done if isinstance(done, Work) else self._engine.fast_failed("send", done)
        return messages(self._engine, [("send", tensor, dst)], async_op, hints, timeout)

    def recv(
        self, tensor: Tensor, src: int, async_op: bool = False, hints: Hints = None, timeout: Timeout = None
    ) -> Work:
        """Receives the next message of rank `src` into `tensor`, which must have its dtype and size."""
        done = self._engine.fast.recv(tensor, src, async_op, hints, timeout)
        if done:
            return done if isinstance(done, Work) else self._engine.fast_failed("recv", done)
        return messages(self._engine, [("recv", tensor, src)], async_op, hints, timeout)

    def batch_op_create(self) -> BatchSendRecv:
        """Returns an empty batch, whose sends and receives run together when it is issued."""
        return BatchSendRecv(self)

    # --- persistent all-gather ----------------------------------------------------------------------

    def all_gather_p_init(
        self, output: Tensor, hints: Hints = None, timeout: Timeout = None
    ) -> AllGatherHandle:
        """Prepares repeated all-gathers into `output`. Called by all ranks."""
        return AllGatherHandle(self, output, hints, timeout)

    def all_gather_p_exec(
        self,
        handle: AllGatherHandle,
        input: Tensor,
        async_op: bool = False,
        hints: Hints = None,
        timeout: Timeout = None,
    ) -> Work:
        """One all-gather of `input` into the tensor that the handle was made for."""
        return check_handle(self, handle, "all_gather_p_exec").run(input, async_op, hints, timeout)

    def all_gather_p_free(self, handle: AllGatherHandle) -> None:
        """Frees the handle; using it afterwards raises `NotReadyError`."""
        check_handle(self, handle, "all_gather_p_free").free()

    # --- groups -------------------------------------------------------------------------------------

    def split(
        self, ranks: Sequence[int], name: str = "", hints: Hints = None, timeout: Timeout = None
    ) -> Communicator | None:
        """Returns a new communicator of `ranks` (ranks of this one), numbered in the order of the list.

        Called by the ranks in the list, with the same list. Other ranks may call it with an empty list, which
        returns None at once, or need not call it at all. Timeout and hints are this communicator's unless
        given. The new communicator stays usable when this one is finalized. An empty `name` becomes
        `<name>_<lowest rank>`.
        """
        return self._split(plan_split(self._engine, ranks, name, hints, timeout))

    def _split(self, plan: Split) -> Communicator | None:
        def connect() -> Communicator | None:
            created = plan.connect()
            return None if created is None else communicator_of(created, type(self))

        return self._engine.control(plan.args, connect)

    def new_window(
        self, tensor: Tensor | None = None, hints: Hints = None, timeout: Timeout = None
    ) -> Window:
        """Opens a tensor to one-sided access, now or with `Window.tensor_register`. Called by all ranks.

        The tensor is from `unicomm.symm.empty(..., comm=comm)`. Connects the communicator's symmetric memory
        first, as `unicomm.symm.init` does, unless it is connected. Raises `UnsupportedError` if the backend
        has no one-sided access.
        """
        from .window import new_window

        return new_window(self._engine, tensor, hints, timeout)

    def get_init_handle(self) -> str:
        """Returns the text by which other ranks reach this one in `reconfigure`. It never changes.

        It holds an address and a secret: give it to ranks of the job only. Raises `UnsupportedError` without
        enable_reconfigure.
        """
        return reconfigure.get_init_handle(self)

    def reconfigure(
        self,
        uuid: int,
        init_handles: list[str] | set[str],
        timeout: Timeout = None,
        hints: Hints = None,
    ) -> Work:
        """Connects this communicator with other ranks: fewer, more, or renumbered. See docs/reconfigure.md.

        Called by all ranks of the new list, with the same arguments, whatever state the communicator is in.
        Blocks until all are connected; the returned Work has completed. Pending operations end with
        `AbortedError`. The object, its name and its hooks stay; rank, size, uid and sequence numbers are
        those of a new communicator. After an error, except `InvalidArgumentError`, the communicator has no
        ranks until another call succeeds.

        Args:
            uuid: names this attempt: any int that was not used before on this communicator.
            init_handles: what `get_init_handle` returned on each new rank, this one among them. The position
                in a list is the rank; a set is put into some order, the same on all ranks.
            timeout: of the attempt; by default the communicator's.
            hints: for the backend; they replace those given before, one by one.

        Raises:
            InvalidArgumentError, UnsupportedError: before anything has happened.
            CommTimeoutError: `culprits` are the new ranks that did not come.
            PeerLostError: `culprits` are gone, or gave up.
            MismatchError: the ranks were given different lists or options.
            AbortedError: another thread called `abort`.
        """
        return reconfigure.reconfigure(self, uuid, init_handles, timeout, hints)

    # --- life ---------------------------------------------------------------------------------------

    def finalize(self, timeout: Timeout = None) -> None:
        """Runs what is pending and closes the communicator. Called by each rank when it is done with it.

        Waits for this rank's pending operations for at most `timeout` (the communicator's by default), then
        aborts them and raises `CommTimeoutError` with their names. Does not wait for other ranks. Later
        operations raise `NotReadyError`; another `finalize` does nothing.

        May be called from any thread, and from hooks: an operation that another thread runs meanwhile
        completes, or ends with a `CommError`. Raises `NotReadyError` in a signal handler that interrupts an
        operation of this communicator in its own thread; such a handler calls `abort`.
        """
        finalize.finalize(self, self._engine.read_timeout("finalize", timeout))

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, exc_type: object, exc: object, tb: object) -> None:
        if exc_type is not None and not self._engine.executor.drain(0.0):
            self.abort()  # finalize would wait for ranks that may never come
        self.finalize()

    def abort(self) -> None:
        """Breaks the communicator at once, without the other ranks' help. May be called from any thread.

        Running and pending operations end with `AbortedError`, on this rank and on the ranks that wait for
        it. Later operations raise the same error. Only `finalize` may follow.
        """
        if self._dynamic is not None:
            self._dynamic.cancel()
        if self._engine.finalized:
            return
        hint, culprits = "create a new communicator to go on", (self._member.rank,)
        error = self._engine.error(AbortedError, None, "aborted by this rank", hint, culprits)
        self._engine.break_(error, self._member.backend.abort)

    def is_aborted(self) -> bool:
        """Whether the communicator is broken: by `abort`, or by an error that leaves it unusable."""
        return self._engine.broken is not None

    def set_timeout(self, timeout: timedelta | float) -> None:
        """Changes the timeout of this rank's later operations."""
        self._engine.timeout = self._engine.fast.timeout = self._engine.read_timeout("set_timeout", timeout)

    def expect_slow(self, name: str, seconds: timedelta | float) -> AbstractContextManager[None]:
        """`with comm.expect_slow("checkpoint", 600):` makes the other ranks wait for this one.

        `name` says in reports what this rank does.
        For up to `seconds` from the block's beginning no operation of the communicator times out, on any
        rank. One rank or several may call it, without the others' help. docs/failures.md says what it covers.
        """
        return expect_slow(self._engine, name, seconds)

    def get_timeout(self) -> float:
        """The timeout of operations in seconds."""
        return self._engine.timeout

    def set_hints(self, hints: Mapping[str, str]) -> None:
        """Changes hints that the backend takes at run time; unknown ones raise `InvalidArgumentError`."""
        with self._engine.located("set_hints"):
            values = read_hints(hints, self._member.backend.capabilities.hints, self.get_backend())
            backend = self._member.backend
            if not isinstance(backend, ChangesHints):
                raise UnsupportedError(
                    f"backend '{backend.name}' takes its hints at creation only: {', '.join(sorted(hints))}",
                    hint="pass hints= to new_comm or split",
                )
            backend.set_hints({name: values[name] for name in hints})

    # --- hooks --------------------------------------------------------------------------------------

    def register_pre_hook(self, hook: PreHook) -> RemovableHandle:
        """Calls `hook(name, op_id, args)` before each operation; an exception of it stops the operation."""
        return self._engine.hooks.add("pre", hook)

    def register_post_hook(self, hook: PostHook) -> RemovableHandle:
        """Calls `hook(name, op_id, args)` when the call of an operation returns."""
        return self._engine.hooks.add("post", hook)

    def register_abort_hook(self, hook: AbortHook) -> RemovableHandle:
        """Calls `hook(error)` once, when the communicator breaks."""
        return self._engine.hooks.add("abort", hook)


C = TypeVar("C", bound=Communicator)


def communicator_of(created: Created, cls: type[C]) -> C:
    """The communicator that `membership.create` or a split has connected. It is open until finalize."""
    comm = cls(created.member, created.dynamic, created.vacant)
    if created.dump is not None:
        comm.register_abort_hook(created.dump)
    open_communicators.add(comm)
    finalize.close_in_child()
    return comm


#: What torchcomms calls it.
TorchComm = Communicator

not_traced(methods(Communicator))
shorten(Communicator)
