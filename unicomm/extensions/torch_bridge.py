"""Optional extensions that need the ABI of the torch at hand, where they have been built.

`unicomm build torch-bridge` compiles their sources, which lie in the package, for the torch, Python and
machine at hand into the user's cache; another torch, or another version of the sources, needs another build,
and finds none until then.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import platform
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch

from .builds import cache_folder, version_of_files

_PACKAGE = Path(__file__).parent.parent
_loaded: dict[Path, ModuleType | None] = {}


class Unit(NamedTuple):
    """One extension. `source` includes what else lies beside it, `text` says what it is for."""

    name: str
    source: Path
    text: str

    @property
    def files(self) -> list[Path]:
        return [self.source, *sorted(self.source.parent.glob("*.hpp"))]


#: Emits torch's own record of a communication.
RECORD = Unit(
    "unicomm_torch_bridge",
    _PACKAGE / "extensions" / "torch_bridge.cpp",
    "torch's record_param_comms events; profilers that start from now on use it",
)
#: torch's symmetric memory on CPU tensors.
SYMMETRIC = Unit(
    "unicomm_torch_symm",
    _PACKAGE / "symm" / "torch_unit" / "module.cpp",
    "torch's symmetric memory on CPU tensors: unicomm.symm.use_in_torch()",
)
UNITS = {"record": RECORD, "symmetric": SYMMETRIC}


@functools.cache
def _version(unit: Unit) -> str:
    return version_of_files(unit.files)


def bridge_path(unit: Unit = RECORD) -> Path:
    """Where the extension for this torch, Python and source is, or would be."""
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    folder = cache_folder() / f"torch-{torch.__version__}-{python}-{platform.machine()}"
    return folder / f"{unit.name}-{_version(unit)}.so"


def load(unit: Unit = RECORD) -> ModuleType | None:
    """The extension, or None where it is not built or does not load."""
    path = bridge_path(unit)
    if not path.exists():
        return None  # asked for again at the next recording: it may have been built meanwhile
    if path not in _loaded:
        try:
            _loaded[path] = load_from(path, unit)
        except ImportError as error:
            logging.getLogger("unicomm").warning("%s does not load: %s", path, error)
            _loaded[path] = None
    return _loaded[path]


def load_from(path: Path, unit: Unit = RECORD) -> ModuleType:
    """Raises `ImportError`."""
    spec = importlib.util.spec_from_file_location(unit.name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no extension")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
