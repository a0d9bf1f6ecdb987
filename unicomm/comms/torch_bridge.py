"""The optional extension that emits torch's own record of a communication, where it has been built.

`unicomm build torch-bridge` compiles unicomm/profiler/torch_bridge.cpp for the torch, Python and machine at
hand into the user's cache; another torch needs another build, and finds none until then.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import platform
import sys
from pathlib import Path
from types import ModuleType

import torch

NAME = "unicomm_torch_bridge"
_loaded: dict[Path, ModuleType | None] = {}


def bridge_path() -> Path:
    """Where the extension for this torch and Python is, or would be."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return cache / "unicomm" / f"torch-{torch.__version__}-{python}-{platform.machine()}" / f"{NAME}.so"


def load() -> ModuleType | None:
    """The extension, or None where it is not built or does not load."""
    path = bridge_path()
    if not path.exists():
        return None  # asked for again at the next recording: it may have been built meanwhile
    if path not in _loaded:
        try:
            _loaded[path] = load_from(path)
        except ImportError as error:
            logging.getLogger("unicomm").warning("%s does not load: %s", path, error)
            _loaded[path] = None
    return _loaded[path]


def load_from(path: Path) -> ModuleType:
    """Raises `ImportError`."""
    spec = importlib.util.spec_from_file_location(NAME, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no extension")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
