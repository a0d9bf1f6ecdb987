"""Jobs of `unicomm run` with a fault, on one host by shared memory or Gloo, or on two hosts.

The two hosts are network namespaces of this machine, and find each other's rings through their hubs.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import ROOT
from tests.backends.hosts.namespace_job import PORT, Job
from tests.commands import clean_environment
from tests.processes.forked_interpreters import run
from tools import namespaces

PROGRAM = Path(__file__).with_name("program.py")
WITHIN = 100.0
MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")
PLACES = ("shm", "gloo", "hosts")
# What the sentence says; {rank} is the culprit, {line} the line of the fault, {last} that of the last
# operation.
FAULTS = {
    "raise": r"Rank {rank} raised ValueError: bad batch 7 in `load_batch`, \S*program\.py:{line}\.",
    "raise-everywhere": r"(Both|All \d) ranks raised KeyError: 'weights' in `train`, \S*program\.py:{line}\.",
    "raise-early": r"Rank {rank} raised RuntimeError: no such dataset at \S*program\.py:{line}\.",
    "exit": r"Rank {rank} called sys\.exit\(3\) in `load_batch`, \S*program\.py:{line}\.",
    "os-exit": r"Rank {rank} ended with exit code 5 after all_reduce #3 .*program\.py:{last}, and left no ",
    "crash": r"Rank {rank} crashed with SIGSEGV .*in `load_batch`, \S*program\.py:{line}\.",
    "kill": r"Rank {rank} was killed by SIGKILL after all_reduce #3 .*program\.py:{last}\.",
    "memory": r"Rank {rank} was killed because memory ran out \(SIGKILL\) after .* #3 .*program\.py:{last}\.",
    "terminate": r"Rank {rank} was ended by SIGTERM from outside in `load_batch`, \S*program\.py:{line}\.",
    "hang": r"Rank {rank} runs outside .* #4 .* It is in `load_batch`, \S*program\.py:{line}, sleeping\.",
}


@dataclass(frozen=True)
class Verdict:
    """What a job said in the end.

    Attributes:
        sentence: of the main finding.
        culprits: of the main finding, if this host has the report.
        root_cause: what torchrun prints as such, in one line; "" if it prints none.
        output: all that the launcher of the first host printed.
    """

    sentence: str
    culprits: list[int]
    root_cause: str
    output: str


def line_of(mark: str) -> int:
    """The number of the line of the program that ends with a comment."""
    lines = PROGRAM.read_text().splitlines()
    (found,) = [n for n, line in enumerate(lines, 1) if line.endswith(f"# {mark}")]
    return found


def why_not(fault: str, place: str) -> str:
    """The reason why a fault cannot be made here, "" if it can."""
    if place == "hosts" and (reason := namespaces.why_not()):
        return f"no namespaces: {reason}"
    if fault == "memory" and not os.access(MEMORY_GROUPS, os.W_OK):
        return "needs control groups of version 1 for memory, and the right to make some"
    return ""


def expected(fault: str, place: str) -> re.Pattern[str]:
    """What the sentence of the verdict must match."""
    marked = line_of(f"fault: {fault}") if f"# fault: {fault}\n" in PROGRAM.read_text() else 0
    return re.compile(
        FAULTS[fault].format(rank=culprit(place), line=marked, last=line_of("the last operation"))
    )


def culprit(place: str) -> int:
    return 2 if place == "hosts" else 1  # of the second host


def run_fault(fault: str, place: str, folder: Path, hub_after: float = 0.0) -> Verdict:
    """Runs the program with a fault to its end, and returns the verdict.

    `hub_after`: seconds for which the start of the second host's hub takes longer.
    """
    with _groups_removed():
        if place == "hosts":
            return _on_two_hosts(fault, folder, hub_after)
        file = folder / "verdict.json"
        options = ("--nproc-per-node=2", "--hub-port=0", f"--backend={place}", f"--verdict-file={file}")
        command = [sys.executable, "-m", "unicomm", "run", *options, PROGRAM, fault, culprit(place)]
        env = clean_environment() | {"UNICOMM_TRACE_DIR": str(folder), "PYTHONPATH": str(ROOT)}
        done = run(command, within=WITHIN, env=env)
        return _verdict(file, done.stderr)


def run_and_analyze(
    command: list[Any], fault: str, folder: Path, more: Mapping[str, str] | None = None
) -> str:
    """Runs the program by a launcher other than ours, and returns the sentence of `trace analyze`."""
    env = clean_environment() | {"UNICOMM_TRACE_DIR": str(folder), "PYTHONPATH": str(ROOT)} | (more or {})
    env["TORCH_DISTRIBUTED_USE_TORCHCOMMS"] = "1"
    run([*command, PROGRAM, fault, 1], within=WITHIN, env=env)
    done = run([sys.executable, "-m", "unicomm", "trace", "analyze", folder, "--json"], env=env)
    return str(json.loads(done.stdout)["sentence"])


SLOW_HUB = """
import sys, time
if "unicomm.launch.hub.server" in sys.orig_argv:
    time.sleep({seconds})
"""


def _on_two_hosts(fault: str, folder: Path, hub_after: float) -> Verdict:
    """The culprit is on the second host; the verdict is that which the first one prints."""
    (slow := folder / "slow").mkdir()
    (slow / "sitecustomize.py").write_text(SLOW_HUB.format(seconds=hub_after))
    files = [folder / f"verdict{host}.json" for host in (0, 1)]
    with namespaces.Namespaces(2) as hosts, Job(hosts, folder) as job:
        for host, file in enumerate(files):
            endpoint = f"--rdzv-endpoint={hosts.address(0)}:{PORT}"
            options = ("--rdzv-backend=c10d", endpoint, "--nnodes=2", "--nproc-per-node=2")
            program = (PROGRAM, fault, culprit("hosts"))
            command = ("-m", "unicomm", "run", *options, f"--verdict-file={file}", *program)
            job.start(host, *command, **({"PYTHONPATH": slow} if host == 1 else {}))
        for process in job.processes:
            process.wait()
        return _verdict(files[0], job._log(0).read_text())


def _verdict(file: Path, output: str) -> Verdict:
    data: dict[str, Any] = json.loads(file.read_text())
    report, rings = data["report"], data["rings"]
    sentence = report["sentence"] if report else rings["sentence"] if rings else ""
    return Verdict(sentence, report["culprits"] if report else [], _root_cause(output), output)


def _root_cause(output: str) -> str:
    _, found, block = output.partition("Root Cause (first observed failure):")
    if not found:
        return ""
    said = dict(re.findall(r"^\s+(rank|exitcode|traceback)\s*: (.*)$", block, re.MULTILINE)[:3])
    rank = said.get("rank", "?").split()[0]
    code = re.sub(r" \(pid: \d+\)", "", said.get("exitcode", "?"))
    why = re.sub(r" by PID \d+", "", said.get("traceback", ""))
    said_so = f"rank {rank}, exitcode {code}" + ("" if why.startswith("To enable") else f", {why}")
    return " ".join(said_so.replace(" ,", ",").split())


@contextlib.contextmanager
def _groups_removed() -> Iterator[None]:
    """Removes the control groups that a job has made."""
    before = set(MEMORY_GROUPS.glob("unicomm-test-*"))
    try:
        yield
    finally:
        for group in set(MEMORY_GROUPS.glob("unicomm-test-*")) - before:
            with contextlib.suppress(OSError):
                group.rmdir()
