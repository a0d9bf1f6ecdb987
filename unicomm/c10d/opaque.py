"""What torch.compile has to know of a class so that its objects may be arguments of custom operators.

torch calls such classes opaque types; from 2.14 on, custom classes (names read in torch's source, run on
2.13 only). Where torch has neither, communicators work in eager code, and functional.py says what is missing.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from typing import Any

from unicomm.comms.errors import UnsupportedError


def _find(module: str, *names: str) -> Any:
    try:
        found = importlib.import_module(module)
    except ImportError:
        return None
    return next((getattr(found, name) for name in names if hasattr(found, name)), None)


OpaqueBase: Any = (
    _find("torch._opaque_base", "OpaqueBase")
    or _find("torch._custom_class_base", "CustomClassBase")
    or object
)


def not_traced(functions: Iterable[Any]) -> None:
    """Has torch.compile treat functions as it treats C++ code: neither trace into them nor compile them.

    It would try both, also where C++ calls back into Python, and fail for good at the first attribute of an
    opaque object. Nothing but functions is marked. `torch.compiler.disable` says the same, but imports the
    compiler and puts a call around every call.
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
    """The functions that a class defines, without special ones."""
    return [f for name, f in vars(cls).items() if name not in but and not name.startswith("__")]


def register(cls: type, constant: tuple[str, ...]) -> str:
    """Registers `cls`, whose methods `constant` give the same for the whole life of an object; its name."""
    where = "torch._library.opaque_object"
    as_opaque, as_custom = _find(where, "register_opaque_type"), _find(where, "register_custom_class")
    members = _find(where, "MemberType")
    if members is None or (as_opaque is None and as_custom is None):
        import torch

        raise UnsupportedError(
            f"torch {torch.__version__} takes no objects as arguments of custom operators",
            hint="update torch; without torch.compile call the communicator's methods",
        )
    same = dict.fromkeys(constant, members.USE_REAL)
    if as_opaque is not None:
        as_opaque(cls, typ="reference", members=same)
    else:
        as_custom(cls, typ="symbolic", members=same)
    return f"{cls.__module__}.{cls.__qualname__}"
