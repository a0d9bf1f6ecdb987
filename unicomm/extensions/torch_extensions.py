"""Optional extensions that need the ABI of the installed torch, and how they are loaded.

`unicomm build torch-bridge` compiles their sources, which are part of the package, for the installed torch
and Python into the user's cache. Another torch, or another version of the sources, needs another build; until
then no extension is found.
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

from .build_cache import cache_folder, version_of_files

_PACKAGE = Path(__file__).parent.parent
_loaded: dict[Path, ModuleType | None] = {}


class TorchExtension(NamedTuple):
    """One extension. `source` includes the headers beside it; `purpose` is shown to the user."""

    name: str
    source: Path
    purpose: str

    @property
    def files(self) -> list[Path]:
        return [self.source, *sorted(self.source.parent.glob("*.hpp"))]


#: Emits torch's own events for communication.
RECORD_PARAM_COMMS = TorchExtension(
    "unicomm_torch_bridge",
    _PACKAGE / "extensions" / "record_param_comms.cpp",
    "torch's record_param_comms events; profilers that start from now on use it",
)
#: torch's symmetric memory on CPU tensors.
SYMMETRIC_MEMORY = TorchExtension(
    "unicomm_torch_symm",
    _PACKAGE / "symm" / "torch_unit" / "module.cpp",
    "torch's symmetric memory on CPU tensors: unicomm.symm.use_in_torch()",
)
#: The extensions by the names of `unicomm build torch-bridge --part`.
EXTENSIONS = {"record": RECORD_PARAM_COMMS, "symmetric": SYMMETRIC_MEMORY}


@functools.cache
def _version(extension: TorchExtension) -> str:
    return version_of_files(extension.files)


def extension_path(extension: TorchExtension = RECORD_PARAM_COMMS) -> Path:
    """Returns the file of the extension for this torch, Python and source, whether or not it exists."""
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    folder = cache_folder() / f"torch-{torch.__version__}-{python}-{platform.machine()}"
    return folder / f"{extension.name}-{_version(extension)}.so"


def load(extension: TorchExtension = RECORD_PARAM_COMMS) -> ModuleType | None:
    """Returns the extension; None if it is not built or does not load."""
    path = extension_path(extension)
    if not path.exists():
        return None  # not remembered: the extension may be built before the next call
    if path not in _loaded:
        try:
            _loaded[path] = load_from(path, extension)
        except ImportError as error:
            logging.getLogger("unicomm").warning("%s does not load: %s", path, error)
            _loaded[path] = None
    return _loaded[path]


def load_from(path: Path, extension: TorchExtension = RECORD_PARAM_COMMS) -> ModuleType:
    """Loads the extension from a file. Raises `ImportError`."""
    spec = importlib.util.spec_from_file_location(extension.name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not an extension")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
