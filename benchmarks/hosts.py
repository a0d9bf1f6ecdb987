"""Collectives of several hosts: unicomm's `auto`, with UCX (if there is) and with Gloo, beside Gloo and MPI.

    python -m benchmarks.hosts                       # 2 hosts of 2 ranks: some minutes
    python -m benchmarks.hosts --hosts 3 --ranks 2

Hosts are network namespaces of this machine (tools/namespaces.py). They share its cores, and the link
between them has the latency and the speed of the kernel, not of a network. TCP's congestion control is reno,
which behaves like cubic where no packet is lost. With bbr, which sends at an estimated rate, the times of
all contenders vary by a factor of two. Measured as in cpu_collectives.py: in turn, results checked, the
slowest rank's time, medians and ratios of one run.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks import mpi_on_hosts
from benchmarks.cpu_collectives import SIZES, Group, console, measure, mpi_groups, row_of
from tools.namespaces import Namespaces, why_not

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "ping_pong", "barrier")
PORT = 29500  # in a network of its own, so it is free


def command(hosts: Namespaces, count: int, ranks: int) -> list[str]:
    """Starts torchrun on every host; the arguments that follow are the program's."""
    lines = []
    for host in range(count):
        torchrun = [
            *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={count}", f"--node-rank={host}"),
            *(f"--nproc-per-node={ranks}", f"--master-addr={hosts.address(0)}", f"--master-port={PORT}"),
        ]
        lines.append(f'{shlex.join([*hosts.enter(host), *torchrun])} "$@" &')
    return ["sh", "-c", " ".join([*lines, "wait"]), "hosts"]


def show(rows: list[dict[str, Any]], title: str) -> None:
    names = list(rows[0]["seconds"])
    table = Table(title=title)
    table.add_column("operation")
    for name in ["size", *names, "best peer / ours"]:
        table.add_column(name, justify="right")
    for row in rows:
        seconds = row["seconds"]
        cells = [f"{seconds[name] * 1e6:,.0f}" if name in seconds else "-" for name in names]
        what = row["operation"] + ("" if row["dtype"] == "float32" else f" {row['dtype']}")
        table.add_row(what, row["size"], *cells, f"{row['best_peer_over_unicomm']:.2f} x")
    console.print(table)


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="of each host (default: 2)")
    parser.add_argument("--repetitions", type=int, default=7, help="turns of each contender (default: 7)")
    parser.add_argument("--operations", nargs="+", default=list(OPERATIONS), choices=OPERATIONS)
    parser.add_argument("--sizes", type=int, nargs="+", help="bytes of a rank; default: 8 B to 16 MiB")
    congestion = "congestion control of TCP (default: reno); '' for this machine's default"
    parser.add_argument("--congestion", default="reno", help=congestion)
    parser.add_argument("--json", type=Path, help="also write the figures there")
    options = parser.parse_args()
    if reason := why_not():
        raise SystemExit(f"no network namespaces here: {reason}")
    sizes = {f"{n} B": n for n in options.sizes} if options.sizes else SIZES
    cases = []
    for operation in options.operations:
        for dtype in ("float32", "bfloat16") if operation == "all_reduce" else ("float32",):
            for label, n in sizes.items():
                if operation != "barrier" or n == min(sizes.values()):
                    cases.append(({"operation": operation, "dtype": dtype, "bytes": n}, label))
    rows: list[dict[str, Any]] = []
    world = options.hosts * options.ranks
    with (
        Namespaces(options.hosts, congestion=options.congestion) as hosts,
        tempfile.TemporaryDirectory(prefix="unicomm-bench-") as folder,
    ):
        environment = {"GLOO_SOCKET_IFNAME": "eth0", "BENCH_INTERFACE": "eth0"}
        groups: list[Group] = []
        try:
            groups.append(
                Group("hosts", command(hosts, options.hosts, options.ranks), world, environment, folder)
            )
        except (OSError, ValueError) as error:
            raise SystemExit(f"the ranks did not start: {Path(folder, 'hosts.log').read_text()}") from error
        try:
            groups.extend(
                mpi_groups(
                    lambda library: mpi_on_hosts.command(
                        library, hosts, options.hosts, options.ranks, folder
                    ),
                    world,
                    mpi_on_hosts.ENVIRONMENT,
                    folder,
                )
            )
            columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
            with Progress(*columns, transient=True, console=console) as progress:
                task = progress.add_task("", total=len(cases))
                for case, label in cases:
                    progress.update(task, description=f"{case['operation']} {case['dtype']} {label}")
                    rows.append(row_of(case, world, label, measure(groups, case, options.repetitions)))
                    progress.advance(task)
        except BaseException:
            for group in groups:
                console.print(group.log(), highlight=False)
            raise
        finally:
            for group in groups:
                group.end()
    show(
        rows,
        f"{options.hosts} hosts of {options.ranks} ranks on {os.cpu_count()} cores, medians in microseconds",
    )
    if options.json:
        options.json.write_text(json.dumps({"load": os.getloadavg(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
