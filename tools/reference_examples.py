"""The examples of the API reference: cells of Python files in docs/reference/examples.

A cell begins with `# %% name, name`: the names that it shows, below `unicomm`. What stands above the first
cell is run before each. If a cell uses `comm` and does not make it, two ranks run it, each with its own.
The site shows a cell below the docstring of each of its names (tools/reference_extension.py);
tests/test_reference.py runs all cells.
"""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "reference" / "examples"
_HEAD = re.compile(r"^(?:# %% .*\n)+", re.MULTILINE)
_SHOWN = re.compile(r"^::: (\S+)$", re.MULTILINE)
#: What authors of backends write, whose example is a package: docs/backends.md.
_WRITTEN_BY_AUTHORS = ("unicomm.comms.backend",)


@dataclass(frozen=True)
class Example:
    """A cell: the names that it shows, its code, the code before the first cell, and where it is."""

    names: tuple[str, ...]
    code: str
    preamble: str
    place: str

    @property
    def on_two_ranks(self) -> bool:
        """Whether `comm` is given."""
        uses = re.search(r"\bcomm\b", self.code) is not None
        makes = re.search(r"\bas comm\b|\bdef program\(comm\)|\bcomm = |lambda comm:", self.code) is not None
        return uses and not makes


def examples(folder: Path = FOLDER) -> list[Example]:
    """Returns all cells, by file."""
    found = []
    for path in sorted(folder.glob("*.py")):
        text = path.read_text()
        heads = list(_HEAD.finditer(text))
        ends = [head.start() for head in heads[1:]] + [len(text)]
        for head, end in zip(heads, ends, strict=True):
            names = re.findall(r"[\w.]+", head[0])
            line = text[: head.start()].count("\n") + 1
            code = text[head.end() : end].strip() + "\n"
            place = f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}:{line}"
            found.append(Example(tuple(names), code, text[: heads[0].start()], place))
    return found


def resolve(name: str) -> Any:
    """Returns the object or module of a dotted name. Raises `AttributeError` when there is none."""
    parts = name.split(".")
    for n in range(1, len(parts) + 1):  # a function may hide the module of its name
        try:
            value: Any = importlib.import_module(".".join(parts[:n]))
            for part in parts[n:]:
                value = getattr(value, part)
        except (AttributeError, ImportError):
            continue
        return getattr(value, "__func__", value)  # of a class method, which is a new object each time
    raise AttributeError(f"there is no {name}")


def shown() -> list[str]:
    """Returns what the pages of the reference show: dotted names."""
    pages = sorted((ROOT / "docs" / "reference").glob("*.md"))
    return [name for page in pages for name in _SHOWN.findall(page.read_text())]


def public() -> Iterator[tuple[str, Any]]:
    """Yields each function, class, method and property of the reference, with a dotted name."""
    for name in shown():
        value = resolve(name)
        if not isinstance(value, types.ModuleType):
            yield from _with_members(name, value)
        elif name not in _WRITTEN_BY_AUTHORS:
            for own in getattr(value, "__all__", None) or _defined_in(value):
                yield from _with_members(f"{name}.{own}", getattr(value, own))


def _defined_in(module: types.ModuleType) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if name[0] != "_" and callable(value) and getattr(value, "__module__", "") == module.__name__
    ]


def _with_members(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    yield path, value
    if isinstance(value, type):
        for name in dir(value):
            if name[0] != "_" and is_own(member := resolve(f"{path}.{name}")):
                yield f"{path}.{name}", member


def is_own(member: Any) -> bool:
    """Whether a class's member is a method or a property that unicomm defines."""
    function = member.fget if isinstance(member, property) else member
    return inspect.isroutine(function) and str(getattr(function, "__module__", "")).startswith("unicomm")


def by_object() -> dict[int, Example]:
    """Returns the example of each object that has one, by `id`."""
    return {id(resolve(f"unicomm.{name}")): example for example in examples() for name in example.names}


def without_example() -> list[str]:
    """Returns the public names that no example shows."""
    shown_by = by_object()
    return sorted({path for path, value in public() if id(value) not in shown_by})


def as_markdown(example: Example) -> str:
    """Returns an example as a section of a docstring."""
    code = textwrap.indent(f"```python\n{example.code}```", "    ")
    return f"\n\nExample:\n{code}\n"
