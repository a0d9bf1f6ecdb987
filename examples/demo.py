"""`make demo`: two programs that train on handwritten digits with two ranks under torchrun.

The first sums gradients with a communicator. Its result is compared with that of one rank, and the flight
recorder shows its operations. The second is an ordinary DistributedDataParallel script, which runs once on
torch's own Gloo and once, unchanged, on unicomm.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
# A run on torch's own Gloo is repeated when it fails: one of its threads may still release a tensor when
# Python ends, which ends the process by SIGABRT (pytorch/pytorch#190489, #179291).
ATTEMPTS = 6
console = Console()


def run(program: str, ranks: int, folder: Path, *arguments: str, **settings: str) -> dict[str, Any]:
    """Runs a program on `ranks` ranks under torchrun and returns its figures; the rings stay in `folder`."""
    folder.mkdir(mode=0o700)
    result = folder / "result.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [str(HERE / program), f"--result={result}", *arguments]
    settings |= {"UNICOMM_TRACE_DIR": str(folder), "UNICOMM_TRACE_KEEP": "always", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=os.environ | settings, timeout=600)
    figures: dict[str, Any] = json.loads(result.read_text())
    return figures


def report(checks: dict[str, bool]) -> bool:
    for what, good in checks.items():
        console.print(f"[{'green' if good else 'red'}]{'ok' if good else 'FAILED'}[/] {what}")
    return all(checks.values())


def largest_gap(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) / abs(x) for x, y in zip(a, b, strict=True))


def communicator(options: argparse.Namespace) -> bool:
    """Runs the first program and returns whether its checks passed."""
    console.rule("Gradients summed by a communicator: examples/digits.py")
    with tempfile.TemporaryDirectory(prefix="unicomm-demo-") as temp:
        arguments = (f"--epochs={options.epochs}", f"--backend={options.backend}")
        one = run("digits.py", 1, Path(temp, "one"), *arguments)
        many = run("digits.py", options.ranks, Path(temp, "many"), *arguments)
        shown = subprocess.run(
            [sys.executable, "-m", "unicomm", "trace", "show", str(Path(temp, "many")), "--last", "8"],
            check=False,
        ).returncode

    gap = largest_gap(one["losses"], many["losses"])
    table = Table(title="Training on handwritten digits")
    for heading in ("", "1 rank", f"{options.ranks} ranks"):
        table.add_column(heading, justify="right" if heading else "left")
    last = len(one["losses"]) - 1
    for epoch in sorted({0, last // 4, last // 2, last}):
        table.add_row(
            f"loss after epoch {epoch + 1}", f"{one['losses'][epoch]:.6f}", f"{many['losses'][epoch]:.6f}"
        )
    table.add_row("accuracy on the test images", f"{one['accuracy']:.1%}", f"{many['accuracy']:.1%}")
    table.add_row("seconds", f"{one['seconds']:.2f}", f"{many['seconds']:.2f}")
    share = many["communicating"] / many["seconds"]
    table.add_row("seconds of communication", "-", f"{many['communicating']:.2f} ({share:.0%})")
    console.print(table)

    return report(
        {
            "test accuracy is at least 95 %": many["accuracy"] >= 0.95,
            "all ranks have bit-identical weights": many["identical"],
            f"the loss curves agree (largest difference {gap:.1e}, allowed 1e-3)": gap <= 1e-3,
            "`unicomm trace show` succeeded": shown == 0,
        }
    )


def unchanged_program(options: argparse.Namespace) -> bool:
    """Runs the second program and returns whether its checks passed."""
    console.rule("An ordinary DistributedDataParallel script, unchanged: examples/ddp.py")
    switch = "TORCH_DISTRIBUTED_USE_TORCHCOMMS"
    with tempfile.TemporaryDirectory(prefix="unicomm-demo-") as temp:
        console.print("on torch's own Gloo:")
        for attempt in range(1, ATTEMPTS + 1):
            try:
                stock = run("ddp.py", options.ranks, Path(temp, f"stock{attempt}"), **{switch: "0"})
                break
            except subprocess.CalledProcessError:
                if attempt == ATTEMPTS:
                    raise
                console.print("[yellow]a rank on torch's own Gloo failed at its end; running it again[/]")
        console.print(f"with {switch}=1:")
        ours = run("ddp.py", options.ranks, Path(temp, "ours"), **{switch: "1"})
    gap = largest_gap(stock["losses"], ours["losses"])
    table = Table(title=f"{options.ranks} ranks, {stock['parameters'] / 1e6:.1f} million parameters")
    for heading in ("", "stock Gloo", "unicomm"):
        table.add_column(heading, justify="right" if heading else "left")
    for epoch, (a, b) in enumerate(zip(stock["losses"], ours["losses"], strict=True)):
        table.add_row(f"loss in epoch {epoch + 1}", f"{a:.6f}", f"{b:.6f}")
    table.add_row("accuracy on the test images", f"{stock['accuracy']:.1%}", f"{ours['accuracy']:.1%}")
    times = stock["milliseconds"], ours["milliseconds"]
    table.add_row("milliseconds per step (median)", f"{times[0]:.2f}", f"{times[1]:.2f}")
    console.print(table)
    console.print(f"time per step, relative to stock Gloo: {times[1] / times[0]:.2f}")
    return report(
        {
            "the first run used torch's process group": stock["group"] == "ProcessGroup",
            "the second run used unicomm": ours["group"] == "UnicommProcessGroup",
            "all ranks have bit-identical weights": stock["identical"] and ours["identical"],
            f"the loss curves are equal (largest difference {gap:.1e}, allowed 1e-5)": gap <= 1e-5,
        }
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20, help="epochs of the first program")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", default="shm", help="backend of the first program")
    options = parser.parse_args()
    good = [communicator(options), unchanged_program(options)]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
