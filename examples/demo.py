"""`make demo`: trains on real handwritten digits with two ranks under torchrun, compares that with one rank,
and shows what the flight recorder saw."""

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
console = Console()


def run(ranks: int, epochs: int, backend: str, folder: Path) -> dict[str, Any]:
    """Trains on `ranks` ranks under torchrun; the rings stay in `folder`."""
    result = folder / "result.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [str(HERE / "digits.py"), f"--epochs={epochs}", f"--result={result}", f"--backend={backend}"]
    settings = {"UNICOMM_TRACE_DIR": str(folder), "UNICOMM_TRACE_KEEP": "always", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=os.environ | settings, timeout=600)
    figures: dict[str, Any] = json.loads(result.read_text())
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", default="shm")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="unicomm-demo-") as temp:
        one_folder, many_folder = Path(temp, "one"), Path(temp, "many")
        for folder in (one_folder, many_folder):
            folder.mkdir(mode=0o700)
        one = run(1, options.epochs, options.backend, one_folder)
        many = run(options.ranks, options.epochs, options.backend, many_folder)
        shown = subprocess.run(
            [sys.executable, "-m", "unicomm", "trace", "show", str(many_folder), "--last", "8"], check=False
        ).returncode

    gap = max(abs(a - b) / abs(a) for a, b in zip(one["losses"], many["losses"], strict=True))
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
    table.add_row("of which communicating", "-", f"{many['communicating']:.2f} ({share:.0%})")
    console.print(table)

    checks = {
        "test accuracy is at least 95 %": many["accuracy"] >= 0.95,
        "all ranks ended with bit-identical weights": many["identical"],
        f"the loss curves agree (largest difference {gap:.1e}, allowed 1e-3)": gap <= 1e-3,
        "the recorder's table could be shown": shown == 0,
    }
    for what, good in checks.items():
        console.print(f"[{'green' if good else 'red'}]{'ok' if good else 'FAILED'}[/] {what}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
