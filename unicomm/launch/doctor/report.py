"""The report of `unicomm doctor`: its checks of the installation and the launcher, and its output.

No check raises, because the doctor is for installations where something is broken: errors become findings.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import unicomm
from unicomm.flight_recorder import extras
from unicomm.flight_recorder.texts import printable

from . import verified
from .backends import backend_reports
from .findings import BROKEN, MISSING, NOT_HERE, WORKS, Finding, line_of, version_of
from .summary import summary

# Instruction sets that the core's reductions are built for, or that distinguish machines.
_FEATURES = """
sse4_2 avx avx2 f16c fma avx512f avx512bw avx512dq avx512vl avx512_bf16 avx512_fp16 amx_bf16
asimd asimdhp sve sve2 bf16
"""

_PREFIXES = """
UNICOMM_ TORCHCOMM_ TORCH_DISTRIBUTED_ TORCH_NCCL_ NCCL_ RCCL_ GLOO_ NVSHMEM_ ROCSHMEM_ OMPI_COMM_WORLD_ PALS_
"""
_NAMES = """
RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID
TORCHELASTIC_RESTART_COUNT TORCHELASTIC_USE_AGENT_STORE PMI_RANK PMI_SIZE PMI_LOCAL_RANK PMI_LOCAL_SIZE
PMIX_RANK PMIX_SIZE PMIX_NAMESPACE MPI_LOCALRANKID MPI_LOCALNRANKS SLURM_JOB_ID SLURM_STEP_ID SLURM_PROCID
SLURM_LOCALID SLURM_NODEID SLURM_NTASKS SLURM_STEP_NUM_TASKS SLURM_STEP_TASKS_PER_NODE CUDA_VISIBLE_DEVICES
HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES OMP_NUM_THREADS LD_LIBRARY_PATH XDG_RUNTIME_DIR TMPDIR
"""
_RING_ROOM = 2 << 20  # bytes; a ring of the default size needs about 1.1 MB
_NO_STORE = "none: "
_SECRET = ("TOKEN", "SECRET", "PASSWORD", "KEY", "CREDENTIAL")


def run(as_json: bool, verbose: bool = False) -> int:
    """Prints the report: a screen, all checks as tables, or JSON.

    Returns exit code 0 if unicomm can be used here, else 1.
    """
    report = collect()
    if as_json:
        print(json.dumps(report, indent=2))
    elif verbose:
        _show(report, Console())
    else:
        Console().print(summary(report))
    return 0 if report["ok"] else 1


def collect() -> dict[str, Any]:
    """Runs all checks and returns the report as plain data.

    `ok`: the core and shm, tcp or gloo work, and the launcher, if there is one, has set up its job. Without
    rings unicomm works, so the recorder does not count. `verdict`: the same as a sentence.
    """
    core = _core()
    ran = verified.load()
    # Before the self-tests, in which this process writes a ring of its own.
    recorder = _recorder()
    backends = backend_reports()
    for backend in backends:
        backend.verified = [
            f"{row.where}, {row.when}: {row.what}" for row in ran.on_hardware if row.backend == backend.name
        ]
    works = {backend.name for backend in backends if backend.status == WORKS}
    usable = all(finding.ok is not False for finding in core) and bool(works & {"shm", "tcp", "gloo"})
    environment = _environment()
    wrong = [finding for finding in environment if finding.ok is False]
    return {
        "ok": usable and not wrong,
        "verdict": _verdict(usable, wrong, recorder),
        "versions": _versions(),
        "core": [asdict(finding) for finding in core],
        "recorder": asdict(recorder),
        "environment": [asdict(finding) for finding in environment],
        "variables": _variables(),
        "backends": [asdict(backend) for backend in backends],
        "extras": [asdict(finding) for finding in _extras()],
        "never_verified": ran.never,
    }


def _verdict(usable: bool, wrong: list[Finding], recorder: Finding) -> str:
    """Returns whether unicomm works here, in a sentence that fits a line; `wrong`: of the launcher's job."""
    if not usable:
        return "unicomm cannot be used here yet: cure what is marked 'no'."
    if wrong:
        reason = wrong[0].detail.removeprefix(_NO_STORE)
        return f"This job cannot run: {reason}."
    if recorder.ok is False:
        return "unicomm works here, but not its recorder."
    return "unicomm works here."


# --- the machine and the installation -----------------------------------------------------------------


def _versions() -> dict[str, str | None]:
    return {
        "unicomm": unicomm.__version__,
        "python": platform.python_version(),
        "torch": version_of("torch"),
        "numpy": version_of("numpy"),
        "torchcomms": version_of("torchcomms"),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def cpu_info(*names: str) -> str:
    """Returns the first field of /proc/cpuinfo with one of these names, else ""."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() in names:
                return value.strip()
    return ""


def _core() -> list[Finding]:
    present = set(cpu_info("flags", "Features").split())
    findings = [
        Finding("processor", None, cpu_info("model name") or platform.machine()),
        Finding("instruction sets", None, " ".join(f for f in _FEATURES.split() if f in present)),
    ]
    try:
        from unicomm import _core as core

        findings.append(Finding("native core", True, f"reductions use {core.fold_isa()}"))
        findings.append(Finding("usable cores", None, f"{core.usable_cores()} of {os.cpu_count()}"))
    except Exception as error:
        findings.append(
            Finding(
                "native core",
                False,
                line_of(error),
                "reinstall unicomm for this Python and machine: pip install --force-reinstall unicomm",
            )
        )
    try:
        import torch.distributed

        good = torch.distributed.is_available()
        detail = "with torch.distributed" if good else "without torch.distributed"
        cure = "" if good else "install a torch that is built with USE_DISTRIBUTED=1"
        findings.append(Finding("torch", good, f"{torch.__version__}, {detail}", cure))
    except Exception as error:
        findings.append(Finding("torch", False, line_of(error), "reinstall torch: https://pytorch.org"))
        return findings
    return [*findings, _switch(), _symmetric()]


def _switch() -> Finding:
    """Checks what `TORCH_DISTRIBUTED_USE_TORCHCOMMS=1` does in this process."""
    from unicomm.c10d import switch

    try:
        reason = switch.autoload_off() or switch.why_not()
        on = os.environ.get(switch.VARIABLE, "0") not in ("", "0")
    except Exception as error:
        reason, on = line_of(error), False
    if reason:
        return Finding("switch", None, f"{switch.VARIABLE}=1 has no effect: {reason}")
    return Finding(
        "switch", None, f"{switch.VARIABLE}=1 runs torch.distributed on unicomm; now {'on' if on else 'off'}"
    )


def _symmetric() -> Finding:
    """Checks which operations of torch's symmetric memory run on CPU tensors, and why others do not."""
    what = "torch.ops.symm_mem"
    try:
        from unicomm.comms.errors import NotReadyError
        from unicomm.symm import torch_operators

        try:
            operators = torch_operators()
        except NotReadyError as error:
            return Finding(what, None, f"{line_of(error)}: {error.hint}", error.hint)
    except Exception as error:
        return Finding(what, None, line_of(error))
    left = [operator for operator in operators if not operator.served]
    detail = f"{len(operators) - len(left)} of {len(operators)} run on CPU tensors after symm.use_in_torch()"
    return Finding(what, None, "; ".join([detail, *(f"not {o.name}: {o.text}" for o in left)]))


def _environment() -> list[Finding]:
    try:
        from unicomm.comms.membership.environment import LAUNCHERS, detect_environment

        found = detect_environment()
    except Exception as error:
        return [Finding("launcher", False, line_of(error), getattr(error, "hint", ""))]
    place = f"rank {found.rank} of {found.size}"
    if found.local_rank is not None and found.local_size is not None:
        place += f", {found.local_rank} of {found.local_size} on this host"
    findings = [Finding("launcher", True, found.source), Finding("place", None, place)]
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    has_daemons = any(row.hosts for row in LAUNCHERS if row.name == found.source)
    if found.size == 1:
        store = Finding("store", None, "not needed for one rank")
    elif address and port:
        host = "the launcher" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"
        store = Finding("store", None, f"TCP at {address}:{port}, hosted by {host}")
    elif not address and not port and found.local_size == found.size and has_daemons:
        store = Finding("store", None, "a file, because all ranks are on this host")
    else:
        cure = "set MASTER_ADDR to rank 0's host and MASTER_PORT to a free port there, or pass store="
        store = Finding("store", False, f"{_NO_STORE}the ranks cannot meet", cure)
    return [*findings, store]


def _variables() -> dict[str, str]:
    """Returns the variables that launchers, backends and unicomm read; secrets are masked."""
    return {
        name: "(set, not shown)" if any(word in name for word in _SECRET) else value
        for name, value in sorted(os.environ.items())
        if name in _NAMES.split() or name.startswith(tuple(_PREFIXES.split()))
    }


# --- extras -------------------------------------------------------------------------------------------


_EXTRAS = {  # short, so that each has one line with its cure
    "hub": "several hosts, trace top",
    "profile": "the profile commands",
    "trace": "trace analyze --perfetto",
    "metrics": "Prometheus, OTLP",
    "notebook": "ranks in notebooks",
}


def _extras() -> list[Finding]:
    """Checks which extras are installed; none of them has to be. Those of backends are in their reports."""
    findings = []
    for extra, what_for in _EXTRAS.items():
        if gone := extras.missing(extra):
            text = f"{what_for}: without {' and '.join(gone)}"
            findings.append(Finding(extra, None, text, extras.cure(extra)))
        else:
            found = ", ".join(f"{name} {version_of(name)}" for name in extras.packages(extra))
            findings.append(Finding(extra, True, f"{what_for} ({found})"))
    return findings


# --- the recorder ---------------------------------------------------------------------------------------


def _recorder() -> Finding:
    """Checks the folder of the rings: the number and size of rings in it, and the free space."""
    what = "recorder's rings"
    try:
        from unicomm.flight_recorder.ring.files import others_may_write
        from unicomm.flight_recorder.ring.folder import SUFFIX, is_alive, rings_folder

        folder = rings_folder()
        rings = list(folder.glob(f"*{SUFFIX}"))
        total = sum(ring.lstat().st_size for ring in rings)
        running = sum(is_alive(ring) is True for ring in rings)
        free = shutil.disk_usage(folder).free
        shared = others_may_write(folder)
    except Exception as error:
        return Finding(what, False, line_of(error), "set UNICOMM_TRACE_DIR to a private folder with room")
    detail = (
        f"{folder}: {len(rings)} rings ({running} of running processes), {_size(total)}"
        f"{', others may write here' if shared else ''}; {_size(free)} free"
    )
    if free < _RING_ROOM:
        return Finding(what, False, detail, "free some space, or set UNICOMM_TRACE_DIR to a folder with more")
    return Finding(what, True, detail)


def _size(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.1f} MiB"


# --- output as tables -----------------------------------------------------------------------------------


_MARKS = {True: "[green]ok[/]", False: "[red]no[/]", None: ""}
_COLOURS = {WORKS: "green", BROKEN: "red", MISSING: "dim", NOT_HERE: "dim"}


def _show(report: dict[str, Any], console: Console) -> None:
    general = _table("check", "", "result")
    for name, version in report["versions"].items():
        general.add_row(name, "", _shown(version or "not installed"))
    for finding in [*report["core"], *report["environment"], report["recorder"]]:
        _add(general, finding)
    for name, value in report["variables"].items():
        general.add_row(f"[dim]{_shown(name)}[/]", "", _shown(value))
    console.print(general)

    backends = _table("backend", "", "check", "result")
    for backend in report["backends"]:
        backends.add_section()
        label = f"{_shown(backend['name'])}\n[{_COLOURS[backend['status']]}]{backend['status']}[/]"
        for finding in backend["findings"]:
            _add(backends, finding, label)
            label = ""
        for place in backend["verified"]:
            backends.add_row("", "", "[dim]verified on[/]", f"[dim]{_shown(place)}[/]")
    console.print(backends)
    optional = _table("extra", "", "result")
    for finding in report["extras"]:
        _add(optional, finding)
    console.print(optional)
    console.print(f"Never run on hardware: {', '.join(report['never_verified'])}.", highlight=False)
    console.print(f"[{'green' if report['ok'] else 'red'}]{_shown(report['verdict'])}[/]")


def _shown(text: str) -> str:
    """Returns a text as markup that shows it, control characters included."""
    return escape("\n".join(map(printable, text.split("\n"))))


def _table(*headings: str) -> Table:
    table = Table(box=SIMPLE, show_edge=False, padding=(0, 1))
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _add(table: Table, finding: dict[str, Any], *before: str) -> None:
    found = _shown(finding["detail"])
    if finding["cure"] and finding["ok"] is not True and finding["cure"] not in finding["detail"]:
        found += f"\n[yellow]-> {_shown(finding['cure'])}[/]"
    cells = [_shown(finding["what"]), found]
    mark = _MARKS[finding["ok"]]
    table.add_row(*([before[0], mark, *cells] if before else [cells[0], mark, cells[1]]))
