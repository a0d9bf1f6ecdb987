"""torchcomms' public names, as a specification: the tests hold unicomm.torchcomms to it, and it is the table
of docs/torchcomms.md.

The names, signatures and defaults are those of torchcomms 0.3 and of its main branch, read in its type stubs
and bindings (github.com/meta-pytorch/torchcomms, comms/torchcomms: _comms.pyi, TorchCommPy.cpp, hooks/,
objcol.py, device_mesh.py).
"""

from __future__ import annotations

from dataclasses import dataclass

SAME = "same"


@dataclass(frozen=True)
class Name:
    """A public name of torchcomms.

    `theirs`: the name, with its parameters if it is called. A parameter's default is Python's `repr`.
    `how`: "same", or how it differs here. `ours`: the signature here, where it is another one.
    `here`: False if the name is missing.
    """

    theirs: str
    how: str = SAME
    ours: str = ""
    here: bool = True

    @property
    def path(self) -> str:
        return self.theirs.split("(")[0]

    @property
    def signature(self) -> str:
        """The signature that the tests expect; empty for a name that is not called."""
        return (self.ours or self.theirs)[len(self.path) :]

    @property
    def verdict(self) -> str:
        if not self.here:
            return f"not here: {self.how}"
        return self.how if self.how == SAME else f"differs: {self.how}"


def same(*names: str) -> tuple[Name, ...]:
    return tuple(Name(name) for name in names)


def missing(why: str, *names: str) -> tuple[Name, ...]:
    return tuple(Name(name, why, here=False) for name in names)


_OP = "async_op, hints=None, timeout=None"
_DEVICE = "raises `UnsupportedError`; kernels use `unicomm.symm`"

NAMES: dict[str, tuple[Name, ...]] = {
    "Creation and backends": (
        Name(
            "new_comm(backend, device, name, abort_process_on_timeout_or_error=None, timeout=None,"
            " high_priority_stream=None, store=None, enable_reconfigure=False, hints=None)",
            "`abort_process_on_timeout_or_error=None` ends the process on GPUs only (torchcomms' gloo never"
            " does); an explicit True always does. `high_priority_stream` has no effect. A hint is an error"
            " unless unicomm's backend or one of torchcomms' knows it",
        ),
        Name(
            "register_backend(name, backend_class)",
            "takes a class of unicomm's backend protocol, `unicomm.comms.backend.Backend`",
        ),
        Name("is_backend_built(name)", "whether the backend is known and this machine has its device"),
        Name(
            "get_mem_allocator(backend)",
            "needs an open communicator of the backend; on the CPU it is a `unicomm.MemAllocator`",
        ),
        *missing("backends have unicomm's protocol: unicomm/comms/backend.py", "TorchCommBackend"),
    ),
    "TorchComm: operations": (
        *same(
            f"TorchComm.send(tensor, dst, {_OP})",
            f"TorchComm.recv(tensor, src, {_OP})",
            f"TorchComm.broadcast(tensor, root, {_OP})",
            f"TorchComm.all_reduce(tensor, op, {_OP})",
            f"TorchComm.reduce(tensor, root, op, {_OP})",
            f"TorchComm.all_gather(tensor_list, tensor, {_OP})",
            f"TorchComm.all_gather_v(tensor_list, tensor, {_OP})",
            f"TorchComm.all_gather_single(output, input, {_OP})",
            f"TorchComm.reduce_scatter(output, input_list, op, {_OP})",
            f"TorchComm.reduce_scatter_v(output, input_list, op, {_OP})",
        ),
        Name(f"TorchComm.reduce_scatter_single(output, input, op, {_OP})", "never changes its input"),
        *same(
            f"TorchComm.all_to_all_single(output, input, {_OP})",
            f"TorchComm.all_to_all_v_single(output, input, output_split_sizes, input_split_sizes, {_OP})",
            f"TorchComm.all_to_all(output_tensor_list, input_tensor_list, {_OP})",
            f"TorchComm.barrier({_OP})",
            f"TorchComm.scatter(output_tensor, input_tensor_list, root, {_OP})",
            f"TorchComm.gather(output_tensor_list, input_tensor, root, {_OP})",
            f"TorchComm.gather_single(output, input, root, {_OP})",
            "TorchComm.batch_op_create()",
            "TorchComm.all_gather_p_init(output, hints=None, timeout=None)",
            f"TorchComm.all_gather_p_exec(handle, input, {_OP})",
            "TorchComm.all_gather_p_free(handle)",
        ),
    ),
    "TorchComm: the rest": (
        Name(
            "TorchComm.split(ranks, name, hints=None, timeout=None)",
            "inherits timeout and hints; the child has the name that was given, without a suffix; ranks that"
            " are not members need not call it",
        ),
        Name(
            "TorchComm.new_window(tensor=None)", "on memory of `unicomm.symm.empty`, on backends that have it"
        ),
        *same(
            "TorchComm.get_rank()",
            "TorchComm.get_size()",
            "TorchComm.get_name()",
        ),
        Name("TorchComm.get_options()", "a copy; `high_priority_stream` and `store` are the defaults"),
        *same("TorchComm.get_device()"),
        Name("TorchComm.get_backend()", "unicomm's name, such as shm where the program asked for gloo"),
        *same("TorchComm.get_backend_version()"),
        Name("TorchComm.get_backend_impl()", "an object of unicomm"),
        Name("TorchComm.unsafe_get_backend()", "as `get_backend_impl`, with the same DeprecationWarning"),
        *same("TorchComm.get_init_handle()"),
        Name(
            "TorchComm.reconfigure(uuid, init_handles, timeout=None, hints=None)",
            "needs no store; ranks are numbered as listed; missing ranks are named",
        ),
        Name("TorchComm.abort()", "on all backends; the other ranks get `AbortedError`"),
        Name("TorchComm.is_abort_supported()", "always True"),
        *same("TorchComm.is_aborted()", "TorchComm.set_timeout(timeout)"),
        Name("TorchComm.get_device_transport()", _DEVICE),
        Name(
            "TorchComm.get_mem_allocator()",
            "on the CPU a `unicomm.MemAllocator`; on a GPU an allocator for `torch.cuda.MemPool`, not yet"
            " tried on hardware",
        ),
        Name("TorchComm.mem_allocator", "a `unicomm.MemAllocator`, whose `pool` is a `torch.cuda.MemPool`"),
        *same("TorchComm.tensor_register(tensor)", "TorchComm.tensor_deregister(tensor)"),
        Name(
            "TorchComm.register_pre_hook(callback)",
            "hooks run in the order of their registration; a batch is `OpName.batch`",
        ),
        *same("TorchComm.register_post_hook(callback)"),
        Name(
            "TorchComm.register_abort_hook(callback)",
            "runs once, when the communicator breaks, also for asynchronous operations; not for wrong"
            " arguments, which leave the communicator usable",
        ),
        Name("TorchComm.finalize()", "a second call does nothing"),
        *missing(
            "not in torchcomms 0.3; `batch_op_create` runs messages together",
            "TorchComm.start_coalescing()",
            "TorchComm.end_coalescing()",
        ),
    ),
    "Work, reductions, names": (
        *same("TorchWork", "TorchWork.is_completed()"),
        Name(
            "TorchWork.wait()",
            "an error is raised each time; takes a timeout",
            "TorchWork.wait(timeout=None)",
        ),
        Name(
            "TorchWork.wait_blocking()",
            "on all backends; takes a timeout",
            "TorchWork.wait_blocking(timeout=None)",
        ),
        *missing("for backends of torchcomms in Python", "TorchWork._set_status(status)"),
        *same(*(f"WorkStatus.{n}" for n in ("NOT_STARTED", "INPROGRESS", "COMPLETED", "TIMEDOUT", "ERROR"))),
        Name("ReduceOp(opType)", "the parameter is called `type`", "ReduceOp(type, factor=None)"),
        *same(*(f"ReduceOp.{n}" for n in ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "AVG"))),
        *same("ReduceOp.PREMUL_SUM(factor)", "ReduceOp.type"),
        *(
            Name(f"RedOpType.{n}", "other numbers: an `IntEnum` from 1")
            for n in ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM", "AVG")
        ),
        *same(
            *(
                f"OpName.{n}"
                for n in (
                    *("send", "recv", "broadcast", "all_reduce", "reduce", "all_gather", "all_gather_v"),
                    *("all_gather_single", "reduce_scatter", "reduce_scatter_v", "reduce_scatter_single"),
                    *("all_to_all_single", "all_to_all_v_single", "all_to_all", "barrier", "scatter"),
                    *("gather", "gather_single", "split", "new_window", "finalize"),
                )
            )
        ),
    ),
    "Batches": (
        *same("P2POpType.SEND", "P2POpType.RECV", "P2POp(type, tensor, peer)"),
        *same("BatchSendRecv.ops", "BatchSendRecv.send(tensor, dst)", "BatchSendRecv.recv(tensor, src)"),
        Name(
            "BatchSendRecv.issue(async_op, options=BatchP2POptions())",
            "the default is None and stands for default options",
            "BatchSendRecv.issue(async_op, options=None)",
        ),
        Name(
            "BatchP2POptions()",
            "also takes its attributes as arguments",
            "BatchP2POptions(hints={}, timeout=datetime.timedelta(0))",
        ),
        *same("BatchP2POptions.hints", "BatchP2POptions.timeout"),
    ),
    "Windows": (
        Name(
            "TorchCommWindow.tensor_register(tensor, owning=True)",
            "the window keeps the tensor in both cases",
        ),
        *same(
            "TorchCommWindow.tensor_deregister()",
            "TorchCommWindow.get_size()",
            "TorchCommWindow.get_tensor()",
            "TorchCommWindow.dtype",
            "TorchCommWindow.shape",
            "TorchCommWindow.device",
            f"TorchCommWindow.put(tensor, dst_rank, target_offset_nelems, {_OP})",
            f"TorchCommWindow.signal(peer_rank, {_OP})",
            f"TorchCommWindow.wait_signal(peer_rank, {_OP})",
            "TorchCommWindow.get_attr(peer_rank)",
        ),
        Name("TorchCommWindow.map_remote_tensor(rank)", "the memory stays mapped while the result lives"),
        Name(
            "TorchCommWindow.get_device_window(signal_count=-1, counter_count=-1, barrier_count=1)", _DEVICE
        ),
        Name("TorchCommWindow.register_local_buffer(tensor)", _DEVICE),
        Name("TorchCommWindow.deregister_local_buffer(handle)", _DEVICE),
        *same("TorchCommWindowAttr.access_type"),
        *same("TorchCommWinAccessType.WIN_ACCESS_TYPE_UNIFIED"),
        *same("TorchCommWinAccessType.WIN_ACCESS_TYPE_SEPARATE"),
    ),
    "Options": (
        Name(
            "CommOptions()",
            "also takes its attributes as arguments; reads no variables",
            "CommOptions(abort_process_on_timeout_or_error=True, timeout=datetime.timedelta(seconds=600),"
            " high_priority_stream=False, store=None, enable_reconfigure=False, hints={})",
        ),
        *same(
            "CommOptions.abort_process_on_timeout_or_error",
            "CommOptions.timeout",
            "CommOptions.high_priority_stream",
            "CommOptions.store",
            "CommOptions.enable_reconfigure",
            "CommOptions.hints",
        ),
        Name(
            "ReconfigureOptions(uuid, init_handles, timeout=None, hints=None)",
            "all parameters have defaults",
            "ReconfigureOptions(uuid=0, init_handles=[], timeout=None, hints={})",
        ),
        *missing(
            "in torchcomms' stubs only, not in its module",
            "AllReduceOptions",
            "BroadcastOptions",
            "SendOptions",
        ),
    ),
    "What hooks receive": (
        *same("RemovableHandle.remove()"),
        *same(
            *(
                f"{name}PreHookArgs({fields})"
                for fields, names in {
                    "async_op, tensor, peer": ("Send", "Recv"),
                    "async_op, tensor, root": ("Broadcast", "Reduce"),
                    "async_op, tensor": ("AllReduce",),
                    "async_op, input, output": (
                        *("AllGather", "AllGatherV", "AllGatherSingle", "ReduceScatter", "ReduceScatterV"),
                        *("ReduceScatterSingle", "AllToAllSingle", "AllToAll"),
                    ),
                    "async_op, input, output, input_split_sizes, output_split_sizes": ("AllToAllVSingle",),
                    "async_op": ("Barrier",),
                    "async_op, input, output, root": ("Scatter", "Gather", "GatherSingle"),
                    "ranks, name": ("Split",),
                    "": ("NewWindow", "Finalize"),
                    "async_op, num_ops": ("BatchOpIssue",),
                }.items()
                for name in names
            )
        ),
        *same(
            *(
                f"{name}PostHookArgs()"
                for name in ("Collective", "Split", "NewWindow", "BatchOpIssue", "Finalize")
            )
        ),
    ),
    "torchcomms.hooks": (
        Name(
            "hooks.FlightRecorderHook(max_entries=2048, isolated=False)",
            "reads the ring, which records with and without it, also what happened before; states are"
            " scheduled, started and completed, with times, also on the CPU",
        ),
        *same(
            "hooks.FlightRecorderHook.register_with_comm(comm)",
            "hooks.FlightRecorderHook.dump_json(include_completed=True)",
        ),
        Name("hooks.FlightRecorderHook.dump_file(rank, include_completed=True)", "returns the path"),
        Name("hooks.FlightRecorderHook.reset()", "later dumps leave out what happened; the ring keeps it"),
        *same("hooks.FlightRecorderHook.is_enabled()", "hooks.FlightRecorderHook.size()"),
        Name(
            "hooks.clog(output, events, verbose=[])",
            "lines have `op_id` and `seq` in place of `work_id`, and `X` for an operation that failed; there"
            " are no lines for starts (S) and waits (W)",
            "hooks.clog(output, events, verbose=())",
        ),
        *same("hooks.clog.register_with_comm(comm)", "hooks.clog.flush()"),
        Name(
            "hooks.NanCheckHook(check_inputs=True, check_outputs=False)",
            "checks outputs after the operation, if it is synchronous, not before; does not look at buffers"
            " that are only written. Checks batches and complex numbers, too",
        ),
        *same("hooks.NanCheckHook.register_with_comm(comm)", "hooks.NanCheckHook.is_enabled()"),
        *missing("hashes of data: not in torchcomms 0.3", "hooks.chash"),
    ),
    "torchcomms.objcol": (
        *same("objcol.all_gather_object(comm, object_list, obj, timeout=None, weights_only=True)"),
        *same(
            "objcol.gather_object(comm, obj, root, object_gather_list=None, timeout=None, weights_only=True)"
        ),
        *same("objcol.send_object_list(comm, object_list, dst, timeout=None)"),
        *same("objcol.recv_object_list(comm, object_list, src, timeout=None, weights_only=True)"),
        *same("objcol.broadcast_object_list(comm, object_list, root, timeout=None, weights_only=True)"),
        *same(
            "objcol.scatter_object_list(comm, root, scatter_object_output_list,"
            " scatter_object_input_list=None, timeout=None, weights_only=True)"
        ),
    ),
    "torchcomms.device_mesh": (
        Name(
            "device_mesh.init_device_mesh(mesh_dim_comms, mesh_dim_names, _global_comm=None)",
            "global ranks are those of the job, not 0 to n - 1; wrong meshes are errors",
        ),
        Name(
            "device_mesh._flatten_with_comm(mesh, mesh_dim_name, comm, global_ranks, layout)",
            "the flattened mesh has the device type and global rank of `mesh`",
        ),
        Name(
            "device_mesh._create_torchcomm_process_group(comm, group_name, backend_str='torchcomm',"
            " global_ranks_mapping=None)",
            "a `UnicommProcessGroup`; a communicator's group is made once",
        ),
    ),
    "torchcomms._comms": (
        Name(
            "_comms._BackendWrapper(comm)",
            "a process group, not a `Backend`: `ProcessGroup._register_backend` does not take it."
            " `get_comm()` of a group that torch.distributed made is a `unicomm.Communicator`, with unicomm's"
            " hooks",
            "_comms._BackendWrapper",
        ),
        *same("_comms._is_backend_registered(name)"),
    ),
    "Other modules": (
        *missing(
            "`unicomm.functional` has collectives for `torch.compile`; a communicator breaks the graph",
            "functional",
        ),
        *missing("not in torchcomms 0.3", "coalescing", "distwrap"),
    ),
}

#: What unicomm.torchcomms has beyond torchcomms.
ADDED = {"install", "is_backend_registered"}

#: Environment variables of torchcomms: what unicomm does with them.
VARIABLES = {
    "TORCH_DISTRIBUTED_USE_TORCHCOMMS": "torch's switch: programs then use unicomm",
    "TORCHCOMM_RANK, TORCHCOMM_SIZE": SAME,
    "TORCHCOMM_BOOTSTRAP_RANKSIZE_QUERY_METHOD": "same, and knows slurm, env and single kinds of MPI",
    "TORCHCOMM_TIMEOUT_SECONDS": SAME,
    "TORCHCOMM_ABORT_ON_ERROR": "same; without it the default is on for GPUs, off on the CPU",
    "TORCHCOMM_GLOO_HOSTNAME, TORCHCOMM_GLOO_INTERFACE": "same, where the backend is unicomm's gloo",
    "MASTER_ADDR, MASTER_PORT": "same; not needed with `store=` or with ranks of one launcher on one host",
    "TORCHCOMM_FR_BUFFER_SIZE": "the most operations in a dump; the ring has a size of its own",
    "TORCHCOMM_FR_DUMP_TEMP_FILE": SAME,
    "TORCHCOMM_FR_DUMP_DYNAMIC_FILE_NAME": "not read: the file name is always made anew",
    "TORCHCOMM_FR_CPP_STACK": "not read: records have the Python call path",
    "TORCHCOMM_HEALTH_CHECK_WAIT_MS": "not read: the handlers of torch's debug server are not here",
    "TORCHCOMMS_SERIALIZATION": "same: `pickle` for object collectives, read at each call",
    "TORCHCOMMS_PATCH_FOR_COMPILE": "not read: see `functional`",
    "TORCHCOMMS_BACKEND_LIB_PATH_<B>": "not read: libraries that are compiled for torchcomms need its own",
}
