"""The contract with torch: each private part that unicomm/c10d/compat.py names exists and behaves as stated.

Each version of torch has an entry in `CONTRACTS`. The entry of the installed version is tested; the others
are listed and skipped.
"""

import importlib
import inspect
import re
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import unicomm
from unicomm.c10d import compat
from unicomm.c10d.process_group import UnicommProcessGroup

#: Private parts of every version: module or class -> names.
PARTS = {
    "torch": ("_scaled_mm",),
    "torch._C": (
        *("_dispatch_get_all_op_names", "_dispatch_has_kernel_for_dispatch_key", "_get_schema"),
        *(
            "_len_torch_dispatch_stack",
            "_get_dispatch_stack_at",
            "_get_dispatch_mode",
            "_TorchDispatchModeKey",
            "_set_throw_on_mutable_data_ptr",
        ),
        *(["_cuda_customAllocator"] if torch.version.cuda else []),
    ),
    "torch._C._autograd": ("_add_metadata_json", "_profiler_enabled"),
    "torch._C._profiler": ("_RecordFunctionFast",),
    "torch._C._distributed_c10d": (
        *("_register_process_group", "_resolve_process_group", "_SymmetricMemory", "AllgatherOptions"),
        *("FileStore", "HashStore", "PrefixStore", "Store", "TCPStore"),
    ),
    "torch._C._dynamo.eval_frame": ("_FrameAction", "_FrameExecStrategy", "set_code_exec_strategy"),
    "torch._library.opaque_object": ("MemberType",),
    "torch._ops": ("OpOverload",),
    "torch._subclasses.fake_tensor": (
        *("FakeTensor", "FakeTensorMode", "DataDependentOutputException", "DynamicOutputShapeException"),
        "UnsupportedOperatorException",
    ),
    "torch.utils._python_dispatch": ("TorchDispatchMode",),
    "torch.distributed._functional_collectives": ("_maybe_wrap_tensor", "AsyncCollectiveTensor"),
    "torch.fx.experimental.proxy_tensor": ("ProxyTorchDispatchMode",),
    "torch.autograd.profiler": ("_run_on_profiler_start", "_disable_profiler", "_is_profiler_enabled"),
    "torch.distributed.rendezvous": ("_rendezvous_handlers",),
    "torch.distributed.distributed_c10d": (
        *("_get_process_group_store", "_get_split_source", "_new_process_group_helper", "_update_default_pg"),
        *("_world", "_TORCHCOMM_AVAILABLE", "GroupName"),
    ),
    "torch.distributed._symmetric_memory": (
        *("_get_remote_tensors_default", "_group_name_to_workspace_tensor", "get_symm_mem_workspace"),
        *("_maybe_convert_scalar_types_to_dtypes", "rendezvous", "empty"),
    ),
    # What UnicommProcessGroup overrides.
    "torch.distributed.ProcessGroup": (
        *("_get_backend", "_device_types", "_set_group_name", "_set_group_desc"),
        *("_allgather_base", "_reduce_scatter_base", "_start_coalescing", "_end_coalescing"),
        "_get_sequence_number_for_group",
    ),
    "torch.distributed.Backend": ("_plugins",),
}


@dataclass
class Contract:
    """What one version of torch has: `parts` beyond `PARTS`, and the `missing` ones it does not have."""

    switch_names: tuple[str, ...]
    parts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    missing: dict[str, tuple[str, ...]] = field(default_factory=dict)


CONTRACTS = {
    "2.11": Contract(
        ("new_comm", "_BackendWrapper"),
        parts={
            "torch._opaque_base": ("OpaqueBase",),
            "torch.distributed.ProcessGroup": ("_set_sequence_number_for_group",),
            "torch._library.opaque_object": ("register_opaque_type",),
        },
        missing={"torch.distributed.device_mesh": ("_register_distributed_opaque_types",)},
    ),
    "2.13": Contract(
        ("new_comm", "_BackendWrapper", "FlightRecorderHook"),
        parts={
            "torch._opaque_base": ("OpaqueBase",),
            "torch.distributed.ProcessGroup": ("_set_sequence_number_for_group",),
            "torch._library.opaque_object": ("register_opaque_type",),
            "torch.distributed.device_mesh": ("_register_distributed_opaque_types",),
            "torch.cuda._graph_annotations": ("mark_kernels", "get_kernel_annotations"),
        },
        missing={"torch._library.opaque_object": ("register_custom_class",)},
    ),
    "2.14": Contract(
        (
            *("new_comm", "_BackendWrapper", "FlightRecorderHook"),
            *("_torchcomms_is_backend_built", "_torchcomms_is_backend_registered"),
        ),
        parts={
            "torch._custom_class_base": ("CustomClassBase",),
            "torch._library.opaque_object": ("register_custom_class",),
            "torch.distributed.device_mesh": ("_register_distributed_opaque_types",),
            "torch.cuda._graph_annotations": ("mark_kernels", "get_kernel_annotations"),
            "torch.distributed.Backend": ("_plugins", "_ensure_backend_registered"),
        },
        missing={"torch.distributed.ProcessGroup": ("_set_sequence_number_for_group",)},
    ),
}
INSTALLED = ".".join(torch.__version__.split(".")[:2])


@pytest.fixture(params=CONTRACTS)
def contract(request):
    if request.param != INSTALLED:
        pytest.skip(f"torch {INSTALLED} is installed, not {request.param}")
    return CONTRACTS[request.param]


def owner(name):
    """The module or class `name`, or None."""
    try:
        return importlib.import_module(name)
    except ImportError:
        module, _, cls = name.rpartition(".")
        return getattr(importlib.import_module(module), cls, None) if cls[:1].isupper() else None


def test_parts(contract):
    for parts in (PARTS, contract.parts):
        for name, attributes in parts.items():
            for attribute in attributes:
                assert hasattr(owner(name), attribute), f"{name}.{attribute}"
    for name, attributes in contract.missing.items():
        for attribute in attributes:
            assert not hasattr(owner(name), attribute), f"{name}.{attribute}"
    assert compat.SWITCH_NAMES[compat.torch_version()] == contract.switch_names


def test_functions_that_are_recognised_on_the_stack(contract):
    assert {*compat.GROUP_MAKER_VARIABLES} <= {*compat.GROUP_MAKER.__code__.co_varnames}
    assert compat.BATCHES_FOUND
    assert compat._batch_code.co_name == "batch_isend_irecv"
    assert compat.ALL_REDUCE_CODE.co_name == "all_reduce"
    assert "AllreduceOptions" in compat.ALL_REDUCE_CODE.co_names
    assert [*inspect.signature(compat.SPLIT_SOURCE).parameters] == ["pg"]
    assert "supports_splitting" in compat.SPLIT_SOURCE.__code__.co_names


def test_options_and_reductions(contract):
    options = dist.AllreduceOptions()
    assert options.timeout == timedelta(milliseconds=-1)
    assert options.asyncOp is True
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"):
        options.reduceOp = getattr(dist.ReduceOp, name)
        number = int(getattr(dist.ReduceOp.RedOpType, name))
        assert hash(options.reduceOp) == int(options.reduceOp.op) == number
    factor = dist._make_nccl_premul_sum(0.5)
    assert compat.premul_factor(factor) == 0.5
    assert hash(factor) == int(factor.op) == int(dist.ReduceOp.RedOpType.PREMUL_SUM)


def test_torch_lists_a_group(contract):
    assert compat.known_groups() == []
    comm = unicomm.new_comm("shm", torch.device("cpu"))
    group = UnicommProcessGroup(comm, store=dist.HashStore())
    group._set_group_name("listed")
    compat.set_default_group(group)
    compat.list_group(group, "listed", "cpu", [0])
    try:
        assert compat.known_groups() == [group]
        assert compat.group_of_name("listed") is group
        assert compat.ranks_of_groups()[group] == {0: 0}
        assert dist.get_world_size() == 1
        assert dist.get_backend(group) == "unicomm"
        assert compat.backend_of_group(group, torch.device("cpu")) is group
        compat.store_of_group(group).set("key", "value")
        assert c10d._get_split_source(group) is None
    finally:
        dist.destroy_process_group()
    assert compat.known_groups() == []


def test_operators(contract):
    assert "all_reduce" in compat.operators_of("_c10d_functional")
    compat.symmetric_memory()
    assert "one_shot_all_reduce" in compat.operators_of("symm_mem")
    schema = compat.declared_schema("symm_mem::one_shot_all_reduce")
    assert [a.name for a in schema.arguments] == ["input", "reduce_op", "group_name"]
    assert compat.has_kernel("aten::add.Tensor", "CPU")
    assert compat.schema_of(torch.ops.aten.add.Tensor).name == "aten::add"
    assert compat.dtypes_of_scalar_types([torch.float32, None]) == [torch.float32, None]
    assert compat.real_object(3) == 3


def test_profiler(contract):
    assert not compat.profiler_enabled()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert compat.profiler_enabled()
        with compat.RecordFunction("an event"):
            pass
        compat.add_trace_metadata("key", "1")
    assert "an event" in {event.name for event in profile.events()}


def test_no_other_module_names_a_private_part_of_torch():
    private = re.compile(
        r"torch\._[A-Z]|from torch[\w.]*\._|import torch[\w.]*\._|from torch[\w.]* import _[a-z]"
    )
    package = Path(unicomm.__file__).parent
    found = [
        f"{path.relative_to(package)}: {line.strip()}"
        for path in sorted(package.rglob("*.py"))
        if path.name != "compat.py"
        for line in path.read_text().splitlines()
        if private.search(line)
    ]
    assert found == []


def test_callbacks_are_called_at_the_end_of_the_backward_pass():
    order = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: compat.at_end_of_backward(lambda: order.append("end")))
    x.register_hook(lambda _: order.append("x"))
    y.sum().backward()
    assert order == ["x", "end"]
    compat.at_end_of_backward(lambda: order.append("outside"))
    assert order == ["x", "end"]
