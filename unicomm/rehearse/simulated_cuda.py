"""A GPU that is not there: programs that say `cuda` run on a machine without one, with CPU tensors.

`SimulatedCuda` is a torch function mode. It takes CUDA devices in calls of torch for the CPU. `install` also
replaces functions of `torch.cuda` that ask for the GPU, and constructors that would refuse "cuda". The
program and its libraries see GPUs. torch's own files see that there are none, so that torch does what it does
for CPU tensors. `Tensor.device` is "cpu".
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn import attention
from torch.nn.attention import SDPBackend
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from .compat import Generator

#: What a program is told about each GPU, which is like an H100.
NAME, CAPABILITY, MEMORY = "simulated GPU", (9, 0), 80 << 30
_CPU = torch.device("cpu")
_TORCH = str(Path(torch.__file__).parent) + "/"
_MOVES = {torch.Tensor.to, torch.Tensor.type}  # their device may be any argument but the first


def on_cpu(device: Any) -> Any:
    """Returns the CPU for a CUDA device in any of the ways to name one, else the argument."""
    if isinstance(device, torch.device):
        return _CPU if device.type == "cuda" else device
    if isinstance(device, str):
        of_type = device.removeprefix("torch.cuda.")
        if of_type != device and of_type.endswith("Tensor"):
            return f"torch.{of_type}"
        return "cpu" if device.partition(":")[0] == "cuda" else device
    if isinstance(device, int) and not isinstance(device, bool):
        return _CPU
    return device


class SimulatedCuda(TorchFunctionMode):
    """Takes CUDA devices for the CPU while it is entered."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        kwargs.pop("pin_memory", None)
        answer = _ANSWERS.get(func)
        if answer is not None:
            return answer(*args, **kwargs)
        if func in _MOVES:
            args = (args[0], *(on_cpu(one) for one in args[1:]))
        elif any(one.__class__ is torch.device for one in args):
            args = tuple(on_cpu(one) if one.__class__ is torch.device else one for one in args)
        return func(*args, **kwargs)


def _to_gpu(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return tensor.to(_CPU)


_ANSWERS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.cuda: _to_gpu,
    torch.Tensor.pin_memory: lambda tensor, *_, **__: tensor,
    torch.Tensor.record_stream: lambda *_: None,
}


class Stream:
    """A stream of a GPU whose work is always done."""

    device = torch.device("cuda", 0)
    cuda_stream = stream_id = device_index = priority = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        event = event or Event()
        event.record()
        return event


class Event:
    """An event of a GPU, which has passed when it is recorded."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._time = 0.0

    def record(self, stream: Any = None) -> None:
        self._time = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return max((end._time - self._time) * 1e3, 1e-6)


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _zero(*_: Any, **__: Any) -> int:
    return 0


class StreamContext(nullcontext[Any]):
    """Stands for `torch.cuda.StreamContext`: all streams are one."""

    def __init__(self, stream: Any = None) -> None:
        super().__init__(stream)


def _own(value: Any) -> Any:
    """Returns a function of its own for each name: torch.compile has one rule for each function of torch."""
    if not isinstance(value, FunctionType):
        return value

    def own(*arguments: Any, **named: Any) -> Any:
        return value(*arguments, **named)

    return own


class _Device:
    """`torch.cuda.device` and `device_of`: a context manager that changes nothing."""

    def __init__(self, *_: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def install(gpus: int) -> None:
    """Has programs of this process find `gpus` GPUs. To be called before the program begins."""
    _replace_functions(gpus)
    _replace_constructors()
    _replace_meeting()


def _replace_functions(gpus: int) -> None:
    now = [0]

    def set_device(device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device).index
        if index is not None and index >= gpus:
            text = f"a node of this rehearsal has {gpus} GPUs, not {index + 1}"
            raise RuntimeError(f"invalid device ordinal: {text}")
        if index is not None and index >= 0:
            now[0] = index

    properties = SimpleNamespace(
        name=NAME,
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        total_memory=MEMORY,
        multi_processor_count=132,
        warp_size=32,
        gcnArchName="",
        L2_cache_size=50 << 20,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_block_optin=227 << 10,
    )
    stream = Stream()
    named: dict[str, Any] = {
        "init": _nothing,
        "set_device": set_device,
        "current_device": lambda: now[0],
        "get_device_name": lambda *_: NAME,
        "get_device_capability": lambda *_: CAPABILITY,
        "get_device_properties": lambda *_: properties,
        "get_arch_list": lambda: ["sm_90"],
        "can_device_access_peer": lambda *_: True,
        "mem_get_info": lambda *_: (MEMORY, MEMORY),
        "memory_stats": lambda *_: defaultdict(int),
        "memory_snapshot": lambda *_, **__: [],
        "memory_summary": lambda *_, **__: "",
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "get_rng_state_all": lambda: [torch.get_rng_state()] * gpus,
        "initial_seed": torch.initial_seed,
        "is_bf16_supported": lambda *_, **__: True,
        "is_current_stream_capturing": lambda: False,
        "Stream": Stream,
        "ExternalStream": Stream,
        "Event": Event,
        "stream": lambda stream=None: StreamContext(stream),
        "StreamContext": StreamContext,
        "device": _Device,
        "device_of": _Device,
    }
    named |= dict.fromkeys(("current_stream", "default_stream"), lambda *_: stream)
    named |= dict.fromkeys(
        ("utilization", "temperature", "power_draw", "clock_rate", "device_memory_used"), _zero
    )
    named |= dict.fromkeys(
        [n for n in dir(torch.cuda) if n.partition("_")[0] in ("max", "memory") and n not in named], _zero
    )
    named |= dict.fromkeys(
        [
            *("synchronize", "empty_cache", "ipc_collect", "set_stream", "set_per_process_memory_fraction"),
            *("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all"),
            *(n for n in dir(torch.cuda) if n.startswith("reset_")),
        ],
        _nothing,
    )
    named.pop("memory")  # a module
    for name, value in named.items():
        setattr(torch.cuda, name, _own(value))
    asked: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: gpus,
    }
    for name, mine in asked.items():
        setattr(torch.cuda, name, _but_for_torch(_WITHOUT_GPU[name], mine))
    cuda_module: Any = torch.cuda
    cuda_module._lazy_init = _own(_nothing)
    cuda_module.nccl.version = lambda: (2, 27, 0)
    for name in ("range_push", "range_pop", "mark", "range_start", "range_end"):
        setattr(torch.cuda.nvtx, name, _own(_nothing))
    cuda_module.memory._record_memory_history = _own(_nothing)
    cuda_module.memory._dump_snapshot = _own(_nothing)
    for kind in ("Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool"):
        setattr(torch.cuda, f"{kind}Tensor", getattr(torch, f"{kind}Tensor"))
    cuda = torch.device("cuda")
    asked = {
        "is_available": lambda: True,
        "device_count": lambda: gpus,
        "current_accelerator": lambda *_, **__: cuda,
        "current_device_index": lambda: now[0],
        "current_stream": lambda *_: stream,
        "synchronize": _nothing,
        "empty_cache": _nothing,
        "set_device_index": set_device,
        "memory_allocated": _zero,
        "memory_reserved": _zero,
        "max_memory_allocated": _zero,
        "max_memory_reserved": _zero,
        "memory_stats": lambda *_: defaultdict(int),
        "reset_peak_memory_stats": _nothing,
    }
    for name, mine in asked.items():
        theirs = _WITHOUT_GPU.get(name, getattr(torch.accelerator, name))
        setattr(torch.accelerator, name, _but_for_torch(theirs, mine))


#: What torch's own files are told, even on a machine with GPUs.
_WITHOUT_GPU: Mapping[str, Callable[..., Any]] = {
    "is_available": lambda: False,
    "is_initialized": lambda: False,
    "device_count": lambda: 0,
    "current_accelerator": lambda *_, **__: None,
}


def _but_for_torch(theirs: Callable[..., Any], mine: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that answers torch's own files by `theirs`, and everybody else by `mine`."""

    @functools.wraps(theirs)
    def answer(*args: Any, **kwargs: Any) -> Any:
        within = sys._getframe(1).f_code.co_filename.startswith(_TORCH)
        return (theirs if within else mine)(*args, **kwargs)

    return answer


def _with_cpu(function: Callable[..., Any], **changes: Callable[[Any], Any]) -> Callable[..., Any]:
    """Returns `function` with some of its arguments changed where they are given."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        for name, change in changes.items():
            if name in given.arguments:
                given.arguments[name] = change(given.arguments[name])
        return function(*given.args, **given.kwargs)

    return call


def _none(_: Any) -> None:
    return None


def _replace_constructors() -> None:
    """Makes torch's classes and functions that refuse a missing GPU use the CPU instead."""
    autocast: Any = torch.amp.autocast_mode.autocast
    begin = autocast.__init__

    def init(self: Any, device_type: str, dtype: Any = None, *more: Any, **named: Any) -> None:
        if device_type == "cuda" and dtype is None:
            dtype = torch.float16  # torch's choice for GPUs
        begin(self, on_cpu(device_type), dtype, *more, **named)

    autocast.__init__ = init
    scaler: Any = torch.amp.grad_scaler.GradScaler
    scaler.__init__ = _with_cpu(scaler.__init__, device=on_cpu)
    mesh: Any = DeviceMesh
    mesh.__init__ = _with_cpu(mesh.__init__, device_type=on_cpu)
    ddp: Any = DistributedDataParallel
    ddp.__init__ = _with_cpu(ddp.__init__, device_ids=_none, output_device=_none)
    module: Any = torch.nn.Module
    to = module.to

    def moved(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        return to(self, *map(on_cpu, args), **kwargs)

    module.to = functools.wraps(to)(moved)
    module.to_empty = _with_cpu(module.to_empty, device=on_cpu)
    whole: Any = torch
    whole.set_default_device = _with_cpu(torch.set_default_device, device=on_cpu)
    whole.load = _with_cpu(torch.load, map_location=_location)
    whole.Generator = _Generator
    fsdp: Any = FullyShardedDataParallel
    shard = fsdp.__init__

    def init_fsdp(self: Any, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(shard).bind(self, *args, **kwargs)
        given.arguments["device_id"] = _CPU  # FSDP refuses the CPU unless it is asked for
        shard(*given.args, **given.kwargs)

    fsdp.__init__ = functools.wraps(shard)(init_fsdp)
    choose = attention.sdpa_kernel

    @functools.wraps(choose)
    def sdpa_kernel(backends: Any, *more: Any, **named: Any) -> Any:
        chosen = backends if isinstance(backends, (list, tuple)) else [backends]
        return choose([*chosen, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], *more, **named)

    attention.sdpa_kernel = sdpa_kernel


def _location(given: Any) -> Any:
    if isinstance(given, dict):
        return {on_cpu(key): on_cpu(value) for key, value in given.items()}
    return on_cpu(given)


class _Generator(Generator):
    """A generator of random numbers, on the CPU."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        return super().__new__(cls, device=on_cpu(device))  # type: ignore[call-arg]

    def __init__(self, *_: Any, **__: Any) -> None:
        pass


def _replace_meeting() -> None:
    """Has groups that are asked for GPUs serve CPU tensors."""
    config: Any = c10d.BackendConfig
    begin = config.__init__

    def init(self: Any, backend: Any) -> None:
        begin(self, backend)
        devices = self.device_backend_map
        if "cuda" in devices:
            gpus = devices.pop("cuda")
            devices.setdefault("cpu", gpus)

    config.__init__ = init
    for name in ("init_process_group", "new_group"):
        function = _with_cpu(getattr(c10d, name), device_id=_none)
        setattr(c10d, name, function)
        setattr(dist, name, function)
    barrier = _with_cpu(c10d.barrier, device_ids=_none)
    modules: list[Any] = [c10d, dist]
    for module in modules:
        module.barrier = barrier
        module.is_nccl_available = lambda: True
    registry: Any = importlib.import_module("unicomm.backends.registry")
    registry.connect = _with_cpu(registry.connect, device=on_cpu)
    warnings.filterwarnings("ignore", "Attempted to get default timeout for nccl backend")
