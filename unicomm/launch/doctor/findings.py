"""The results of `unicomm doctor`'s checks: findings, and the report of a backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata

WORKS, BROKEN, MISSING = "works", "broken", "not installed"
NOT_HERE = "not on this machine"


@dataclass(frozen=True)
class Finding:
    """The result of one check. `ok` is None when the result is information, neither success nor failure."""

    what: str
    ok: bool | None
    detail: str = ""
    cure: str = ""


@dataclass
class BackendReport:
    """The findings about one backend; `verified` lists where it has ever run."""

    name: str
    status: str
    findings: list[Finding] = field(default_factory=list)
    verified: list[str] = field(default_factory=list)


def version_of(package: str) -> str | None:
    """Returns the version of an installed package, None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def line_of(error: BaseException) -> str:
    """Returns the first line of an error's message."""
    text = getattr(error, "message", "") or str(error) or type(error).__name__
    return str(text).strip().splitlines()[0]


def attempt(what: str, cure: str, action: Callable[[], str]) -> Finding:
    """Runs a check, which returns a detail or raises, and returns its finding."""
    try:
        return Finding(what, True, action())
    except Exception as error:
        return Finding(what, False, line_of(error), getattr(error, "hint", "") or cure)
