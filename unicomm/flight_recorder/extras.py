"""Extras: which optional packages are missing, and the sentence that says so with its cure.

pyproject.toml says which packages an extra has; they are read from the metadata of the installed unicomm.
"""

from __future__ import annotations

import re
from importlib import metadata
from importlib.util import find_spec

_REQUIREMENT = re.compile(r"""([A-Za-z0-9._-]+)[^;]*; *extra *== *["']([\w-]+)["']""")
# packages whose modules have another name
_MODULES = {"pyzmq": "zmq", "prometheus-client": "prometheus_client", "opentelemetry-proto": "opentelemetry"}
_WITH = {"google": "perfetto"}  # modules that come with another package


class MissingExtraError(ImportError):
    """Optional packages are not installed; the message is one sentence with its cure."""


def packages(extra: str) -> list[str]:
    """Returns the names of an extra's packages; [] if unicomm is not installed, or has no such extra."""
    try:
        lines = metadata.requires("unicomm") or []
    except metadata.PackageNotFoundError:
        return []
    found = [match for line in lines if (match := _REQUIREMENT.match(line))]
    return [match[1] for match in found if match[2] == extra]


def missing(extra: str) -> list[str]:
    """Returns those packages of an extra whose module cannot be found."""
    return [name for name in packages(extra) if find_spec(_MODULES.get(name, name)) is None]


def cure(extra: str) -> str:
    return f"pip install 'unicomm[{extra}]'"


def sentence(what: str, names: list[str], extra: str) -> str:
    """Returns "`what` needs the package x, which is not installed: pip install 'unicomm[extra]'"."""
    several = len(names) > 1
    listed = f"packages {', '.join(names[:-1])} and {names[-1]}" if several else f"package {names[0]}"
    return f"{what} needs the {listed}, which {'are' if several else 'is'} not installed: {cure(extra)}"


def explain(error: ImportError, what: str, extra: str) -> MissingExtraError | None:
    """Returns what to raise in place of an import's error; None if no package of the extra is missing."""
    module = (error.name or "").partition(".")[0]
    name = _WITH.get(module) or next((p for p, m in _MODULES.items() if m == module), module)
    if not isinstance(error, ModuleNotFoundError) or name not in packages(extra):
        return None
    return MissingExtraError(sentence(what, missing(extra) or [name], extra))
