"""The switch: `TORCH_DISTRIBUTED_USE_TORCHCOMMS=1` runs unchanged torch.distributed programs on unicomm.

torch calls `autoload` at the end of `import torch` (entry-point group `torch.backends`). If the variable is
off, `autoload` makes the backend name "unicomm" known, with a limit of time for torch's store when a program
names it (store_deadline.py), and returns. If it is on and the official torchcomms is
not installed, `autoload` gives torch.distributed the parts that torch would import from torchcomms:
`new_comm`, a backend wrapper and a recorder hook. `import torchcomms` then finds unicomm.torchcomms
(torchcomms_import.py). env_rendezvous.py makes env:// work under mpiexec and srun. `autoload` never raises,
because an exception would break `import torch`. Imports are inside functions, so that `import torch` loads no
communicator while the variable is off.

UNICOMM_BACKEND chooses the unicomm backend behind the backends that programs name (choice.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .choice import NAME

if TYPE_CHECKING:
    from .subgroups import MeetingPlace

VARIABLE = "TORCH_DISTRIBUTED_USE_TORCHCOMMS"
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"

_log = logging.getLogger("unicomm")


def autoload() -> None:
    """Called by torch at the end of its import."""
    with contextlib.suppress(Exception):
        register()
    if os.environ.get(VARIABLE, "0").lower() not in ("1", "true", "yes", "on"):
        return
    if "UNICOMM_LAUNCHER_PID" in os.environ:
        with contextlib.suppress(Exception):
            from unicomm.flight_recorder.recording.ending import begin_under_launcher

            begin_under_launcher()
    try:
        reason = install()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    if reason:
        print(f"unicomm: {VARIABLE} has no effect: {reason}", file=sys.stderr)


def register() -> None:
    """Makes "unicomm" a backend name that `init_process_group` knows. Loads no communicator."""
    from torch.distributed import Backend, is_available

    def create(options: Any, hints: Any) -> Any:
        from .compat import group_maker_variables
        from .group_creator import create

        # Only torch's function knows which devices the program wants, and which backends torch has made.
        return create(options, hints, group_maker_variables())

    if is_available() and NAME not in Backend.backend_list:
        Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda", "xpu"])
        from . import store_deadline

        store_deadline.install(for_all=False)


def autoload_off() -> str:
    """Returns the reason why torch never calls `autoload`, or an empty text if it does."""
    if os.environ.get(_AUTOLOAD, "1") != "0":
        return ""
    return f"{_AUTOLOAD}=0 keeps torch from loading unicomm; unset it"


def why_not() -> str:
    """Returns the reason why the switch has no effect with this torch, or an empty text if it has."""
    import torch

    from .compat import SWITCH_NAMES, torch_version, torchcomms_available, torchcomms_new_comm

    if torch_version() not in SWITCH_NAMES:
        known = ", ".join(f"{a}.{b}" for a, b in SWITCH_NAMES)
        return f"torch {torch.__version__} is not known to this unicomm, which knows {known}; update unicomm"
    available = torchcomms_available()
    if available is None:
        return f"torch {torch.__version__} was built without it"
    if available and torchcomms_new_comm() is not _new_comm:
        return "the official torchcomms is installed and is used; uninstall it to use unicomm"
    return ""


def install() -> str:
    """Gives torch.distributed unicomm's parts. Returns the reason if it cannot, else an empty text."""
    if reason := why_not():
        return reason
    from .compat import stand_for_torchcomms

    def known_backend(name: str) -> bool:
        return True

    stand_for_torchcomms(
        {
            "new_comm": _new_comm,
            "_BackendWrapper": BackendWrapper,
            "FlightRecorderHook": _recorder_hook,
            "_TorchCommsFlightRecorderHook": _recorder_hook,
            "_torchcomms_is_backend_built": known_backend,
            "_torchcomms_is_backend_registered": known_backend,
        }
    )
    from . import env_rendezvous, store_deadline, subgroups, torchcomms_import

    subgroups.install()
    torchcomms_import.install()
    store_deadline.install(for_all=True)
    _say_it_once()
    env_rendezvous.install()
    env_rendezvous.fill_in()
    return ""


def _say_it_once() -> None:
    """Drops torch's warning for each rank and device that a group is made by torchcomms.

    One line of rank 0 (in `_create`) says it, with what stands behind the backend's name.
    """
    logging.getLogger("torch.distributed.distributed_c10d").addFilter(
        lambda record: not str(record.msg).startswith("Using TorchComms backend")
    )


class _IsGroup(type):
    def __instancecheck__(cls, instance: object) -> bool:
        loaded = sys.modules.get(f"{__package__}.process_group")
        return loaded is not None and isinstance(instance, loaded.UnicommProcessGroup)


class BackendWrapper(metaclass=_IsGroup):
    """Stands for torchcomms' `_BackendWrapper`, with which torch wraps a communicator that it has made.

    The switch may run while a module of unicomm is being imported, which has imported torch. The module of
    unicomm's groups is therefore imported when the first is made.
    """

    def __new__(cls, comm: Any) -> Any:
        from .plugins import Made
        from .process_group import UnicommProcessGroup

        return comm.group if isinstance(comm, Made) else UnicommProcessGroup(comm)


def _recorder_hook(max_entries: int = 0) -> Any:
    from unicomm.flight_recorder.recording.hook import FlightRecorderHook

    return FlightRecorderHook(max_entries or None)


def _new_comm(
    backend: str, device: Any, name: str = "main", store: Any = None, hints: Any = None, **more: Any
) -> Any:
    """torchcomms' `new_comm` as torch calls it, which passes neither rank nor size nor timeout.

    They are taken from the calling function of torch, whatever the environment says. torch also does not ask
    for the group's other devices once it has a communicator for the first one, so they are added here.
    """
    from dataclasses import replace

    from . import plugins, subgroups
    from .compat import PrefixStore, group_maker_variables

    asked = group_maker_variables()
    wanted = _wanted(backend, device.type, asked)
    theirs = {kind: one for kind, one in wanted.items() if plugins.is_third_party(one)}
    ours = [kind for kind in wanted if kind not in theirs and (kind == device.type or _serves(kind))]
    if not ours:
        return plugins.Made(plugins.make(backend, store, asked))
    first = device.type if device.type in ours else ours[0]
    place = subgroups.meeting_place(asked["global_ranks_in_group"], asked.get("group_desc"), name, store)
    made: list[Any] = []
    try:
        for kind in sorted(ours, key=lambda kind: kind != first):
            there = replace(place, store=PrefixStore(f"{kind}/", place.store))
            made.append(_create(wanted[kind], kind, there, asked, more))
        others = {
            kind: plugins.make(one, PrefixStore(f"{kind}/", asked["prefix_store"]), asked)
            for kind, one in theirs.items()
        }
    except BaseException:
        for comm in made:
            comm.abort()
            comm.finalize()
        raise
    comm, *beside = made
    comm.beside.extend(beside)
    if not others:
        return comm
    from .mixed_group import MixedProcessGroup

    return plugins.Made(MixedProcessGroup(comm, others=others), comm._recorder_index)


def _wanted(backend: str, kind: str, asked: Mapping[str, Any]) -> dict[str, str]:
    """Device type to backend, of all devices that the group is for.

    "gloo" alone means the CPU: a GPU's library would connect at once and want all GPUs.
    """
    from .choice import is_asked_for

    config = asked.get("backend_config")
    if config is None or (":" not in (text := str(asked.get("backend", ""))) and text != "undefined"):
        return {kind: backend}
    devices = dict(config.get_device_backend_map())
    return {k: one for k, one in devices.items() if k == kind or not _serves(k) or is_asked_for(k, asked)}


def _serves(kind: str) -> bool:
    from . import choice

    return kind in ("cpu", "cuda") and choice.is_present(kind)


def _create(backend: str, kind: str, place: MeetingPlace, asked: Mapping[str, Any], more: Any) -> Any:
    import torch

    from unicomm.backends.registry import connect
    from unicomm.comms.communicator import Communicator, communicator_of
    from unicomm.comms.membership.split import plan_split

    from . import choice, group_creator, subgroups

    # Options for another backend that the program names mean nothing here.
    given = asked.get("backend_options") if backend == choice.NAME else None
    hints, changes = group_creator.read_options(given)
    chosen = choice.chosen_backend(backend, kind)
    device = torch.device(kind)
    if kind != "cpu" and choice.is_present(kind):
        device = choice.device_of(kind, asked.get("device_id"), os.environ, torch.get_device_module(kind))
    ranks, timeout = asked["global_ranks_in_group"], asked["timeout"]
    if ranks and not changes and (parent := subgroups.parent_of(kind, chosen)) is not None:
        plan = plan_split(parent._engine, list(ranks), place.name, hints or None, timeout, place.meeting)
        comm = parent._split(plan)
        assert comm is not None  # torch asks members only
    else:
        more = more | {"rank": asked["group_rank"], "size": asked["group_size"]}
        more |= {"store": place.store, "timeout": timeout, "meeting": place.meeting}
        more |= {"labels": ranks or None, "hints": hints, "enable_reconfigure": changes}
        comm = communicator_of(connect(chosen, device, place.name, **more), Communicator)
    choice.bind(comm, asked.get("device_id"))
    if comm.get_rank() == 0:
        _log.log(
            logging.INFO if ranks else logging.WARNING,
            "torch.distributed '%s' on %s now is unicomm '%s' (%s), %d ranks",
            backend,
            device,
            chosen,
            comm.get_backend(),
            comm.get_size(),
        )
    return comm
