"""Forecasts of a data-parallel step beside real steps: over shared memory, and between hosts at 1 Gbit/s.

    python -m benchmarks.forecast                    # 2 and 4 ranks on one host, and on two hosts
    python -m benchmarks.forecast --place hosts --ranks 2 --width 1024

Hosts are network namespaces whose links tc's token bucket limits. In turn: the machine is measured, the step
runs for real, and the forecast is made; medians of the turns. The load is that of the machine at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from tools.namespaces import Namespaces, why_not

PROGRAM = Path(__file__).parent / "ddp_step.py"
PORT = 29500  # in a network of its own, so it is free
RATE = "1gbit"


def shell(command: list[object], **more: str) -> str:
    """Runs a command, and returns what it has printed."""
    environment = {**os.environ, "TORCH_DISTRIBUTED_USE_TORCHCOMMS": "1", **more}
    words = list(map(str, command))
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{shlex.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def cores_of(node: int, nodes: int) -> list[object]:
    """The command that keeps a host to its part of the cores. Hosts of a cluster share none, these would."""
    cores = sorted(os.sched_getaffinity(0))
    part = cores[node * len(cores) // nodes : (node + 1) * len(cores) // nodes]
    return ["taskset", "--cpu-list", ",".join(map(str, part))] if part else []


def launch(hosts: Namespaces | None, nodes: int, ranks: int, program: list[object]) -> str:
    """Runs a program as `ranks` on each of the hosts, or on the cores that one of them would have."""
    if hosts is None:
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        return shell([*cores_of(0, nodes), *start, *program], UNICOMM_BACKEND="shm")
    lines = []
    for node in range(nodes):
        where = [f"--master-addr={hosts.address(0)}", f"--master-port={PORT}", f"--nproc-per-node={ranks}"]
        start = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nnodes={nodes}",
            f"--node-rank={node}",
            *where,
        ]
        words = [*hosts.enter(node), *cores_of(node, nodes), *start, *program]
        lines.append(shlex.join(map(str, words)) + " &")
    return shell(["sh", "-c", " ".join([*lines, "wait"])], UNICOMM_BACKEND="auto", GLOO_SOCKET_IFNAME="eth0")


@contextlib.contextmanager
def limited(count: int) -> Iterator[Namespaces]:
    """Hosts whose links have `RATE` in each direction."""
    with Namespaces(count) as hosts:
        for name in hosts.names:
            limit = ["tbf", "rate", RATE, "burst", "256kb", "latency", "100ms"]
            shell(["tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", *limit])
        yield hosts


def compare(place: str, ranks: int, width: int, rows: int, steps: int, turns: int) -> str:
    """Returns a row of the table."""
    nodes = 1 if place == "shm" else 2
    local, program = ranks // nodes, [PROGRAM, width, rows, steps]
    real, least, forecasts = [], [], []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        hosts = stack.enter_context(limited(nodes)) if nodes > 1 else None
        file = Path(folder) / "machine.toml"
        bench = ["-m", "unicomm", "bench", "--save", file, "--most", 25]
        for _ in range(turns):
            if local > 1:
                launch(None, nodes, local, bench)
            if hosts is not None:
                launch(hosts, nodes, 1, bench)
            said = launch(hosts, nodes, local, program)
            found = re.search(r"step (\S+) s, least (\S+) s", said)
            assert found is not None, said
            real.append(float(found[1]))
            least.append(float(found[2]))
            command = [
                sys.executable,
                "-m",
                "unicomm",
                "rehearse",
                "--nnodes",
                nodes,
                "--nproc-per-node",
                local,
            ]
            said = shell([*command, "--topology", file, "--json", "--jobs", 1, *program[:3], 60])
            forecasts.append(json.loads(said)["forecast"])
    step, measured = (statistics.median(x) for x in ([f["step"] for f in forecasts], real))
    exposed = statistics.median(f["exposed"] for f in forecasts)
    figures = [f"{1e3 * t:.1f} ms" for t in (measured, min(least), step, exposed)]
    figures += [f"{step / measured - 1:+.0%}", f"{os.getloadavg()[0]:.0f}"]
    return f"| {place} | {ranks} | {width} | {' | '.join(figures)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--place", nargs="*", default=["shm", "hosts"], choices=["shm", "hosts"])
    parser.add_argument("--ranks", nargs="*", type=int, default=[2, 4])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    if "hosts" in options.place and (reason := why_not()):
        raise SystemExit(f"no network namespaces here: {reason}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the namespaces are removed on the way out
    console = Console()
    titles = "place | ranks | width | measured | least step | forecast | of it waiting | error | load"
    console.print(f"| {titles} |\n|{'---|' * len(titles.split(' | '))}", soft_wrap=True)
    for place in options.place:
        for ranks in options.ranks:
            row = compare(place, ranks, options.width, options.rows, options.steps, options.turns)
            console.print(row, soft_wrap=True)


if __name__ == "__main__":
    main()
