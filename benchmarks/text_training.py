"""A small language model trained in several ways: compressed gradients, and the same bits in every layout.

    python -m benchmarks.text_training losses --json docs/pictures/wire-losses.json    # then `make pictures`
    python -m benchmarks.text_training layouts

`losses` trains with float32, mxfp8 and int8, with and without error feedback, on 2 ranks of this host, whose
hooks encode within the host as they would between hosts. `layouts` trains with reproducible sums of
microbatches on 1, 2 and 4 ranks: shared memory, hosts over Gloo and UCX, MPI; and compares all weights.
`python -m tools.mpi_libraries` installs MPI.
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

from tools import mpi_libraries

ROOT = Path(__file__).parents[1]
CONTENDERS = (("float32", 1), ("mxfp8", 1), ("int8", 1), ("mxfp8", 0), ("int8", 0))
_HOSTS = {"hosts": "a,a,b,b"}
#: Name, ranks, backend, hints.
LAYOUTS: tuple[tuple[str, int, str, dict[str, str]], ...] = (
    ("1 rank", 1, "shm", {}),
    ("2 ranks, shm", 2, "shm", {}),
    ("4 ranks, shm", 4, "shm", {}),
    ("2 hosts of 2 ranks, TCP", 4, "auto", _HOSTS),
    ("2 hosts of 2 ranks, Gloo", 4, "auto", _HOSTS | {"between": "gloo"}),
    ("2 hosts of 2 ranks, UCX", 4, "auto", _HOSTS | {"between": "ucx"}),
    ("4 ranks, MPI", 4, "mpi", {}),
)


def train(ranks: int, mpi: bool, arguments: list[str]) -> list[dict[str, Any]]:
    """Runs text_rank.py, and returns what each rank found."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if mpi:
        library = mpi_libraries.choose()
        environment |= library.environment
        torchrun = [*library.command, "-n", str(ranks), sys.executable]
    with tempfile.TemporaryDirectory(prefix="unicomm-text-") as folder:
        result = Path(folder) / "found"
        command = [*torchrun, str(ROOT / "benchmarks" / "text_rank.py"), *arguments, f"--result={result}"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr[-4000:])
        return [json.loads(Path(f"{result}.{rank}").read_text()) for rank in range(ranks)]


def draw(found: dict[str, list[float]], path: Path) -> None:
    """Draws losses, each the mean of 20 steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (whole, end) = pyplot.subplots(1, 2, figsize=(10, 4), dpi=110)
    for name, losses in found.items():
        smooth = [sum(losses[i - 20 : i]) / 20 for i in range(20, len(losses) + 1)]
        style = "--" if "without" in name else "-"
        whole.plot(range(20, len(losses) + 1), smooth, style, label=name, linewidth=1)
        half = len(smooth) // 2
        end.plot(range(20 + half, len(losses) + 1), smooth[half:], style, linewidth=1)
    whole.set_ylabel("training loss, mean of 20 steps")
    for axes, title in ((whole, "all steps"), (end, "the second half")):
        axes.set_xlabel("step")
        axes.set_title(title)
        axes.grid(alpha=0.3)
    whole.legend()
    figure.tight_layout()
    figure.savefig(path)


def losses(options: argparse.Namespace) -> None:
    found: dict[str, list[float]] = {}
    console = Console()
    console.print("| gradients | last 50 steps | beside float32 | other text | beside float32 |")
    console.print("|---|---|---|---|---|")
    base: tuple[float, float] | None = None
    for wire, feedback in CONTENDERS:
        arguments = [f"--steps={options.steps}", f"--wire={wire}", f"--feedback={feedback}"]
        result = train(2, False, arguments)[0]
        name = wire if wire == "float32" else f"{wire}, {'with' if feedback else 'without'} feedback"
        found[name] = result["losses"]
        last = found[name][-50:]
        both = sum(last) / len(last), result["unseen"]
        base = base or both
        cells = [f"{x:.4f} | {x / b - 1:+.2%}" for x, b in zip(both, base, strict=True)]
        console.print(f"| {name} | {' | '.join(cells)} |", soft_wrap=True)
    if options.json:
        found = {name: [round(loss, 4) for loss in losses] for name, losses in found.items()}
        options.json.write_text(json.dumps(found) + "\n")


def layouts(options: argparse.Namespace) -> None:
    digests = set()
    for name, ranks, backend, hints in LAYOUTS:
        if options.only and backend not in options.only:
            continue
        arguments = [f"--steps={options.steps}", f"--reproducible={backend}", f"--hints={json.dumps(hints)}"]
        found = train(ranks, backend == "mpi", arguments)
        digests |= {one["digest"] for one in found}
        print(f"{name}: weights {found[0]['digest'][:16]}, loss {found[0]['losses'][-1]:.6f}", flush=True)
    if len(digests) > 1:
        raise SystemExit("the weights differ")
    print("the weights are the same, bit by bit")


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--steps", type=int, default=500)
    parts = parser.add_subparsers(required=True)
    part = parts.add_parser("losses")
    part.add_argument("--json", type=Path, help="the losses of all steps")
    part.set_defaults(run=losses)
    part = parts.add_parser("layouts")
    part.add_argument("--only", nargs="*", help="backends")
    part.set_defaults(run=layouts)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
