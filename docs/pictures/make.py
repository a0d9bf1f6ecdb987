"""Makes the pictures of the documentation, and says which are older than what they show.

    python -m docs.pictures.make                      # makes all that are out of date: `make pictures`
    python -m docs.pictures.make trace-page.png       # makes one
    python -m docs.pictures.make --record             # first runs the job that hangs anew

| picture | shows | needs |
|---|---|---|
| trace-page.png, profile-page.png | pages of a simulated job and of generated traces | Chromium |
| hang.svg | hang.json: what torchrun and unicomm run printed of examples/hang.py | |
| benchmark.svg | benchmark.json, by benchmarks/cpu_collectives.py | matplotlib |
| creation-scale.png | creation-scale.json, by benchmarks/creation_scale.py | matplotlib |
| merged-trace.png | merged-trace.json, by merged_trace.py | matplotlib |
| wire-losses.png | wire-losses.json, by benchmarks/text_training.py | matplotlib |

made.json has a hash of what each picture showed when it was made. A test compares it with what it would
show now.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
MADE = HERE / "made.json"
HANG = HERE / "hang.json"
CREATION, LOSSES, TRACE = (
    HERE / f"{name}.json" for name in ("creation-scale", "wire-losses", "merged-trace")
)
BENCHMARK = HERE / "benchmark.json"
OURS = "unicomm, torch.distributed"
WITHIN = 120.0  # seconds for the job that hangs


# --- pages ------------------------------------------------------------------------------------------------


def trace_page() -> str:
    """The report of a job of four ranks, of which rank 2 leaves the loop before the others."""
    from unicomm.flight_recorder.analysis.analyze import analyze
    from unicomm.flight_recorder.corpus.fault_kinds import job_of, training
    from unicomm.flight_recorder.reports import report_html

    job = job_of(4)
    job.programs[2] = training(10)
    job.late_us = {1: 150.0}
    table = job.run().table()
    return report_html.page(analyze(table), table)


def profile_page() -> str:
    """The report of generated traces of four ranks; rank 2 is late once."""
    from benchmarks.profile_merge import generate
    from unicomm.profiler import figures_html, report

    with tempfile.TemporaryDirectory() as folder:
        return figures_html.page(report(generate(Path(folder), 4, 400, 0.2, late=2)))


def screenshot(page: str, picture: Path, width: int, height: int) -> None:
    """Takes a picture of a page in headless Chromium."""
    from tests.browser import Browser

    with tempfile.TemporaryDirectory() as folder, Browser(Path(folder, "profile")) as browser:
        file = Path(folder, "page.html")
        file.write_text(page)
        browser.look(width, height, "light")
        browser.open(file)
        picture.write_bytes(browser.picture(whole=False))


# --- the job that hangs -----------------------------------------------------------------------------------


def record_hang() -> None:
    """Runs examples/hang.py by torchrun and by `unicomm run`, and writes what both printed."""
    said = {}
    bin_ = Path(sys.executable).parent
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("UNICOMM_", "TORCH_DISTRIBUTED"))}
    with tempfile.TemporaryDirectory(prefix="j", dir="/tmp") as folder:
        Path(folder, "hang.py").write_text((ROOT / "examples" / "hang.py").read_text())
        for name, command in (("torchrun", [bin_ / "torchrun"]), ("unicomm run", [bin_ / "unicomm", "run"])):
            ran = subprocess.run(
                [*command, "--nproc-per-node", "2", "hang.py"],
                cwd=folder,
                env=kept | {"OMP_NUM_THREADS": "1", "COLUMNS": "100"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=WITHIN,
                check=False,
            )
            said[name] = without_places(ran.stdout, folder)
    HANG.write_text(json.dumps(said, indent=1, ensure_ascii=False) + "\n")


def without_places(text: str, folder: str) -> str:
    """The text without what differs from machine to machine: folders, host and process numbers."""
    lines = []
    for line in text.splitlines():
        short = line.replace(folder, "/job").replace(sys.prefix, "/venv").replace(f"{ROOT}/", "")
        short = short.replace(os.uname().nodename, "host0")
        short = re.sub(r"unicomm-\d+/run-[\w-]+", "unicomm-1000/run-...", short)
        short = re.sub(r"\b(pid:?|PID) \d+", r"\1 N", short)
        short = re.sub(r"^([WE]\d{4} [\d:.]+) \d+ ", r"\1 N ", short)
        if line.endswith("│"):  # in a box, which keeps its width
            short = short[:-1] + " " * (len(line) - len(short)) + "│"
        lines.append(short.rstrip())
    return "\n".join(lines) + "\n"


def excerpt(text: str) -> str:
    """What torchrun's output says of the hang: the failed rank's own lines, and the root cause."""
    lines = text.splitlines()
    own = [line for line in lines if "/torch/distributed/" not in line or "Error:" in line]
    first = next(n for n, line in enumerate(own) if "Error: " in line)
    cause = next(n for n, line in enumerate(own) if line.startswith("Root Cause"))
    kept = [line for line in own[: first + 1] if not re.match(r"\[rank0\]: +(return|work\.|\^)", line)]
    return "\n".join([*kept, f"... {len(lines) - len(kept) - len(own) + cause} more lines ...", *own[cause:]])


def draw_hang(picture: Path) -> None:
    """Draws both outputs, one above the other, as terminals."""
    from rich.console import Console, Group
    from rich.panel import Panel
    from rich.text import Text

    said = json.loads(HANG.read_text())
    verdict = said["unicomm run"].split("unicomm: what the flight recorder tells")[-1].split("\n", 1)[1]
    verdict = verdict.split("rings of this host")[0]
    console = Console(record=True, width=112, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(
        Group(
            Panel(
                Text(excerpt(said["torchrun"]).rstrip()),
                title="$ torchrun --nproc-per-node 2 hang.py",
                title_align="left",
            ),
            Panel(
                Text(verdict.strip()),
                title="$ unicomm run --nproc-per-node 2 hang.py",
                title_align="left",
                border_style="green",
            ),
        )
    )
    picture.write_text(console.export_svg(title="a job that hangs", clear=False, unique_id="hang"))


# --- the benchmark ----------------------------------------------------------------------------------------


def draw_benchmark(picture: Path) -> None:
    """Draws how many times as long Gloo takes, by operation and size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    data = json.loads(BENCHMARK.read_text())
    rows = [row for row in data["rows"] if row["operation"] != "barrier" and row["dtype"] == "float32"]
    sizes = list(dict.fromkeys(row["size"] for row in rows))
    operations = list(dict.fromkeys(row["operation"] for row in rows))
    figure, axes = pyplot.subplots(figsize=(9, 3.6), layout="constrained")
    width = 0.86 / len(operations)
    for i, operation in enumerate(operations):
        found = {
            row["size"]: row["seconds"]["Gloo"] / row["seconds"][OURS]
            for row in rows
            if row["operation"] == operation
        }
        bars = axes.bar(
            [sizes.index(size) + i * width for size in found], found.values(), width * 0.9, label=operation
        )
        axes.bar_label(bars, [f"{r:.0f}" if r >= 10 else f"{r:.1f}" for r in found.values()], fontsize=6)
    axes.axhline(1, color="#888888", lw=0.8)
    axes.set_yscale("log")
    axes.set_xticks([at + 0.43 - width / 2 for at in range(len(sizes))], [f"{size} a rank" for size in sizes])
    axes.set_ylabel("times as fast as Gloo")
    about = data["about"]
    axes.set_title(
        f"torch.distributed, 2 ranks on one host ({about['machine']}, {about['date']})", fontsize=9
    )
    axes.legend(ncols=6, fontsize=7, frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    matplotlib.rcParams["svg.hashsalt"] = "unicomm"
    figure.savefig(picture, metadata={"Date": None})
    pyplot.close(figure)


# --- drawn by others --------------------------------------------------------------------------------------


def draw_creation(picture: Path) -> None:
    from benchmarks.creation_scale import Costs, draw

    data = json.loads(CREATION.read_text())
    draw(picture, data["model"], Costs(**data["costs"]))


def draw_losses(picture: Path) -> None:
    from benchmarks.text_training import draw

    draw(json.loads(LOSSES.read_text()), picture)


def draw_merged_trace(picture: Path) -> None:
    from docs.pictures.merged_trace import draw

    draw(picture)


# --- all --------------------------------------------------------------------------------------------------


class Picture:
    """A picture: what it shows, as text, and how it is made."""

    def __init__(self, shows: Callable[[], str], make: Callable[[str, Path], None]) -> None:
        self.shows, self.make = shows, make

    def hash(self) -> str:
        """Returns a hash of what it shows now."""
        return hashlib.sha256(self.shows().encode()).hexdigest()


def _page(page: Callable[[], str], width: int, height: int) -> Picture:
    return Picture(page, lambda text, picture: screenshot(text, picture, width, height))


def _drawn(data: Path, draw: Callable[[Path], None], by: str = "") -> Picture:
    """A picture that `draw` makes of `data`; `by` is the module whose `draw` it calls."""

    def shows() -> str:
        drawing = importlib.import_module(by).draw if by else draw
        return data.read_text() + inspect.getsource(drawing)

    return Picture(shows, lambda _, picture: draw(picture))


PICTURES = {
    "trace-page.png": _page(trace_page, 1120, 955),
    "profile-page.png": _page(profile_page, 1120, 900),
    "hang.svg": _drawn(HANG, draw_hang),
    "benchmark.svg": _drawn(BENCHMARK, draw_benchmark),
    "creation-scale.png": _drawn(CREATION, draw_creation, by="benchmarks.creation_scale"),
    "merged-trace.png": _drawn(TRACE, draw_merged_trace, by="docs.pictures.merged_trace"),
    "wire-losses.png": _drawn(LOSSES, draw_losses, by="benchmarks.text_training"),
}


def made() -> dict[str, Any]:
    """Returns the hashes of what the pictures showed when they were made."""
    return dict(json.loads(MADE.read_text())) if MADE.exists() else {}


def main() -> None:
    """Makes the pictures that the command line names, or those that are out of date."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("names", nargs="*", choices=[[], *PICTURES], metavar="NAME")
    parser.add_argument("--record", action="store_true", help="run the job that hangs anew")
    options = parser.parse_args()
    if options.record:
        record_hang()
    hashes = made()
    for name in options.names or PICTURES:
        picture = PICTURES[name]
        if not options.names and hashes.get(name) == picture.hash():
            continue
        picture.make(picture.shows(), HERE / name)
        hashes[name] = picture.hash()
        MADE.write_text(json.dumps(hashes, indent=1) + "\n")
        print(f"made {name}")


if __name__ == "__main__":
    main()
