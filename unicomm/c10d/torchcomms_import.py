"""The finder by which `import torchcomms` finds unicomm.torchcomms, unless the official package is there.

`torchcomms.hooks` and the other submodules are the modules of unicomm.torchcomms themselves, not copies, so
that classes are the same by both names. Nothing is imported before a program asks for it.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

_THEIRS, _OURS = "torchcomms", "unicomm.torchcomms"
_EXTENSION = "_comms"  # what the official package has, and the placeholder of package indexes has not


def install() -> None:
    """Puts the finder first, once. It leaves everything but torchcomms to the other finders."""
    if not any(isinstance(finder, TorchcommsFinder) for finder in sys.meta_path):
        # First, because the others would load the submodules of unicomm.torchcomms a second time.
        sys.meta_path.insert(0, TorchcommsFinder())


class TorchcommsFinder(importlib.abc.MetaPathFinder):
    """Finds `torchcomms` and its submodules in unicomm, unless another finder has the official package."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        top, _, rest = fullname.partition(".")
        if top != _THEIRS:
            return None
        if rest:
            package = sys.modules.get(_THEIRS)
            if package is None or package.__name__ != _OURS:
                return None
        elif self._official(path):
            return None
        ours = _OURS + fullname[len(_THEIRS) :]
        try:
            found = importlib.util.find_spec(ours)
        except ModuleNotFoundError:
            found = None
        return None if found is None else importlib.util.spec_from_loader(fullname, _Alias(ours))

    def _official(self, path: Sequence[str] | None) -> bool:
        for finder in sys.meta_path:
            look = getattr(finder, "find_spec", None)
            spec = None if finder is self or look is None else look(_THEIRS, path)
            if spec is not None and any(
                any(Path(folder).glob(f"{_EXTENSION}*")) for folder in spec.submodule_search_locations or ()
            ):
                return True
        return False


class _Alias(importlib.abc.Loader):
    """Loads a module of unicomm under another name: `sys.modules` holds the same object twice."""

    def __init__(self, ours: str) -> None:
        self._ours = ours
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._ours)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has replaced it by that of the other name
