"""An extension of griffe, which reads the code for the site.

It puts the examples into the docstrings, and adds the functions of `unicomm.functional`, which no source
defines: they are made from a table when the module is imported.
"""

from __future__ import annotations

import inspect
from typing import Any

import griffe

from tools import reference_examples

_MADE_AT_RUN_TIME = "unicomm.c10d.functional"


class Examples(griffe.Extension):
    """Adds to each docstring the example of its name, as a section."""

    def __init__(self) -> None:
        shown_by = reference_examples.by_object()
        self._of_path = {
            path: shown_by[id(value)]
            for name, value in reference_examples.public()
            if id(value) in shown_by
            for path in (name, _defined_at(value))
        }

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each object that griffe has read."""
        example = self._of_path.get(obj.path)
        if example is None:
            return
        if obj.docstring is None:
            obj.docstring = griffe.Docstring("", parent=obj, parser="google")
        obj.docstring.value += reference_examples.as_markdown(example)

    def on_module_members(self, *, mod: griffe.Module, **_: Any) -> None:
        """Called for each module when its members have been read."""
        if mod.path != _MADE_AT_RUN_TIME:
            return
        module = reference_examples.resolve(_MADE_AT_RUN_TIME)
        for name in module.__all__:
            value = getattr(module, name)
            if name in mod.members or not inspect.isfunction(value):
                continue
            kind = griffe.ParameterKind.positional_or_keyword
            parameters = [griffe.Parameter(one, kind=kind) for one in inspect.signature(value).parameters]
            made = griffe.Function(name, parameters=griffe.Parameters(*parameters), parent=mod)
            made.docstring = griffe.Docstring(inspect.getdoc(value) or "", parent=made, parser="google")
            mod.set_member(name, made)
            self.on_instance(obj=made)


def _defined_at(value: Any) -> str:
    function = value.fget if isinstance(value, property) else value
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"
