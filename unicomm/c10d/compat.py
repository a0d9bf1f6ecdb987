"""The private parts of torch that unicomm uses. No other module names one; this one imports none of unicomm.

Each function or constant here stands for a private part and says what that part is. "Since" names the first
torch that has it; without it, every torch from 2.11 on has it. tests/c10d/test_compat.py holds
each torch version to what is written here.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FrameType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C import _distributed_c10d as _native
from torch._C._autograd import _add_metadata_json, _profiler_enabled

# torch.distributed has them, but does not export them to type checkers.
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    FileStore,
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)
from torch._C._profiler import _RecordFunctionFast

__all__ = ["AllgatherOptions", "AllreduceCoalescedOptions"]
__all__ += ["FileStore", "HashStore", "PrefixStore", "Store", "TCPStore"]


def _find(module: str, *names: str) -> Any:
    """Returns the first of the attributes `names` that `module` has, or None."""
    try:
        found = importlib.import_module(module)
    except ImportError:
        return None
    return next((getattr(found, name) for name in names if hasattr(found, name)), None)


def torch_version() -> tuple[int, int]:
    """Returns the major and minor number of the installed torch."""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    return major, minor


# --- process groups -----------------------------------------------------------------------------------------


def known_groups() -> list[dist.ProcessGroup]:
    """Returns the process groups that torch.distributed lists (`distributed_c10d._world.pg_names`)."""
    return list(c10d._world.pg_names)


def ranks_of_groups() -> dict[dist.ProcessGroup, dict[int, int]]:
    """Returns torch's own table of each group's ranks: global rank to rank in the group. Writable."""
    return c10d._world.pg_group_ranks


def set_default_group(group: dist.ProcessGroup) -> None:
    """Makes `group` the default group of torch.distributed."""
    c10d._update_default_pg(group)


def list_group(group: dist.ProcessGroup, name: str, device_type: str, ranks: Sequence[int]) -> None:
    """Enters `group` into torch.distributed's tables and its registry of names, as `new_group` does."""
    world: Any = c10d._world
    group_name = c10d.GroupName(name)
    world.pg_map[group] = ("unicomm", group.get_group_store())
    world.pg_names[group] = group_name
    world.pg_backend_config[group] = f"{device_type}:unicomm"
    world.pg_group_ranks[group] = {rank: i for i, rank in enumerate(ranks)}
    _native._register_process_group(group_name, group)
    for tag in ("", f"ptd:{name}"):
        world.tags_to_pg.setdefault(tag, []).append(group)
    world.pg_to_tag[group] = f"ptd:{name}"


def backend_name(group: dist.ProcessGroup, device_type: str) -> str:
    """Returns the backend that a program has named for a group and a device type; "" if torch knows none."""
    config = c10d._world.pg_backend_config.get(group)
    return "" if config is None else devices_of_backend(config).get(device_type, "")


def name_group(group: dist.ProcessGroup, name: str, description: str) -> None:
    """Sets the name and the description of a group of torch's own class."""
    group._set_group_name(c10d.GroupName(name))
    group._set_group_desc(description)


def group_of_name(name: str) -> dist.ProcessGroup:
    """Returns the process group that is registered under `name`."""
    return _native._resolve_process_group(c10d.GroupName(name))


def add_flattened_mesh(mesh: Any, name: str, group: dist.ProcessGroup, layout: Any) -> Any:
    """Gives a `DeviceMesh` the flattened dimension `name` over `group`, as `mesh[...]._flatten(name)` does.

    `layout`: torch's `_MeshLayout` of the dimensions that are flattened.
    """
    root = mesh._get_root_mesh()
    flat = layout.coalesce() if hasattr(layout, "coalesce") else type(layout)([layout.collapse()])
    made = type(mesh)(
        root.device_type,
        mesh_dim_names=(name,),
        _init_backend=False,
        _rank=dist.get_rank(),
        _layout=flat,
        _rank_map=root._rank_map,
        _root_mesh=root,
    )
    made._dim_group_names = [group.group_name]
    if hasattr(root, "_pg_registry"):
        root._pg_registry[group.group_name] = group
    root._flatten_mapping[name] = made
    return made


def base_store(store: Any) -> Any:
    """Returns the store below all prefixes."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def store_of_group(group: dist.ProcessGroup) -> Store:
    """Returns the store of a process group, of any class."""
    return c10d._get_process_group_store(group)


#: The function with which `new_group` asks for a backend to split a new group from. None where torch has
#: none.
SPLIT_SOURCE = getattr(c10d, "_get_split_source", None)
_split_source_code = getattr(SPLIT_SOURCE, "__code__", None)


def asked_by_split_source() -> bool:
    """Whether torch's `_get_split_source` called the caller of this function."""
    return sys._getframe(2).f_code is _split_source_code


_all_reduce_code = inspect.unwrap(dist.all_reduce).__code__
#: The code of `dist.all_reduce`, which leaves the timeout of its options unset and waits for what a
#: synchronous call returns, unless that is None. None if it may set the timeout.
ALL_REDUCE_CODE = None if "timeout" in _all_reduce_code.co_names else _all_reduce_code


def premul_factor(op: Any) -> Any:
    """Returns the factor of a `ReduceOp` made by `_make_nccl_premul_sum` (by its pickled state)."""
    return op.__getstate__()[1]


# --- how torch makes a group --------------------------------------------------------------------------------

#: torch's function that makes a group: it calls the creator of a backend, and torchcomms' `new_comm`.
GROUP_MAKER = c10d._new_process_group_helper
#: The variables of that function that unicomm reads; no argument of the creator or of `new_comm` has them.
GROUP_MAKER_VARIABLES = (
    *("backend", "backend_config", "backend_options", "device_id", "global_ranks_in_group", "group_desc"),
    *("group_name", "group_rank", "group_size", "pg", "prefix_store", "timeout"),
)


def group_maker_variables() -> Mapping[str, Any]:
    """Returns the variables of `GROUP_MAKER`, which called the caller of this function."""
    return sys._getframe(2).f_locals


def registered_backend(name: str) -> Any:
    """Returns what `Backend.register_backend` noted for `name` (`creator_fn`, `extended_api`), or None."""
    return dist.Backend._plugins.get(name.upper())


def backend_options(store: Store, asked: Mapping[str, Any]) -> Any:
    """Returns what torch passes to a creator function in its extended form (`_DistributedBackendOptions`).

    `asked`: the variables of `GROUP_MAKER`.
    """
    options = _native._DistributedBackendOptions()
    options.store, options.timeout = store, asked["timeout"]
    options.group_rank, options.group_size = asked["group_rank"], asked["group_size"]
    options.group_id = asked["group_name"]
    options.global_ranks_in_group = asked["global_ranks_in_group"]
    return options


def set_timeout_of_options(options: Any, timeout: Any) -> None:
    """Sets the timeout of the options of one of torch's own backends."""
    options._timeout = timeout


def backend_of_group(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Returns the backend that `group` has for the type of `device`, or None."""
    return group._get_backend(device) if device in group._device_types else None


def replace_split_of_new_group(function: Callable[..., Any]) -> None:
    """Has `dist.new_group` call `function`, with its keyword arguments, while the switch is on.

    Where torch's `new_group` does not split the default group, nothing changes. Since 2.12 or 2.13.
    """
    if hasattr(c10d, "_new_group_via_split_group"):
        c10d._new_group_via_split_group = function


#: torch's way to make a group other than by a split. Takes the arguments of `new_group` in their order, with
#: a tag between `pg_options` and the others.
new_group_with_tag: Callable[..., dist.ProcessGroup | None] = c10d._new_group_with_tag


def devices_of_backend(backend: str | None) -> dict[str, str]:
    """Parses a backend such as "cpu:gloo,cuda:nccl" into device type -> name; None is the default group's."""
    config: Any = c10d.BackendConfig(dist.Backend(backend or dist.get_backend_config()))
    return dict(config.get_device_backend_map())


def rendezvous_handlers() -> dict[str, Any]:
    """Returns torch's own table of rendezvous handlers, by URL scheme. Writable."""
    handlers: dict[str, Any] = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    return handlers


# --- the switch ---------------------------------------------------------------------------------------------

_BACKEND_QUERIES = ("_torchcomms_is_backend_built", "_torchcomms_is_backend_registered")
#: By torch version, the names in `distributed_c10d` that torch imports from torchcomms. 2.12, 2.14 and 2.15
#: were read in torch's source.
SWITCH_NAMES: dict[tuple[int, int], tuple[str, ...]] = {
    (2, 11): ("new_comm", "_BackendWrapper"),
    (2, 12): ("new_comm", "_BackendWrapper"),
    (2, 13): ("new_comm", "_BackendWrapper", "FlightRecorderHook"),
    (2, 14): ("new_comm", "_BackendWrapper", "FlightRecorderHook", *_BACKEND_QUERIES),
    (2, 15): ("new_comm", "_BackendWrapper", "_TorchCommsFlightRecorderHook", *_BACKEND_QUERIES),
}


def torchcomms_available() -> bool | None:
    """Whether torch found torchcomms at its import, or the switch stands for it.

    None when torch was built without it.
    """
    available: bool | None = getattr(c10d, "_TORCHCOMM_AVAILABLE", None)
    return available


def torchcomms_new_comm() -> Any:
    """Returns the `new_comm` that torch calls: torchcomms' or the switch's. None when there is neither."""
    return getattr(c10d, "new_comm", None)


def stand_for_torchcomms(parts: Mapping[str, Any]) -> None:
    """Gives torch.distributed `parts`, by name, in place of those it would import from torchcomms."""
    for name in SWITCH_NAMES[torch_version()]:
        setattr(c10d, name, parts[name])
    c10d._TORCHCOMM_AVAILABLE = True


# --- futures ------------------------------------------------------------------------------------------------


class FailedResult:
    """The value of a future that has failed: whoever looks for tensors in it gets the error.

    C++ code (DDP's Reducer) finds the tensors of a Python value by pickling it
    (`torch._jit_internal._extract_tensors`). `Future.set_exception` stores the exception itself there, which
    pickles well and has no tensor; the Reducer then reads the first of none and the process dies of SIGSEGV.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self.error


def _raise_failed(result: FailedResult) -> None:
    raise result.error


def fail_future(future: torch.futures.Future[Any], error: Exception) -> None:
    """Sets `future` to `error`. Python code that waits for it gets the error itself, as C++ code does."""
    future._set_unwrap_func(_raise_failed)
    future.set_result(FailedResult(error))


# --- batches of messages ------------------------------------------------------------------------------------

BATCH_VARIABLE = "p2p_op_list"  # the argument of `dist.batch_isend_irecv`
_BATCH_DEPTH = 8  # most frames between `batch_isend_irecv` and a method of the group
_batch_code = inspect.unwrap(dist.batch_isend_irecv).__code__

#: Whether the messages of a batch can be found in torch's function. If not, messages are issued one by one.
BATCHES_FOUND = BATCH_VARIABLE in _batch_code.co_varnames


def messages_of_batch() -> list[Any] | None:
    """Returns the messages of the `batch_isend_irecv` that is on this thread's stack, or None."""
    if not BATCHES_FOUND:
        return None
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_BATCH_DEPTH):
        if frame is None:
            return None
        if frame.f_code is _batch_code:
            found: list[Any] = frame.f_locals[BATCH_VARIABLE]
            return found
        frame = frame.f_back
    return None


def start_coalescing(backend: Any) -> None:
    """Starts a batch of messages on one of torch's own backends."""
    backend._start_coalescing()


def end_coalescing(backend: Any) -> Any:
    """Ends a batch of messages on one of torch's own backends and returns the batch's Work."""
    return backend._end_coalescing()


# --- torch.compile and custom operators ---------------------------------------------------------------------

#: Base class of objects that custom operators take as arguments; `object` where torch has none. Since 2.11;
#: from 2.14 on its name is `CustomClassBase`.
OpaqueBase: Any = (
    _find("torch._custom_class_base", "CustomClassBase")
    or _find("torch._opaque_base", "OpaqueBase")  # from 2.14 on deprecated: its import logs a warning
    or object
)


def register_custom_class(
    cls: type,
    constant: tuple[str, ...],
    traced: tuple[str, ...] = (),
    guard: Callable[[Any], list[Any]] | None = None,
) -> str | None:
    """Makes `cls` a type of arguments of custom operators. Returns its name in schemas.

    `constant`: methods whose result never changes. `traced`: see `trace_instead`. `guard` returns what a
    graph takes as constants of an object. Returns None when torch takes no objects as arguments.
    """
    where = "torch._library.opaque_object"
    as_opaque, as_custom = _find(where, "register_opaque_type"), _find(where, "register_custom_class")
    members = _find(where, "MemberType")
    if members is None or (as_opaque is None and as_custom is None):
        return None
    known = dict.fromkeys(constant, members.USE_REAL) | dict.fromkeys(traced, members.INLINED)
    if as_opaque is not None:
        as_opaque(cls, typ="reference", members=known, guard_fn=guard)
    else:
        as_custom(cls, typ="symbolic", members=known, guard_fn=guard)
    return f"{cls.__module__}.{cls.__qualname__}"


def register_process_groups(cls: type, guard: Callable[[Any], list[Any]]) -> str | None:
    """Makes `ProcessGroup` a type of arguments of custom operators. Returns its name in schemas.

    `cls`, a class of groups, gets the guard that torch's own registration lacks. None before 2.12 or 2.13.
    """
    register = _find("torch.distributed.device_mesh", "_register_distributed_opaque_types")
    if register is None:
        return None
    register()
    same = ("size", "rank", "_get_backend_name", "group_name", "group_desc", "__eq__", "__ne__")
    register_custom_class(cls, same, guard=guard)
    return f"{dist.ProcessGroup.__module__}.{dist.ProcessGroup.__qualname__}"


def trace_instead(method: Any, function: Callable[..., Any]) -> None:
    """Has torch.compile trace `function` in place of `method`, without importing the compiler."""
    method._torchdynamo_inline = function


def wait_at_first_use() -> Any:
    """Returns torch's function from a started collective of `_c10d_functional` to a tensor that waits."""
    return _find("torch.distributed._functional_collectives", "_maybe_wrap_tensor")


def real_object(value: Any) -> Any:
    """Returns the object behind the stand-in that torch passes while it traces a graph, or `value` itself."""
    return getattr(value, "real_obj", value)


def schema_of(overload: Any) -> Any:
    """Returns the schema of an overload of an operator."""
    return overload._schema


def not_traced(functions: Iterable[Any]) -> None:
    """Has torch.compile treat functions like C++ code: it neither traces into them nor compiles them.

    Otherwise it would try both, also where C++ calls back into Python, and would fail at the first attribute
    of an opaque object. `torch.compiler.disable` does the same, but imports the compiler and puts a call
    around every call. Only functions are marked.
    """
    frames: Any = _find("torch._C._dynamo.eval_frame", "set_code_exec_strategy") and importlib.import_module(
        "torch._C._dynamo.eval_frame"
    )
    for function in functions:
        if not inspect.isfunction(function):
            continue
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        function._torchdynamo_disable_msg = "use unicomm.functional in graphs"  # type: ignore[attr-defined]
        if frames:
            skip = frames._FrameAction.SKIP
            frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))


def methods(cls: type, but: tuple[str, ...] = ()) -> list[Any]:
    """Returns the functions that a class defines, without special methods and those named in `but`."""
    return [f for name, f in vars(cls).items() if name not in but and not name.startswith("__")]


#: torch's collectives as functions, which compiled graphs are made of.
functional_collectives = torch.ops._c10d_functional


# --- operators ----------------------------------------------------------------------------------------------

#: Returns the number of dispatch modes that are active in this thread.
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
#: Returns one of them, by its number.
dispatch_mode_at: Callable[[int], Any] = torch._C._get_dispatch_stack_at


# --- symmetric memory ---------------------------------------------------------------------------------------


def symmetric_memory() -> ModuleType:
    """Returns `torch.distributed._symmetric_memory`. Its import declares a part of `torch.ops.symm_mem`."""
    return importlib.import_module("torch.distributed._symmetric_memory")


def empty_symmetric(nbytes: int, group_name: str) -> torch.Tensor:
    """Allocates symmetric CPU memory of `nbytes` bytes for a group."""
    made: torch.Tensor = _native._SymmetricMemory.empty_strided_p2p(
        (nbytes,), [1], torch.uint8, torch.device("cpu"), c10d.GroupName(group_name)
    )
    return made


def rendezvous_symmetric(tensor: torch.Tensor) -> Any:
    """Returns the handle of a tensor in symmetric memory. Collective over the group of its allocation."""
    return _native._SymmetricMemory.rendezvous(tensor)


def replace_symmetric_workspace(function: Callable[[str, int], Any]) -> None:
    """Puts `function` in place of torch's `get_symm_mem_workspace`."""
    module: Any = symmetric_memory()
    module.get_symm_mem_workspace = function


def symmetric_workspaces() -> dict[str, torch.Tensor]:
    """Returns torch's own table of the workspace tensor of each group, by group name. Writable."""
    return symmetric_memory()._group_name_to_workspace_tensor  # type: ignore[no-any-return]


def dtypes_of_scalar_types(scalar_types: Sequence[Any]) -> list[torch.dtype | None]:
    """Returns the dtypes of a list of dtypes as a kernel receives it, which may be numbers of C++."""
    return list(symmetric_memory()._maybe_convert_scalar_types_to_dtypes(scalar_types))


def get_remote_tensors() -> Callable[..., Any]:
    """Returns torch's kernel of `symm_mem::get_remote_tensors`. Since 2.12 or 2.13."""
    return symmetric_memory()._get_remote_tensors_default  # type: ignore[no-any-return]


#: The product of two float8 matrices with their scales.
scaled_mm: Callable[..., torch.Tensor] = torch._scaled_mm


def operators_of(namespace: str) -> list[str]:
    """Returns the names of all operators declared in a namespace, without the namespace, sorted."""
    prefix = f"{namespace}::"
    names: list[str] = torch._C._dispatch_get_all_op_names()
    return sorted(name.removeprefix(prefix) for name in names if name.startswith(prefix))


def has_kernel(operator: str, key: str) -> bool:
    """Whether an operator has a kernel for a dispatch key of its own."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(operator, key))


def after_backend_select(keys: Any) -> tuple[Any, bool]:
    """A call's keys behind BackendSelect; whether a device runs it: FakeTensorMode adds Meta to its keys."""
    key = torch._C.DispatchKey
    below = keys & torch._C._dispatch_keyset_full_after(key.BackendSelect)
    return below, not below.has(key.Meta) and (below.has(key.CPU) or below.has(key.CUDA))


def declared_schema(operator: str) -> Any:
    """Returns the schema of `namespace::name` or `namespace::name.overload`."""
    base, _, overload = operator.partition(".")
    return torch._C._get_schema(base, overload)


def refuse_writes(storage: torch.UntypedStorage) -> None:
    """Has torch raise `RuntimeError` where a tensor on `storage` is written to or tells its address."""
    tensor = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    torch._C._set_throw_on_mutable_data_ptr(tensor)


# --- the profiler -------------------------------------------------------------------------------------------

#: Writes a value under a key into the trace of the recording that is under way.
add_trace_metadata = _add_metadata_json
#: Whether a profiler records in this thread.
profiler_enabled = _profiler_enabled
#: A context manager in C++ that is an event of the profiler.
RecordFunction = _RecordFunctionFast
#: Opens an event of a name, with tensors whose shapes it shows. Returns a handle, for `close_event_with`.
open_event: Callable[..., Any] = torch._C._autograd._record_function_with_args_enter
#: Has a future, as its second argument, close such an event: asynchronous if another thread completes it.
close_event_with: Any = torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction


@contextmanager
def no_events() -> Iterator[None]:
    """Keeps operations of torch in this thread out of the profiler's events."""
    torch._C._autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch._C._autograd._enable_record_function(True)


def hook_profiler(on_start: Callable[[], None], on_end: Callable[[], None]) -> bool:
    """Has torch call `on_start` before each recording of the profiler, and `on_end` at its end.

    Calls `on_start` at once if a recording is under way. Returns whether this torch can be hooked. torch
    calls `_run_on_profiler_start` and `_disable_profiler` through the namespace of `torch.autograd.profiler`.
    """
    profiler: Any = torch.autograd.profiler
    if not (hasattr(profiler, "_run_on_profiler_start") and hasattr(profiler, "_disable_profiler")):
        return False
    start: Callable[[], None] = profiler._run_on_profiler_start
    disable: Callable[[], Any] = profiler._disable_profiler

    def hooked_start() -> None:
        on_start()
        start()

    def hooked_disable() -> Any:
        try:
            on_end()
        finally:  # whatever happens, torch's recording has to end
            results = disable()
        return results

    profiler._run_on_profiler_start = hooked_start
    profiler._disable_profiler = hooked_disable
    if profiler._is_profiler_enabled:
        on_start()
    return True


def mark_kernels(annotation: dict[str, Any]) -> AbstractContextManager[None] | None:
    """Returns a context that annotates the kernels captured in it. Since 2.12; None before."""
    mark = _find("torch.cuda._graph_annotations", "mark_kernels")
    return None if mark is None else mark(annotation)


def kernel_annotations() -> dict[int, list[Any]]:
    """Returns the annotations of the kernels of all captured graphs, by graph node. Since 2.12."""
    return _find("torch.cuda._graph_annotations", "get_kernel_annotations")()  # type: ignore[no-any-return]


def is_this_host(host: str) -> bool:
    """Whether torchrun's rendezvous takes a name or address for this host."""
    return bool(_find("torch.distributed.elastic.rendezvous.utils", "_matches_machine_hostname")(host))


def custom_allocator(allocate: int, free: int) -> Any:
    """Returns an allocator for `torch.cuda.MemPool` over two C functions; the public one takes a library."""
    return torch._C._cuda_customAllocator(allocate, free)


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Has `callback` called when the backward pass that runs in this thread is over, if there is one."""
    with suppress(RuntimeError):
        torch.autograd.Variable._execution_engine.queue_callback(callback)
