"""A torch.distributed process group over communicators, one for each device type, created eagerly.

`UnicommProcessGroup` is a Python subclass of `torch.distributed.ProcessGroup`. Functions of torch.distributed
call its methods directly. C++ code (DistributedDataParallel, functional collectives) calls the methods that
torch's trampoline knows (torch/csrc/distributed/c10d/PyProcessGroup.hpp). The arguments are torch's: lists of
tensors and option objects.
"""

# The method names and argument lists are torch's, whose stubs describe more forms than torch ever calls.
# ruff: noqa: N802
# mypy: disable-error-code="override, misc, assignment"

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from unicomm import _core
from unicomm.comms.backend import SplitsInLibrary
from unicomm.comms.communicator import Communicator
from unicomm.comms.errors import CommTimeoutError, InvalidArgumentError, PeerLostError, UnsupportedError
from unicomm.comms.execution.issued import ANY_RANK
from unicomm.comms.membership.split import plan_split
from unicomm.comms.operations.reduction import RedOpType, ReduceOp
from unicomm.comms.work import Work

from . import batch_isend_irecv as batches
from . import group_names
from .calls import dispatcher
from .calls.short import short_barrier, short_message
from .calls.sparse import all_reduce_sparse
from .calls.torch_method import torch_method
from .compat import (
    ALL_REDUCE_CODE,
    PrefixStore,
    Store,
    asked_by_split_source,
    dispatch_modes,
    methods,
    not_traced,
    premul_factor,
    ranks_of_groups,
)
from .process_group_work import DONE, NO_TIMEOUT, MessageWork, ProcessGroupWork

Tensor = torch.Tensor

_KINDS: Mapping[str, Any] = dist.ReduceOp.RedOpType.__members__  # torch's
# By torch's number, which is faster to look up than torch's enum.
_RED_OPS = {
    int(_KINDS[t.name]): getattr(ReduceOp, t.name) for t in RedOpType if t is not RedOpType.PREMUL_SUM
}

# dist.all_reduce sets these right before its call. `allreduce` then needs no getter of torch, which are slow.
for _name in ("reduceOp", "asyncOp"):
    _property = _core.noted_property(getattr(dist.AllreduceOptions, _name), _name)
    setattr(dist.AllreduceOptions, _name, _property)


def reduce_op(op: Any) -> ReduceOp:
    """Returns unicomm's reduction for one of torch.distributed's."""
    found = _RED_OPS.get(int(op.op))
    return ReduceOp.PREMUL_SUM(premul_factor(op)) if found is None else found


def _limit(options: Any) -> timedelta | None:
    timeout: timedelta = options.timeout
    return None if timeout == NO_TIMEOUT else timeout


def _even(parts: Sequence[Tensor], whole: Tensor) -> bool:
    """Whether all parts have as many elements as `whole`."""
    return all(part.numel() == whole.numel() for part in parts)


def _paired(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    if len(outputs) != len(inputs):
        raise InvalidArgumentError(
            f"{len(outputs)} outputs do not fit {len(inputs)} inputs", hint="pass an output for each input"
        )
    return list(zip(outputs, inputs, strict=True))


class GroupOptions(dict[str, str]):
    """The backend's hints, and `_timeout`, the attribute in which torch's backends keep their timeout."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm.get_options().hints)
        self._timeout = timedelta(seconds=comm.get_timeout())


class UnicommProcessGroup(dist.ProcessGroup):
    """A process group with one communicator for each device type, which `get_comm(device)` returns.

    The communicators have the same ranks. All functions of torch.distributed take the group. Point-to-point
    operations run side by side and complete one by one; other operations wait for them.
    """

    def __init__(self, *comms: Communicator, store: Store | None = None) -> None:
        if not comms:
            raise InvalidArgumentError("a process group needs a communicator", hint="pass at least one")
        comms = (*comms, *(other for comm in comms for other in comm.beside))
        first = comms[0]
        if any(c.get_ranks() != first.get_ranks() or c.get_rank() != first.get_rank() for c in comms):
            raise InvalidArgumentError(
                "the communicators of a process group have different ranks", hint="split them alike"
            )
        super().__init__(first.get_rank(), first.get_size())  # type: ignore[call-arg]
        self._comms: dict[str, Communicator] = {c.get_device().type: c for c in comms}
        self._first = first
        # If there is only one communicator, its own checks report a tensor on a wrong device.
        self._only = first if len(comms) == 1 else None
        self._store = store
        if store is None and (shared := first._member.store) is not None:
            # Groups that were split from one parent, or made in one job, have one store.
            self._store = PrefixStore(f"unicomm-group/{first.get_uid()}", shared)
        self._group_name = ""
        self._desc = "undefined"
        self.stand_in: dist.ProcessGroup | None = None  # see dispatcher.by_operator
        dispatcher.install()
        self._bound_device = next((c.bound_device for c in comms if c.bound_device is not None), None)

    # --- properties that torch reads from a group or a backend ----------------------------------------

    def get_comm(self, device: torch.device | str | None = None) -> Communicator:
        """Returns the communicator for the type of `device`; the first one when `device` is None."""
        if device is None:
            return self._first
        kind = torch.device(device).type
        if kind not in self._comms:
            raise UnsupportedError(
                f"the group has no communicator for '{kind}'",
                comm=self._first.get_name(),
                rank=self._first.get_rank(),
                hint=f"it has one for {', '.join(self._comms)}; name more in init_process_group(backend=)",
            )
        return self._comms[kind]

    def _for(self, tensor: Tensor) -> Communicator:
        return self._only or self.get_comm(tensor.device)

    def _get_backend(self, device: torch.device) -> UnicommProcessGroup:
        """Returns the group itself: it also has the methods that torch calls on a backend."""
        self.get_comm(device)
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in self._comms]

    def getBackendName(self) -> str:
        return "unicomm"

    def getRank(self) -> int:
        return self._first.get_rank()

    def getSize(self) -> int:
        return self._first.get_size()

    def getGroupName(self) -> str:
        return self._group_name

    def setGroupName(self, name: str) -> None:
        self._group_name = name

    def getGroupDesc(self) -> str:
        return self._desc

    def setGroupDesc(self, desc: str) -> None:
        self._desc = desc

    # torch asks for each by several names.
    name, rank, size = getBackendName, getRank, getSize
    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    @property
    def bound_device_id(self) -> torch.device | None:
        return self._bound_device

    @bound_device_id.setter
    def bound_device_id(self, device: torch.device | None) -> None:
        self._bound_device = device

    @property
    def supports_splitting(self) -> bool:
        """True, except when torch's new_group asks, which looks for a backend of torch's NCCL to split."""
        return not asked_by_split_source()

    @property
    def options(self) -> GroupOptions:
        """The backend's hints, as `init_process_group(pg_options=)` takes them. split_group reads them."""
        return GroupOptions(self._first)

    supports_coalescing = False
    supports_time_estimate = False
    supports_shrinking = False
    supports_tensor_alloc = False

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Does nothing: the communicators are connected."""

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Does nothing. torch calls it for a rank outside a new group that is bound to a device."""

    def get_group_store(self) -> Store | None:
        return self._store

    def _get_sequence_number_for_group(self) -> int:
        return int(self._first._engine.fast.seq)

    def _set_sequence_number_for_group(self) -> None:
        """Does nothing: communicators count from 1 by themselves."""

    def set_timeout(self, timeout: timedelta) -> None:
        for comm in self._comms.values():
            comm.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        for comm in self._comms.values():
            comm.finalize()

    def abort(self) -> None:
        for comm in self._comms.values():
            comm.abort()

    # --- changes of the ranks ------------------------------------------------------------------------------

    @property
    def supports_reconfigure(self) -> bool:
        """Whether the group has a single communicator, created with `enable_reconfigure`."""
        return self._only is not None and self._only.get_options().enable_reconfigure

    def get_init_handle(self) -> str:
        """Calls `Communicator.get_init_handle`."""
        return self._reconfigurable().get_init_handle()

    def reconfigure(
        self,
        uuid: int,
        init_handles: list[str] | set[str],
        timeout: timedelta | float | None = None,
        hints: Mapping[str, str | bool] | None = None,
    ) -> dist.Work:
        """Calls `Communicator.reconfigure`. The group's rank and size follow the communicator's.

        Works on the default group, whose ranks are the ranks of the job from then on, and on a group that
        torch.distributed does not list. Raises `UnsupportedError` on others, before any side effect.
        """
        comm = self._reconfigurable()
        listed = ranks_of_groups()
        if self in listed and dist.GroupMember.WORLD is not self:
            comm._engine.refuse(
                "reconfigure",
                "torch.distributed knows this group's members by ranks of the default group, which stay",
                "reconfigure the default group, then make new groups",
            )
        work = comm.reconfigure(uuid, init_handles, timeout, hints)
        if self in listed:
            listed[self] = {r: r for r in range(comm.get_size())}
        return ProcessGroupWork([work])

    def _reconfigurable(self) -> Communicator:
        if self._only is None:
            self._first._engine.refuse(
                "reconfigure",
                "a group with communicators for several devices cannot change its ranks",
                "make a group for one device; get_comm(device) gives each communicator",
            )
        return self._only

    def splitGroup(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: object = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> UnicommProcessGroup | None:
        """Makes a group of some ranks of this one; ranks that are not among them get None.

        Only members need to call it, but for communicators whose library splits by a call of all ranks.
        """
        wanted = None if device_types is None else {torch.device(d).type for d in device_types}
        if self.rank() not in ranks:
            for kind, comm in self._comms.items():
                needed = isinstance(comm._member.backend, SplitsInLibrary)
                if needed and (wanted is None or kind in wanted):
                    comm._split(plan_split(comm._engine, [], "", None, timeout))
            return None
        # torch's name counts the groups that a rank knows, so it differs between ranks once some of them have
        # made a group of their own. All members agree on the ranks of the group.
        members = [self._first.get_ranks()[r] for r in ranks]
        name = group_names.group_name(members, group_desc)
        meeting = group_names.members_name(members)
        children = []
        for kind, comm in self._comms.items():
            if wanted is None or kind in wanted:
                child = comm._split(plan_split(comm._engine, list(ranks), name, None, timeout, meeting))
                assert child is not None
                children.append(child)
        group = UnicommProcessGroup(*children)
        group.setGroupName(group_name or children[0].get_name())
        group.setGroupDesc(group_desc or "undefined")
        return group

    split_group = splitGroup

    # --- collectives ----------------------------------------------------------------------------------

    def _issue(
        self, name: str, each: Sequence[tuple[Any, ...]], later: bool, limit: Any, op: Any = None
    ) -> list[Work]:
        """Issues an operation for each of several tensors, after the arguments of all have been checked."""
        if not each:
            raise InvalidArgumentError("the list of tensors is empty", op=name, hint="pass a tensor")
        comms = [self._for(tensors[-1]) for tensors in each]
        if len(each) > 1:
            for comm, tensors in zip(comms, each, strict=True):
                comm._engine.check.call(name, tensors, op=op)
        reduction = () if op is None else (op,)
        return [
            getattr(comm, name)(*tensors, *reduction, later, None, limit)
            for comm, tensors in zip(comms, each, strict=True)
        ]

    def _all_reduce_sparse(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Completes before it returns, whatever `asyncOp` is: its three steps keep the order of the calls."""
        op, limit = (ReduceOp.SUM, None) if opts is None else (reduce_op(opts.reduceOp), _limit(opts))
        for tensor in tensors:
            all_reduce_sparse(self._for(tensor), tensor, op, limit)
        return ProcessGroupWork([], tensors)

    def _reduce_each(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        op, limit, later = ReduceOp.SUM, None, False
        if opts is not None:
            op, limit, later = reduce_op(opts.reduceOp), _limit(opts), opts.asyncOp
        works = self._issue("all_reduce", [(t,) for t in tensors], later, limit, op)
        return ProcessGroupWork(works, tensors)

    _all_reduce = torch_method("allreduce", sparse=_all_reduce_sparse)(_reduce_each)
    allreduce_coalesced = torch_method("allreduce_coalesced", sparse=_all_reduce_sparse)(_reduce_each)

    def _all_reduce_failed(self, result: tuple[int, Any]) -> NoReturn:
        self._first._engine.fast_failed("all_reduce", result)

    # A plain synchronous call is one native call; any other calls `_all_reduce`.
    allreduce = _core.all_reduce_method(
        options=dist.AllreduceOptions,
        reduction_hash=dist.ReduceOp.__hash__,
        unset_timeout=NO_TIMEOUT,
        caller=ALL_REDUCE_CODE,
        reductions={kind: _RED_OPS[int(kind)].code for kind in _KINDS.values() if int(kind) in _RED_OPS},
        modes=dispatch_modes,
        path=("_only", "_engine", "fast"),
        general="_all_reduce",
        failed="_all_reduce_failed",
        done=DONE,
    )

    @torch_method("broadcast")
    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        root, limit, later = 0, None, False
        if opts is not None:
            root, limit, later = opts.rootRank, _limit(opts), opts.asyncOp
        work = self._for(tensors[0]).broadcast(tensors[0], root, later, None, limit)
        return ProcessGroupWork([work], tensors)

    @torch_method("reduce")
    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:
        op, limit = reduce_op(opts.reduceOp), _limit(opts)
        work = self._for(tensors[0]).reduce(tensors[0], opts.rootRank, op, opts.asyncOp, None, limit)
        return ProcessGroupWork([work], tensors)

    @torch_method("allgather")
    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        limit, later = (None, False) if opts is None else (_limit(opts), opts.asyncOp)
        outs, tensor = list(outputs[0]), inputs[0]
        comm = self._for(tensor)
        gather = comm.all_gather if _even(outs, tensor) else comm.all_gather_v
        return ProcessGroupWork([gather(outs, tensor, later, None, limit)], outs)

    @torch_method("allgather_coalesced")
    def allgather_coalesced(
        self, output_lists: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        # There is one output list for each rank, with a tensor for each input.
        limit, later = (None, False) if opts is None else (_limit(opts), opts.asyncOp)
        lengths = [len(outs) for outs in output_lists]
        if lengths != [len(inputs)] * self.size():
            raise InvalidArgumentError(
                f"the lists of outputs have {lengths} tensors; {self.size()} of {len(inputs)} are needed",
                op="all_gather",
                hint="pass a list for each rank, with an output for each input",
            )
        each = [([outs[i] for outs in output_lists], tensor) for i, tensor in enumerate(inputs)]
        even = all(_even(outs, tensor) for outs, tensor in each)
        works = self._issue("all_gather" if even else "all_gather_v", each, later, limit)
        return ProcessGroupWork(works, [t for outs in output_lists for t in outs], output_lists)

    @torch_method("_allgather_base")
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        limit, later = (None, False) if opts is None else (_limit(opts), opts.asyncOp)
        work = self._for(input).all_gather_single(output, input, later, None, limit)
        return ProcessGroupWork((work,), (output,))

    _allgather_base = all_gather_single

    @torch_method("allgather_into_tensor_coalesced")
    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        # Up to 2.11 torch's _coalescing_manager passes no options. It waits at once if it is synchronous.
        limit, later = (None, True) if opts is None else (_limit(opts), opts.asyncOp)
        works = self._issue("all_gather_single", _paired(outputs, inputs), later, limit)
        return ProcessGroupWork(works, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @torch_method("reduce_scatter")
    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any
    ) -> dist.Work:
        op, limit = reduce_op(opts.reduceOp), _limit(opts)
        out, ins = outputs[0], list(inputs[0])
        comm = self._for(out)
        scatter = comm.reduce_scatter if _even(ins, out) else comm.reduce_scatter_v
        return ProcessGroupWork([scatter(out, ins, op, opts.asyncOp, None, limit)], outputs)

    @torch_method("_reduce_scatter_base")
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> dist.Work:
        op, limit = reduce_op(opts.reduceOp), _limit(opts)
        work = self._for(input).reduce_scatter_single(output, input, op, opts.asyncOp, None, limit)
        return ProcessGroupWork((work,), (output,))

    _reduce_scatter_base = reduce_scatter_single

    @torch_method("reduce_scatter_tensor_coalesced")
    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any
    ) -> dist.Work:
        op, limit = reduce_op(opts.reduceOp), _limit(opts)
        works = self._issue("reduce_scatter_single", _paired(outputs, inputs), opts.asyncOp, limit, op)
        return ProcessGroupWork(works, outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    @torch_method("alltoall_base")
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> dist.Work:
        limit, later = (None, False) if opts is None else (_limit(opts), opts.asyncOp)
        comm = self._for(input)
        if output_split_sizes or input_split_sizes:
            splits = (list(output_split_sizes), list(input_split_sizes))
            work = comm.all_to_all_v_single(output, input, *splits, later, None, limit)
        else:
            work = comm.all_to_all_single(output, input, later, None, limit)
        return ProcessGroupWork([work], [output])

    alltoall_base = all_to_all_single

    @torch_method("alltoall")
    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        limit, later = (None, False) if opts is None else (_limit(opts), opts.asyncOp)
        work = self._for(inputs[0]).all_to_all(list(outputs), list(inputs), later, None, limit)
        return ProcessGroupWork([work], outputs)

    @torch_method("gather")
    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any) -> dist.Work:
        # Ranks other than the root pass [] or, under the switch, [[]].
        outs = list(outputs[0]) if outputs else []
        work = self._for(inputs[0]).gather(outs, inputs[0], opts.rootRank, opts.asyncOp, None, _limit(opts))
        return ProcessGroupWork([work], outs)

    @torch_method("scatter")
    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> dist.Work:
        ins = list(inputs[0]) if inputs else []
        work = self._for(outputs[0]).scatter(outputs[0], ins, opts.rootRank, opts.asyncOp, None, _limit(opts))
        return ProcessGroupWork([work], outputs)

    @short_barrier
    @torch_method("barrier")
    def barrier(self, opts: Any = None) -> dist.Work:
        limit, later = (None, False) if opts is None else (_limit(opts), opts.asyncOp)
        comm = self._first
        device = getattr(opts, "device", None)
        if device is not None and torch.device(device).type in self._comms:
            comm = self._comms[torch.device(device).type]
        return ProcessGroupWork([comm.barrier(later, None, limit)])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose error names the ranks that did not arrive, also in the words of torch's Gloo.

        Those words name the first missing rank, with `wait_all_ranks` all of them; the rest of the message
        and `culprits` name all in any case. A timeout of zero has passed when the barrier begins to wait.
        """
        limit = None if timeout in (None, NO_TIMEOUT) else max(timeout, timedelta(milliseconds=1))
        try:
            self._first.barrier(async_op=False, timeout=limit)
        except (CommTimeoutError, PeerLostError) as error:
            me, missing = self.rank(), error.culprits if wait_all_ranks else error.culprits[:1]
            names = f"Rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
            told = f"{names} failed to pass monitoredBarrier"
            if me != 0:
                told += f"; Rank {me} successfully reached monitoredBarrier, but received errors while"
                told += " waiting for send/recv from rank 0"
            elif isinstance(error, CommTimeoutError):
                told = f"Rank {me} timed out in monitoredBarrier; {told}"
            raise error.again(f"{told}; {error.message}") from None

    # --- groups of operations -------------------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        """Begins `_coalescing_manager(device=)`, whose messages are one batch. For devices with streams."""
        comm = self.get_comm(device)
        if comm._engine.executor.streams is None:
            raise UnsupportedError(
                f"operations of backend '{comm.get_backend()}' cannot be put together for a device",
                comm=comm.get_name(),
                rank=comm.get_rank(),
                hint="leave out device=, then _coalescing_manager takes all_reduce, "
                "all_gather_into_tensor and reduce_scatter_tensor; batch_isend_irecv takes messages",
            )
        batches.start(comm._engine)

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        """Returns the Work of the last operation since `_start_coalescing`, which completes last."""
        engine = self.get_comm(device)._engine
        batches.end(engine)
        last = engine.executor.last()
        return ProcessGroupWork([] if last is None else [last])

    # --- point-to-point -------------------------------------------------------------------------------

    @short_message("send")
    @torch_method("send")
    def send(self, tensors: Sequence[Tensor], dst: int, tag: int) -> dist.Work:
        """Sends a tensor. On the CPU a receive with the same tag gets it; on devices tags have no meaning."""
        work = batches.post(self._for(tensors[0])._engine, "send", tensors[0], dst, tag)
        return MessageWork(work, tensors)

    @short_message("recv")
    @torch_method("recv")
    def recv(self, tensors: Sequence[Tensor], src: int, tag: int) -> dist.Work:
        return self._receive(tensors, src, tag)

    def _receive(self, tensors: Sequence[Tensor], src: int, tag: int) -> dist.Work:
        work = batches.post(self._for(tensors[0])._engine, "recv", tensors[0], src, tag)
        return MessageWork(work, tensors)

    @torch_method("recv_anysource")
    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> dist.Work:
        """Receives the next message from any rank. The Work's `source_rank()` returns the sender."""
        return self._receive(tensors, ANY_RANK, tag)


not_traced(methods(UnicommProcessGroup, ("rank", "getRank", "size", "getSize")))
