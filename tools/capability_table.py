"""The capability table of the docs, made by running the conformance suite.

    python -m tools.capability_table            prints it
    python -m tools.capability_table --write    renews it in docs/capabilities.md

A cell says how a backend does an operation: by itself, or composed by unicomm from what it has. Every cell
that is not a dash passed the suite for all element types and reductions, on 2 ranks, or 2 on each of 2 hosts,
when the table was made; mpi, whose ranks are processes of mpiexec, passes it in tests/backends/mpi. The same
holds for the options of operations: their rows say whether a communicator's hint has an effect.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from unicomm.backends.hosts.backend import HostsBackend
from unicomm.backends.registry import find_backend
from unicomm.comms.backend import Capabilities, Reconfigures
from unicomm.comms.communicator import Communicator
from unicomm.comms.execution.composed.completion import is_native
from unicomm.comms.operations.call import Call
from unicomm.comms.operations.dtypes import DTYPES
from unicomm.comms.operations.reduction import RedOpType, ReduceOp, why_not
from unicomm.comms.operations.table import OPERATIONS, Kind, Operation
from unicomm.launch.doctor import verified
from unicomm.testing import conformance, run_ranks

#: What the table's columns run: backend, hints and number of ranks, 0 for a backend that is tried elsewhere.
COLUMNS: dict[str, tuple[str, dict[str, str], int]] = {
    "shm": ("shm", {}, 2),
    "tcp": ("tcp", {}, 2),
    "gloo": ("gloo", {}, 2),
    "ucx": ("ucx", {}, 2),
    "mpi": ("mpi", {}, 0),
    "auto, 2 hosts": ("auto", {"hosts": "a,a,b,b"}, 4),
    "fake": ("fake", {}, 2),
}
#: The page that has it.
PAGE = Path("docs/capabilities.md")
BEGIN, END = "<!-- capabilities: begin (make docs) -->", "<!-- capabilities: end -->"


def _capabilities(column: str) -> Capabilities:
    backend, hints, _ = COLUMNS[column]
    return HostsBackend.capabilities if hints else find_backend(backend).capabilities


def passes(column: str, name: str) -> bool:
    """Returns whether the suite passes for the operation or option `name`; prints the error if not."""
    backend, hints, ranks = COLUMNS[column]

    def check(comm: Communicator) -> None:
        if name in conformance.OPTIONS:
            conformance.check_option(comm, name, lambda case: case.count < 1000)
        else:
            conformance.check(comm, name, lambda case: case.count < 5000)

    option = conformance.OPTIONS[name].hints if name in conformance.OPTIONS else {}
    try:
        if ranks:
            run_ranks(check, ranks, backend=backend, hints={**hints, **option})
    except (conformance.ConformanceError, RuntimeError) as error:
        print(f"{column} {name}: {error}", file=sys.stderr)
        return False
    return True


def _how(column: str, operation: str) -> str:
    """Returns "native" or "composed"; both for a reduction that is native for some element types only."""
    capabilities = _capabilities(column)
    if not capabilities.moves_data:
        return "pretends"
    row = OPERATIONS.get(operation)
    if row is None or row.kind is not Kind.COLLECTIVE:
        return "native"
    share = _native_share(row, capabilities)
    return {0.0: "composed", 1.0: "native"}.get(share, "native or composed")


def _native_share(row: Operation, capabilities: object) -> float:
    kinds = [ReduceOp(t) for t in RedOpType if t is not RedOpType.PREMUL_SUM] if row.reduces else [None]
    combinations = [(d, op) for d in DTYPES for op in kinds if op is None or why_not(op, d) is None]
    native = [
        is_native(capabilities, Call(row, dtype=dtype, op=op))  # type: ignore[arg-type]
        for dtype, op in combinations
    ]
    return sum(native) / len(native)


def _with_option(column: str, name: str) -> str:
    """Returns "yes" if the hint has an effect, else what has one, or "pretends"."""
    capabilities = _capabilities(column)
    if not capabilities.moves_data:
        return "pretends"
    return "a call's own" if name.startswith("wire=") and capabilities.one_host else "yes"


def table(passes: Callable[[str, str], bool] = passes) -> str:
    """The table as Markdown. A cell whose column and row do not pass is a dash."""
    lines = [f"| operation | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for operation in conformance.OPERATIONS:
        cells = [_how(column, operation) if passes(column, operation) else "-" for column in COLUMNS]
        lines.append(f"| `{operation}` | {' | '.join(cells)} |")
    for name in conformance.OPTIONS:
        cells = [_with_option(column, name) if passes(column, name) else "-" for column in COLUMNS]
        lines.append(f"| hint `{name}` ([what](numbers.md)) | {' | '.join(cells)} |")
    checks = ["yes" if _capabilities(c).checks_mismatch else "no" for c in COLUMNS]
    hosts = ["one" if _capabilities(c).one_host else "any" for c in COLUMNS]
    lines.append(f"| mismatch is caught before data is written | {' | '.join(checks)} |")
    lines.append(f"| hosts | {' | '.join(hosts)} |")
    changing = ["yes" if issubclass(find_backend(COLUMNS[c][0]), Reconfigures) else "no" for c in COLUMNS]
    lines.append(f"| ranks may be lost and join ([how](reconfigure.md)) | {' | '.join(changing)} |")
    types = ", ".join(info.name for info in DTYPES.values())
    lines += ["", f"Element types, on every backend: {types}.", ""]
    lines += ["| backend | ran on | last | what |", "|---|---|---|---|"]
    ran = verified.load()
    for row in ran.on_hardware:
        lines.append(f"| `{row.backend}` | {row.where} | {row.when} | {row.what} |")
    for row in ran.on_mocks:
        lines.append(f"| `{row.backend}` | {row.where} | {row.when} | {row.what}; never run on hardware |")
    return "\n".join(lines)


def renewed(text: str, new: str) -> str:
    """`text` with the part between the markers replaced."""
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"no markers {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n{new}\n{END}{after}"


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--write", action="store_true", help="renew the table in docs/capabilities.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    made = table()
    if not options.write:
        print(made)
        return
    PAGE.write_text(renewed(PAGE.read_text(), made))


if __name__ == "__main__":
    main()
