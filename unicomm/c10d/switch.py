"""The switch: `TORCH_DISTRIBUTED_USE_TORCHCOMMS=1` runs unchanged torch.distributed programs on unicomm.

torch calls `autoload` at the end of `import torch` (entry-point group `torch.backends`). With the variable
off it looks at one environment variable and returns. With it on, and where the official torchcomms is not
installed, it gives torch.distributed the three things that torch would import from torchcomms: `new_comm`, a
backend wrapper and a recorder hook; env_rendezvous.py does for mpiexec and srun what torchrun does for
env://. It never raises: an exception here would break `import torch`.

`UNICOMM_BACKEND` chooses what stands behind the backends that programs name (devices.py); without it that is
"auto" for CPU tensors, and NCCL or RCCL for those on GPUs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import Any

VARIABLE = "TORCH_DISTRIBUTED_USE_TORCHCOMMS"
CHOICE = "UNICOMM_BACKEND"
NAME = "unicomm"  # for init_process_group without the switch

# Names in torch.distributed.distributed_c10d that the switch sets, by torch version (read in torch's source).
NAMES: dict[tuple[int, int], tuple[str, ...]] = {
    (2, 11): ("new_comm", "_BackendWrapper"),
    (2, 12): ("new_comm", "_BackendWrapper"),
    (2, 13): ("new_comm", "_BackendWrapper", "FlightRecorderHook"),
    (2, 14): (
        "new_comm",
        "_BackendWrapper",
        "FlightRecorderHook",
        "_torchcomms_is_backend_built",
        "_torchcomms_is_backend_registered",
    ),
    (2, 15): (
        "new_comm",
        "_BackendWrapper",
        "_TorchCommsFlightRecorderHook",
        "_torchcomms_is_backend_built",
        "_torchcomms_is_backend_registered",
    ),
}

_log = logging.getLogger("unicomm")


def autoload() -> None:
    """Called by torch at the end of its import."""
    with contextlib.suppress(Exception):
        register()
    if os.environ.get(VARIABLE, "0").lower() not in ("1", "true", "yes", "on"):
        return
    try:
        reason = install()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    if reason:
        print(f"unicomm: {VARIABLE} has no effect: {reason}", file=sys.stderr)


def register() -> None:
    """Makes "unicomm" a name that `init_process_group` knows. Imports nothing."""
    from torch.distributed import Backend, is_available

    def create(options: Any, hints: Any) -> Any:
        from .torch_backend import create

        # Which devices the program wants, and what torch has made for them, only torch's caller knows.
        return create(options, hints, sys._getframe(1).f_locals)

    if is_available() and NAME.upper() not in Backend._plugins:
        Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda", "xpu"])


def why_not() -> str:
    """Why the switch has no effect with this torch, or an empty text when it has."""
    import torch
    import torch.distributed.distributed_c10d as c10d

    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    if (major, minor) not in NAMES:
        known = ", ".join(f"{a}.{b}" for a, b in NAMES)
        return f"torch {torch.__version__} is not known to this unicomm, which knows {known}; update unicomm"
    available = getattr(c10d, "_TORCHCOMM_AVAILABLE", None)
    if available is None:
        return f"torch {torch.__version__} was built without it"
    if available and getattr(c10d, "new_comm", None) is not _new_comm:
        return "the official torchcomms is installed and is used; uninstall it to use unicomm"
    return ""


def install() -> str:
    """Puts unicomm behind torch.distributed; why not, or an empty text when it is done."""
    import torch
    import torch.distributed.distributed_c10d as c10d

    if reason := why_not():
        return reason
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    names = NAMES[major, minor]

    def known_backend(name: str) -> bool:
        return True

    parts: dict[str, Any] = {
        "new_comm": _new_comm,
        "_BackendWrapper": _group_class(),
        "FlightRecorderHook": _recorder_hook,
        "_TorchCommsFlightRecorderHook": _recorder_hook,
        "_torchcomms_is_backend_built": known_backend,
        "_torchcomms_is_backend_registered": known_backend,
    }
    for name in names:
        setattr(c10d, name, parts[name])
    c10d._TORCHCOMM_AVAILABLE = True

    from . import env_rendezvous

    env_rendezvous.install()
    env_rendezvous.fill_in()
    return ""


def _group_class() -> type:
    from .process_group import UnicommProcessGroup

    return UnicommProcessGroup


def _recorder_hook(max_entries: int = 0) -> Any:
    from unicomm.flight_recorder.recording.hook import FlightRecorderHook

    return FlightRecorderHook(max_entries or None)


def _new_comm(
    backend: str, device: Any, name: str = "main", store: Any = None, hints: Any = None, **more: Any
) -> Any:
    """torch names no rank, size and timeout: they are those of its caller, whatever the environment says.

    Nor does it ask for the group's other devices, when it has a group of ours for the first one.
    """
    frame = sys._getframe(1).f_locals
    comm = _made(backend, device.type, name, store, frame, more)
    try:
        _add_others(comm, name, frame, more)
    except BaseException:
        for made in (comm, *comm.beside):
            made.abort()
            made.finalize()
        raise
    return comm


def _add_others(comm: Any, name: str, frame: dict[str, Any], more: Any) -> None:
    from torch._C._distributed_c10d import PrefixStore

    from .devices import is_present

    asked, config = str(frame.get("backend", "")), frame.get("backend_config")
    if config is None or ":" not in asked:
        return  # who names gloo alone means the CPU: a GPU's library connects at once, and wants all GPUs
    for kind, backend in config.get_device_backend_map().items():
        if kind != comm.get_device().type and kind in ("cpu", "cuda") and is_present(kind):
            store = PrefixStore(f"{kind}/", frame["prefix_store"])
            comm.beside.append(_made(backend, kind, name, store, frame, more))


def _made(backend: str, kind: str, name: str, store: Any, frame: dict[str, Any], more: Any) -> Any:
    import torch

    from unicomm.backends.registry import new_comm

    from .devices import bind, chosen_backend, device_of, is_present

    chosen = chosen_backend(backend, kind)
    device = torch.device(kind)
    if kind != "cpu" and is_present(kind):
        device = device_of(kind, frame.get("device_id"), os.environ, torch.get_device_module(kind))
    rank, size, timeout = frame.get("group_rank"), frame.get("group_size"), frame.get("timeout")
    comm = new_comm(chosen, device, name=name, store=store, timeout=timeout, rank=rank, size=size, **more)
    bind(comm, frame.get("device_id"))
    if comm.get_rank() == 0:
        _log.warning(
            "torch.distributed '%s' on %s now is unicomm '%s' (%s), %d ranks",
            backend,
            device,
            chosen,
            comm.get_backend(),
            comm.get_size(),
        )
    return comm
