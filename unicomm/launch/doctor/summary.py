"""The report of `unicomm doctor` on one screen: what works here, and the cure for what does not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from unicomm.flight_recorder.texts import printable

from .findings import BROKEN, NOT_HERE, WORKS

_SERVES = {
    "shm": "ranks of one host, through shared memory",
    "tcp": "any hosts, over TCP",
    "gloo": "any hosts, over TCP, by torch",
    "ucx": "any hosts, over the networks that UCX drives",
    "hosts": "several hosts: shared memory inside, TCP between",
    "mpi": "ranks of an MPI launcher",
    "fake": "one process in place of all ranks, for dry runs",
    "nccl": "NVIDIA GPUs",
    "rccl": "AMD GPUs",
    "nvshmem": "NVIDIA GPUs, with symmetric memory",
    "rocshmem": "AMD GPUs, with symmetric memory",
}
# What `unicomm doctor --verbose` alone shows of the installation.
_DETAILS = ("processor", "instruction sets", "usable cores")
_SAID_ALREADY = " runs torch.distributed on unicomm; "
_MARKS = {True: ("ok", "green"), False: ("no", "red"), None: ("-", "dim")}

# A line of the screen: what was checked, whether it works, a text, a cure.
_Line = tuple[str, bool | None, str, str]


def summary(report: Mapping[str, Any]) -> RenderableType:
    """Returns one line for each part of unicomm, with the one cure where it does not work."""
    versions = report["versions"]
    head = f"unicomm {versions['unicomm']}, torch {versions['torch'] or 'missing'}"
    grid = Table.grid(padding=(0, 2, 0, 0))
    for fold in (False, False, True):
        grid.add_column(no_wrap=not fold, overflow="fold")
    for what, ok, text, cure in _lines(report):
        mark, style = _MARKS[ok]
        said = Text(printable(text), "dim" if ok is None else "")
        if cure:
            said.append(f"{' ' if text else ''}-> {printable(cure)}", "yellow" if ok is False else "")
        grid.add_row(Text(mark, style), Text(printable(what), "bold"), said)
    verdict = Text(printable(report["verdict"]), "green" if report["ok"] else "red")
    verdict.append(" All checks: unicomm doctor --verbose", "dim")
    system = f"Python {versions['python']}, {versions['kernel']}"
    return Group(Text(f"{head}, {system}", "bold"), grid, verdict)


def _lines(report: Mapping[str, Any]) -> Iterator[_Line]:
    # The report has to fit a screen, and what `auto` takes between hosts has a line: that of `hosts`.
    told = {"tcp"} if _work(report, "tcp", "hosts") else set()
    for backend in report["backends"]:
        if backend["status"] != NOT_HERE and backend["name"] not in told:
            yield (backend["name"], *_of_backend(backend))
    absent = [backend["name"] for backend in report["backends"] if backend["status"] == NOT_HERE]
    if absent:
        yield "GPUs", None, f"no library or GPU for {', '.join(absent)}", ""
    core = {finding["what"]: finding for finding in report["core"] if finding["what"] not in _DETAILS}
    switch = core.pop("switch", None)
    for finding in core.values():
        yield _of_finding(finding)
    if switch is not None:
        works = "no effect" not in switch["detail"]
        yield "torch.distributed", works or None, switch["detail"].replace(_SAID_ALREADY, ", "), ""
    yield from _place(report["environment"])
    rings = report["recorder"]
    if rings["ok"]:
        folder, free = rings["detail"].partition(": ")[0], rings["detail"].rpartition("; ")[2]
        yield "recorder", True, f"rings in {folder}, {free}", ""
    else:
        yield _of_finding(rings)
    for finding in report["extras"]:
        what_for = finding["detail"].partition(" (")[0].partition(": ")[0]
        yield f"unicomm[{finding['what']}]", finding["ok"], what_for, _one(finding["cure"])


def _work(report: Mapping[str, Any], *names: str) -> bool:
    """Whether all these backends work."""
    return all(one["status"] == WORKS for one in report["backends"] if one["name"] in names)


def _place(environment: Sequence[Mapping[str, Any]]) -> Iterator[_Line]:
    """Yields one line for launcher, place and store, and one for each of them that is wrong."""
    wrong = [finding for finding in environment if finding["ok"] is False]
    right = [finding["detail"] for finding in environment if finding["ok"] is not False]
    if right:
        yield "launcher", True, ", ".join(right[:2] if "not needed" in right[-1] else right), ""
    for finding in wrong:
        yield _of_finding(finding)


def _of_backend(backend: Mapping[str, Any]) -> tuple[bool | None, str, str]:
    if backend["status"] == WORKS:
        return True, _SERVES.get(backend["name"], "") or backend["findings"][0]["detail"], ""
    # The first failed check is the cause; the later ones fail because of it.
    failed = [f for f in backend["findings"] if f["ok"] is False]
    cause = (failed or [f for f in backend["findings"] if f["cure"]] or backend["findings"])[0]
    if backend["status"] == BROKEN:
        return False, _short(f"{cause['what']}: {cause['detail']}"), _one(cause["cure"])
    return None, backend["status"], _one(cause["cure"])


def _of_finding(finding: Mapping[str, Any]) -> _Line:
    what, ok, detail, cure = (finding[key] for key in ("what", "ok", "detail", "cure"))
    if ok is True or not cure:
        return what, ok, detail, ""
    return what, ok, "" if ok is None else _short(detail), _one(cure)


def _one(cure: str) -> str:
    """Returns the first of several cures."""
    return cure.partition(";")[0].partition(", which")[0]


def _short(text: str, most: int = 70) -> str:
    return text if len(text) <= most else text[: most - 3].rstrip(" ,:;") + "..."
