"""`unicomm doctor`."""

from __future__ import annotations

from typing import Annotated

import typer


def doctor(
    hosts: Annotated[
        list[str] | None, typer.Argument(metavar="[HOST]...", help="for --network: HOST or HOST:PORT")
    ] = None,
    network: Annotated[
        bool,
        typer.Option("--network", help="look at the way to HOSTs, or measure between the hosts of this job"),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="all checks, the variables, and what ran on what hardware")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="machine-readable output")] = False,
) -> None:
    """Checks what works on this machine: what is missing is named with its cure.

    Each backend runs a small all_reduce. The report also shows what the launcher's variables say about rank,
    size and store, where the rings of the flight recorder are, and which extras are installed.

        unicomm doctor
        unicomm doctor --verbose
        srun --ntasks 2 unicomm doctor
        unicomm doctor --json > report.json

    With --network it looks at the network instead. In a job with a rank on each host it measures latency and
    bandwidth between all pairs of hosts over TCP, and says what is off. With HOSTs, on which nothing needs to
    run, it looks from here at names, routes and answers.

        unicomm run --nnodes 2 --nproc-per-node 1 ... -m unicomm doctor --network
        unicomm doctor --network node2 node3:29400

    Exit code 0: the core and at least one backend work, and the ranks of the launcher, if there is one, can
    meet; with --network, nothing is off. 1: not so. 2: the options contradict each other, or the job cannot
    be measured.
    """
    if hosts and not network:
        raise typer.BadParameter("hosts are for --network", param_hint="HOST")
    if network:
        from unicomm.launch.doctor import network_report

        raise typer.Exit(network_report.run(hosts or [], json))
    from unicomm.launch.doctor.report import run

    raise typer.Exit(run(json, verbose))
