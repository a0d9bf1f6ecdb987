"""Jobs on two hosts whose network fails for a while, or is bad all the time: what their ranks get.

    python -m tests.chaos.networks                            # all faults on all backends, some minutes
    python -m tests.chaos.networks --fault "down 5 s" --backend hosts --seed 7
    python -m tests.chaos.networks --write docs/network-faults.md

The hosts are network namespaces, and tools/relay.py passes on their packets. A job is good if no data are
wrong, all ranks end, each in time, and those that fail name ranks of the other host.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from tests.backends.hosts.namespace_job import PORT, Job
from tools.namespaces import Namespaces, why_not
from tools.relay import Relay

ROOT = Path(__file__).parents[2]
PLACEMENT = (0, 0, 1, 1)  # the hosts of the ranks
TIMEOUT = 20.0  # seconds for an operation
CLOSING = 20.0  # seconds from an error to the end of a rank
#: What a communicator is asked for: the backend, and what is between hosts.
BACKENDS = {"hosts": ("auto", "tcp"), "tcp": ("tcp", ""), "gloo": ("gloo", ""), "ucx": ("ucx", "")}


@dataclass(frozen=True)
class Fault:
    """`paths`: source and target host, and what is changed of their path, for `seconds`. `survived`: whether
    the job has to go on; otherwise each rank may get an error, all at most `within` seconds after its begin.
    """

    what: str
    changes: dict[str, float]
    seconds: float
    survived: bool
    paths: tuple[tuple[int, int], ...] = ((0, 1), (1, 0))
    within: float = TIMEOUT + 10


_FIRST = ((0, 1),)
_DOWN = {"loss": 1.0}
FAULTS = {
    "down 0.5 s": Fault("no packet passes for 0.5 s", _DOWN, 0.5, True),
    "down 5 s": Fault("no packet passes for 5 s", _DOWN, 5.0, True),
    "down 60 s": Fault("no packet passes for 60 s", _DOWN, 60.0, False),
    "one way 5 s": Fault("no packet from the first host passes for 5 s", _DOWN, 5.0, True, _FIRST),
    "one way 60 s": Fault("no packet from the first host passes for 60 s", _DOWN, 60.0, False, _FIRST),
    "loss": Fault("3 % of the packets from the first host are lost", {"loss": 0.03}, 8.0, True, _FIRST),
    "delay": Fault("packets take 50 ms more each way", {"delay": 0.05}, 8.0, True),
    "reordering": Fault(
        "packets take up to 5 ms more, and overtake each other", {"jitter": 0.005}, 8.0, True
    ),
    "10 Mbit/s": Fault("10 Mbit/s each way", {"rate": 10e6}, 8.0, True),
}


@dataclass
class Round:
    """What became of a job. `ranks`: what each one said. `wrong`: why it is not good."""

    fault: str
    backend: str
    seed: int
    ranks: list[dict[str, Any]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    struck: float = 0.0

    @property
    def last_error(self) -> float | None:
        """Seconds from the fault to the last rank's error."""
        ends = [said["when"] for said in self.ranks if said["outcome"] != "right"]
        return max(ends) - self.struck if ends else None


def play(fault: str, backend: str, seed: int) -> Round:
    """Runs one job."""
    how, done = FAULTS[fault], Round(fault, backend, seed)
    reset = dict.fromkeys(how.changes, 0.0) if "rate" not in how.changes else {"rate": None}
    with (
        tempfile.TemporaryDirectory(prefix="unicomm-net-") as folder,
        Namespaces(2) as hosts,
        Relay(hosts, seed) as network,
        Job(hosts, Path(folder), within=120 + how.seconds + how.within + CLOSING) as job,
    ):
        for rank, host in enumerate(PLACEMENT):
            job.start(
                host,
                *("-m", "tests.chaos.network_rank", *BACKENDS[backend], TIMEOUT, seed),
                RANK=rank,
                WORLD_SIZE=len(PLACEMENT),
                LOCAL_RANK=PLACEMENT[:rank].count(host),
                MASTER_ADDR=hosts.address(0),
                MASTER_PORT=PORT,
                PYTHONPATH=ROOT,
            )
        try:
            for rank in range(len(PLACEMENT)):
                job.hear(rank)
            time.sleep(1)
            done.struck = time.monotonic()
            for source, target in how.paths:
                network.set(source, target, **how.changes)
            _until(done.struck + how.seconds, job)
            for source, target in how.paths:
                network.set(source, target, **reset)
            time.sleep(1)
            with contextlib.suppress(BrokenPipeError):  # it may have failed, and ended
                job.tell(0)
            done.ranks = [job.hear(rank) for rank in range(len(PLACEMENT))]
        except AssertionError as error:  # a rank said nothing before the deadline, or crashed
            done.wrong.append(str(error))
            return done
        for rank, process in enumerate(job.processes):
            try:
                code = process.wait(CLOSING)
            except subprocess.TimeoutExpired:
                done.wrong.append(f"the process of rank {rank} did not end")
            else:
                done.wrong += [f"rank {rank} ended with exit code {code}"] if code else []
    for rank, said in enumerate(done.ranks):
        done.wrong += [f"rank {rank}: {why}" for why in wrong(how, done.struck, rank, said)]
    if not done.wrong and not struck(how, done.ranks):
        done.wrong.append("nobody has noticed the fault: did it strike?")
    return done


def struck(fault: Fault, ranks: list[dict[str, Any]]) -> bool:
    """Whether an outage has made a step as long as it was itself, or has failed it."""
    outage = fault.seconds if fault.changes.get("loss") == 1.0 else 0.0
    return any(said["outcome"] != "right" or said["longest"] >= outage for said in ranks)


def _until(when: float, job: Job) -> None:
    """Waits until this time, or until all processes have ended."""
    while time.monotonic() < when and any(process.poll() is None for process in job.processes):
        time.sleep(0.05)


def wrong(fault: Fault, struck: float, rank: int, said: dict[str, Any]) -> list[str]:
    """What is not good of what a rank said."""
    found = []
    if said["outcome"] == "right":
        return found
    if fault.survived:
        found.append(f"the network was only slow: {said['outcome']}: {said['text']}")
    elif said["outcome"] not in {"PeerLostError", "CommTimeoutError"}:
        found.append(f"{said['outcome']}: {said['text']}")
    else:
        here = {other for other, host in enumerate(PLACEMENT) if host == PLACEMENT[rank]}
        if not said["culprits"]:
            found.append(f"nobody is named: {said['text']}")
        elif said["outcome"] == "PeerLostError" and here & set(said["culprits"]):
            found.append(f"ranks of its own host are named as lost: {said['text']}")
    if said["when"] - struck > fault.within:
        found.append(f"its error came {said['when'] - struck:.1f} s after the fault")
    if said["closed"] > CLOSING:
        found.append(f"it took {said['closed']:.1f} s to give the communicator up")
    return found


PAGE = """\
# Network faults between hosts

Generated by `make networks`. Two ranks on each of two hosts run random operations whose results are known,
with a timeout of {timeout:g} s, while the network between the hosts fails for a time or is bad. A job is good
if no data are wrong, and if each rank either goes on or gets, in time, an error that names ranks of the other
host.

{count} jobs, {today}, {machine}; all were good. The hosts are network namespaces. A program passes their
packets on (tools/relay.py), and loses, delays and reorders them.

| fault | backend | jobs | outcomes of the ranks | to the last error: median, longest | slowest step |
|---|---|---|---|---|---|
{rows}

The faults:

{faults}

`hosts` is what `auto` makes on two hosts, with TCP between them. A step is two to nine
operations of up to 600 kB. TCP sends again what was lost. A host that has not answered for about
15 s counts as gone; the hint `host_silence` changes that ([several-hosts.md](several-hosts.md)). MPI is not
tried here: its own connections decide, and most MPI libraries end the job.
"""


def table(rounds: list[Round]) -> str:
    """The page."""
    rows = []
    for fault in FAULTS:
        for backend in BACKENDS:
            own = [r for r in rounds if (r.fault, r.backend) == (fault, backend)]
            if not own:
                continue
            outcomes = Counter(said["outcome"] for r in own for said in r.ranks)
            times = [r.last_error for r in own if r.last_error is not None]
            took = f"{statistics.median(times):.1f} s, {max(times):.1f} s" if times else "-"
            slowest = max(said["longest"] for r in own for said in r.ranks)
            counts = ", ".join(f"{name} {count}" for name, count in outcomes.most_common())
            rows.append(f"| {fault} | {backend} | {len(own)} | {counts} | {took} | {slowest:.1f} s |")
    return PAGE.format(
        timeout=TIMEOUT,
        count=len(rounds),
        today=date.today().isoformat(),
        machine=f"{os.cpu_count()} {platform.machine()} cores, torch {torch.__version__}, "
        f"load average {os.getloadavg()[0]:.0f}",
        rows="\n".join(rows),
        faults="\n".join(f"- *{name}*: {fault.what}" for name, fault in FAULTS.items()),
    )


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--fault", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--backend", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    parser.add_argument("--rounds", type=int, default=2, help="of each fault and backend")
    parser.add_argument("--seed", type=int, default=1, help="of the first round")
    parser.add_argument("--write", type=Path, help="write the page, if all jobs are good")
    options = parser.parse_args()
    console = Console()
    if reason := why_not():
        console.print(f"no network namespaces here: {reason}", style="red")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the namespaces are removed on the way out
    rounds = []
    for fault in options.fault:
        for backend in options.backend:
            for seed in range(options.seed, options.seed + options.rounds):
                rounds.append(one := play(fault, backend, seed))
                outcomes = dict(Counter(said["outcome"] for said in one.ranks))
                after = f", last error after {one.last_error:.1f} s" if one.last_error is not None else ""
                steps = sum(said["steps"] for said in one.ranks) // max(1, len(one.ranks))
                console.print(f"{fault}, {backend}, seed {seed}: {outcomes}, {steps} steps{after}")
                for why in one.wrong:
                    console.print(f"  {why}", style="red", markup=False)
    bad = [r for r in rounds if r.wrong]
    console.print(f"{len(rounds)} jobs, {len(bad)} bad")
    if options.write and not bad:
        options.write.write_text(table(rounds))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
