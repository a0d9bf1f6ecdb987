"""Runs small training programs of frameworks on stock Gloo and with the switch, and compares their losses."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.commands import torchrun
from tests.compat.outcomes import Log, Note, Outcome, environment

PLACES = ("stock", "auto", "gloo")
RANKS = 2
DEADLINE = 400.0  # seconds for one program; Ray alone takes a minute on two busy cores
GROUPS = {"stock": "ProcessGroup"}  # the class of the default group; with the switch it is:
OURS = "UnicommProcessGroup"
ABORTED = "terminate called without an active exception"  # stock Gloo's defect when Python ends
MARK = "RESULT "

BIN = Path(sys.executable).parent


@dataclass(frozen=True)
class Program:
    """A program of `programs/` and how it is started. `package` is the one whose version the table names."""

    name: str
    package: str
    file: str
    launch: Sequence[str | Path] = tuple(torchrun(RANKS))
    arguments: Sequence[str] = ()

    @property
    def command(self) -> list[str]:
        return [
            str(word)
            for word in (*self.launch, Path(__file__).parent / "programs" / self.file, *self.arguments)
        ]


ACCELERATE = (BIN / "accelerate", "launch", "--multi_gpu", "--num_processes=2", "--num_machines=1")
DEEPSPEED = (BIN / "deepspeed", "--num_accelerators=2", "--no_local_rank")

PROGRAMS = (
    Program(
        "accelerate",
        "accelerate",
        "accelerate_loop.py",
        (*ACCELERATE, "--mixed_precision=no", "--dynamo_backend=no"),
    ),
    Program("transformers Trainer", "transformers", "transformers_trainer.py"),
    Program("Lightning", "lightning", "lightning_fit.py"),
    *(
        Program(f"DeepSpeed ZeRO {stage}", "deepspeed", "deepspeed_zero.py", DEEPSPEED, (str(stage),))
        for stage in range(4)
    ),
    Program("torchrec", "torchrec", "torchrec_shards.py"),
    Program("torchmetrics", "torchmetrics", "torchmetrics_sync.py"),
    Program("distributed checkpoints (DCP)", "torch", "dcp_save_load.py"),
    Program("RPC", "torch", "rpc_beside.py"),
    Program("Ray Train", "ray", "ray_train.py", (sys.executable,)),
)


def run_program(program: Program, place: str) -> Outcome:
    """Runs a program once; on stock again if Gloo aborted a rank when Python ended."""
    began = time.monotonic()
    for _ in range(4 if place == "stock" else 1):
        code, stdout, stderr = _run(program.command, environment(place))
        if code == 0 or ABORTED not in stderr:
            break
    found: Outcome = {"place": place, "ranks": RANKS, "test": program.name, "outcome": "failed", "error": ""}
    found["seconds"] = round(time.monotonic() - began, 1)
    lines = [line for line in stdout.splitlines() if line.startswith(MARK)]
    if code != 0 or len(lines) != 1:
        why = f"exit code {code}" if code is not None else f"not ready after {DEADLINE:.0f} s"
        return found | {"error": f"{why}\n{stdout[-1000:]}\n{stderr[-5000:]}"}
    result = json.loads(lines[0].removeprefix(MARK))
    if result["group"] != GROUPS.get(place, OURS):
        return found | {"error": f"the default group is a {result['group']}"}
    return found | {"outcome": "passed", "losses": result["losses"], "weights": result["weights"]}


def _run(command: Sequence[str], env: dict[str, str]) -> tuple[int | None, str, str]:
    """Runs a command in a folder for what it leaves, and ends it with all its processes after DEADLINE.

    Returns its exit code, None if it was not ready, and what it printed.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        env = env | {
            **dict.fromkeys(("TMPDIR", "RAY_TMPDIR", "HF_HOME"), folder),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        out, err = Path(folder, "out"), Path(folder, "err")
        with out.open("w") as stdout, err.open("w") as stderr:
            process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
            code = None
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(DEADLINE)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return code, out.read_text(errors="replace"), err.read_text(errors="replace")


def compare(log: Log, programs: Sequence[Program], note: Note) -> None:
    """Runs what the log lacks. With the switch, passing means stock's losses and weights exactly."""
    for place in PLACES:
        missing = [p for p in programs if (place, RANKS, p.name) not in log.found]
        say = note(f"frameworks, {place}", len(missing))
        for program in missing:
            one = run_program(program, place)
            stock = log.found.get(("stock", RANKS, program.name), {})
            if place != "stock" and one["outcome"] == "passed" == stock.get("outcome"):
                one |= difference(one, stock)
            log.add(one)
            say(one)


def difference(one: Outcome, stock: Outcome) -> Outcome:
    """How a result differs from stock's: an outcome "failed" with the first difference, or nothing."""
    if len(one["losses"]) != len(stock["losses"]):
        return {
            "outcome": "failed",
            "error": f"{len(one['losses'])} losses, stock has {len(stock['losses'])}",
        }
    for index, (ours, theirs) in enumerate(zip(one["losses"], stock["losses"], strict=True)):
        if ours != theirs:
            return {"outcome": "failed", "error": f"loss {index} is {ours!r}, stock's is {theirs!r}"}
    if one["weights"] != stock["weights"]:
        return {"outcome": "failed", "error": "the losses are stock's, the weights at the end are not"}
    return {}
