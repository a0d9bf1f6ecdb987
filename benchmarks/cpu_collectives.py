"""CPU collectives of one host: unicomm beside Gloo and, where their wheels are installed, three MPIs.

    python -m benchmarks.cpu_collectives                       # 2 ranks, some sizes: some minutes
    python -m benchmarks.cpu_collectives --full --plots build  # 2, 4 and 8 ranks, all sizes and types
    python -m benchmarks.cpu_collectives --foreign-load        # also while each core has a busy process
    python -m tools.mpi_libraries                    # installs the MPI wheels under build/mpi

Each contender has processes of its own, which sleep until it is their turn. The contenders are measured in
turn, repetition by repetition, so that other load on the machine affects all of them. Results are checked.
The recorder and the signature check of unicomm are on. A figure is the median over the repetitions of the
slowest rank's time for one call; ratios are taken repetition by repetition. The floor is what the machine
allows (benchmarks/floors.py). Compare ratios, not absolute figures. "its memory" is
unicomm with tensors of `unicomm.empty`. The last figure is the CPU time that a rank uses while it waits a
second for another rank.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks import floors
from tools.mpi_libraries import Library, find
from unicomm import _core
from unicomm.launch.doctor.report import cpu_info

HERE = Path(__file__).parent
OPERATIONS = (
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier", "ping_pong"),
)
SIZES = {"8 B": 8, "1 KiB": 1 << 10, "64 KiB": 1 << 16, "1 MiB": 1 << 20, "16 MiB": 1 << 24}
MORE_SIZES = {"16 KiB": 1 << 14, "256 KiB": 1 << 18, "4 MiB": 1 << 22, "128 MiB": 1 << 27}
OURS = "unicomm"
_TURN, _MOST_CALLS = 0.04, 2000  # seconds of calls in one turn
console = Console(width=None if sys.stdout.isatty() else 130)


class Group:
    """The processes of a group of ranks, which hold one contender or several."""

    def __init__(
        self,
        name: str,
        command: list[str],
        ranks: int,
        env: dict[str, str],
        folder: str,
        program: str = "cpu_rank.py",
    ) -> None:
        self.name = name
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path = f"{folder}/{name.replace(' ', '-')}"
        self._listener.bind(path)
        self._listener.listen(ranks)
        self._listener.settimeout(60)
        self._output = open(f"{path}.log", "w+")  # noqa: SIM115 (closed by end)
        self._process = subprocess.Popen(
            [*command, str(HERE / program), name],
            env=os.environ | env | {"BENCH_SOCKET": path, "OMP_NUM_THREADS": "1"},
            stdout=self._output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
        self._links: list[Any] = []
        self.contenders: list[str] = []
        try:
            for _ in range(ranks):
                link, _ = self._listener.accept()
                link.settimeout(120)
                self._links.append(link.makefile("rw"))
                self.contenders = json.loads(self._links[-1].readline())["contenders"]
        except BaseException:
            self.end()
            raise

    def tell(self, **command: Any) -> list[dict[str, Any]]:
        for link in self._links:
            link.write(json.dumps(command) + "\n")
            link.flush()
        if command["do"] == "end":
            return []
        try:
            return [json.loads(link.readline()) for link in self._links]
        except TimeoutError as error:
            what = " ".join(f"{name}={value}" for name, value in command.items())
            raise TimeoutError(f"{' or '.join(self.contenders)} did not answer in time: {what}") from error

    def log(self) -> str:
        self._output.seek(0)
        return self._output.read()[-2000:]

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.tell(do="end")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listener.close()
        self._output.close()


def mpi_groups(
    command_of: Callable[[Library], list[str]],
    ranks: int,
    env: dict[str, str],
    folder: str,
    program: str = "cpu_rank.py",
) -> Iterator[Group]:
    """Starts the MPI libraries that are installed, one after the other; names those that are left out.

    `command_of`: the command that starts the ranks of a library, before Python and the program.
    """
    libraries, missing = find()
    for line in missing:
        console.print(f"without {line}", style="dim", highlight=False)
    for library in libraries:
        command = [*command_of(library), sys.executable]
        try:
            yield Group(library.name, command, ranks, library.environment | env, folder, program)
        except (OSError, ValueError) as error:
            console.print(f"without {library.name}: it did not start ({error!r})", style="dim")


@contextlib.contextmanager
def groups(ranks: int, program: str = "cpu_rank.py") -> Iterator[list[Group]]:
    """All contenders, started; those that do not start are named and left out."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    started: list[Group] = []
    with tempfile.TemporaryDirectory(prefix="unicomm-bench-") as folder:
        try:
            started.append(Group("torch", torchrun, ranks, {}, folder, program))
            started.extend(
                mpi_groups(lambda library: [*library.command, "-n", str(ranks)], ranks, {}, folder, program)
            )
            yield started
        finally:
            for group in started:
                group.end()


def calls_of_a_turn(group: Group) -> int:
    """Returns how many calls take about `_TURN` seconds.

    It times more calls each time until they take half of that, since the first ones after a pause are slow.
    """
    times = 3
    while True:
        seconds = max(said["seconds"] for said in group.tell(do="time", times=times))
        if times * seconds > _TURN / 2 or times == _MOST_CALLS:
            return max(3, min(_MOST_CALLS, int(_TURN / seconds)))
        times = min(_MOST_CALLS, 4 * times)


def measure(started: list[Group], case: dict[str, Any], repetitions: int) -> dict[str, list[float]]:
    """Seconds of one call of each contender that can, repetition by repetition."""
    samples: dict[str, list[float]] = {}
    times: dict[str, int] = {}
    able: list[tuple[Group, str]] = []
    for group in started:
        for contender in group.contenders:
            if group.tell(do="prepare", contender=contender, **case)[0]["able"]:
                able.append((group, contender))
                times[contender] = calls_of_a_turn(group)
                samples[contender] = []
    for _ in range(repetitions):
        for group, contender in able:
            if len(group.contenders) > 1:
                group.tell(do="prepare", contender=contender, **case)
            said = group.tell(do="time", times=times[contender])
            samples[contender].append(max(rank["seconds"] for rank in said))
    return samples


class ForeignLoad:
    """A process for each core that never rests, stopped but while it is wanted."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", "while True: pass"]
        self._processes = [subprocess.Popen(command) for _ in range(os.cpu_count() or 1)]
        self.pause()

    def pause(self) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def slowdowns(quiet: dict[str, list[float]], busy: dict[str, list[float]]) -> dict[str, float]:
    return {n: statistics.median(busy[n]) / statistics.median(quiet[n]) for n in quiet}


def waiting(started: list[Group], seconds: float = 1.0) -> dict[str, float]:
    """CPU seconds of the rank that uses most of them while the last one is late by `seconds`."""
    used = {}
    for group in started:
        for contender in group.contenders:
            group.tell(do="prepare", contender=contender, operation="barrier", dtype="float32", bytes=4)
            said = group.tell(do="wait", seconds=seconds)
            used[contender] = max(one["seconds"] for one in said if not one["late"])
    return used


def row_of(case: dict[str, Any], ranks: int, size: str, samples: dict[str, list[float]]) -> dict[str, Any]:
    medians = {name: statistics.median(values) for name, values in samples.items()}
    peers = [name for name in samples if not name.startswith(OURS)]
    best = min(peers, key=lambda name: medians[name])
    ratios = [min(samples[p][i] for p in peers) / ours for i, ours in enumerate(samples[OURS])]
    return {**case, "ranks": ranks, "size": size, "seconds": medians, "best_peer": best,
            "best_peer_over_unicomm": statistics.median(ratios)}  # fmt: skip


def about() -> dict[str, Any]:
    """When and where the figures were made."""
    processor = f"{cpu_info('model name') or 'unknown processor'} ({_core.fold_isa()})"
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.system()} {platform.machine()}, {processor}, {os.cpu_count()} cores",
        "load": [round(load, 2) for load in os.getloadavg()],
        "torch": version("torch"),
        "unicomm": version("unicomm"),
        "python": platform.python_version(),
    }


def texts_of(row: dict[str, Any], names: list[str]) -> tuple[str, list[str], str, str]:
    """A table's row: operation, microseconds of the contenders and of the floor, unicomm over the floor."""
    what = row["operation"] + ("" if row["dtype"] == "float32" else f" {row['dtype']}")
    times = [f"{row['seconds'][n] * 1e6:,.1f}" if n in row["seconds"] else "-" for n in names]
    least = row.get("floor")
    if not least:
        return what, times, "-", "-"
    return what, times, f"{least * 1e6:,.1f}", f"{row['seconds'][OURS] / least:.1f}"


def show(rows: list[dict[str, Any]], ranks: int) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row["seconds"]))
    table = Table(title=f"{ranks} ranks on {os.cpu_count()} cores, medians in microseconds")
    table.add_column("operation")
    table.add_column("size", justify="right")
    for name in [*names, "floor", "best peer / unicomm", "unicomm / floor"]:
        table.add_column(name, justify="right")
    for row in rows:
        what, times, least, above = texts_of(row, names)
        ratio = row["best_peer_over_unicomm"]
        colour = "green" if ratio >= 1 else "red"
        table.add_row(what, row["size"], *times, least, f"[{colour}]{ratio:.2f} x[/]", above)
    console.print(table)


def show_slowdowns(rows: list[dict[str, Any]], ranks: int) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row["slowdown"]))
    table = Table(title=f"{ranks} ranks: times as long while each core has a busy process")
    table.add_column("operation")
    table.add_column("size", justify="right")
    for name in [*names, "unicomm / Gloo"]:
        table.add_column(name, justify="right")
    for row in rows:
        slower = row["slowdown"]
        cells = [f"{slower[n]:,.1f}" if n in slower else "-" for n in names]
        table.add_row(
            f"{row['operation']} {row['dtype']}", row["size"], *cells, f"{slower[OURS] / slower['Gloo']:.2f}"
        )
    console.print(table)


def plot(rows: list[dict[str, Any]], folder: Path) -> list[Path]:
    """One picture for each operation and number of ranks: time over size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    written = []
    keys = dict.fromkeys(
        (r["ranks"], r["operation"], r["dtype"]) for r in rows if r["operation"] != "barrier"
    )
    for ranks, operation, dtype in keys:
        mine = [r for r in rows if (r["ranks"], r["operation"], r["dtype"]) == (ranks, operation, dtype)]
        figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
        for name in dict.fromkeys(n for r in mine for n in r["seconds"]):
            points = [(r["bytes"], r["seconds"][name] * 1e6) for r in mine if name in r["seconds"]]
            axes.loglog(*zip(*points, strict=True), marker="o", label=name, lw=2.5 if name == OURS else 1)
        axes.set(xlabel="bytes of a rank", ylabel="microseconds", title=f"{operation} {dtype}, {ranks} ranks")
        axes.grid(True, which="major", alpha=0.3)
        axes.legend()
        path = folder / f"{operation}-{dtype}-{ranks}.png"
        figure.savefig(path, dpi=120)
        pyplot.close(figure)
        written.append(path)
    return written


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--ranks", type=int, nargs="+", default=None, help="default: 2; with --full 2 4 8")
    parser.add_argument("--repetitions", type=int, default=7, help="turns of each contender (default: 7)")
    parser.add_argument("--operations", nargs="+", default=list(OPERATIONS), choices=OPERATIONS)
    parser.add_argument("--sizes", type=int, nargs="+", help="bytes of a rank; default: 8 B to 16 MiB")
    parser.add_argument("--foreign-load", action="store_true", help="also how much a busy machine slows each")
    parser.add_argument("--full", action="store_true", help="all sizes to 128 MiB and all element types")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    parser.add_argument("--plots", type=Path, help="folder for pictures (needs matplotlib)")
    options = parser.parse_args()
    sizes = dict(sorted((SIZES | (MORE_SIZES if options.full else {})).items(), key=lambda item: item[1]))
    if options.sizes:
        sizes = {next((k for k, v in sizes.items() if v == n), f"{n} B"): n for n in options.sizes}
    cases = []
    for operation in options.operations:
        types = ["float32", "bfloat16", "float16", "int32"] if operation == "all_reduce" else ["float32"]
        if not options.full:
            types = types[:2]
        for dtype in types:
            for label, n in sizes.items():
                if operation != "barrier" or n == min(sizes.values()):
                    cases.append(({"operation": operation, "dtype": dtype, "bytes": n}, label))
    at = floors.machine()
    if at:
        console.print(f"floor: a flag there and back {at['flag']:.2f} us", highlight=False)
        for n, what in at.items():
            if n != "flag":
                console.print(
                    f"floor: {int(n):,} bytes: copied on both cores {what['copy']:.1f} us, exchanged"
                    f" {what['exchange']:.1f}, with streaming stores {what['streamed']:.1f}",
                    highlight=False,
                )
    rows: list[dict[str, Any]] = []
    waited: dict[int, dict[str, float]] = {}
    load = ForeignLoad() if options.foreign_load else None
    for ranks in options.ranks or ([2, 4, 8] if options.full else [2]):
        with groups(ranks) as started:
            columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
            with Progress(*columns, transient=True, console=console) as progress:
                task = progress.add_task("", total=len(cases))
                for case, label in cases:
                    what = f"{ranks} ranks, {case['operation']} {case['dtype']} {label}"
                    progress.update(task, description=what)
                    quiet = measure(started, case, options.repetitions)
                    rows.append(row_of(case, ranks, label, quiet))
                    if at:
                        which = case["operation"], case["bytes"], ranks, os.cpu_count() or 1
                        rows[-1]["floor"] = floors.floor(*which, at)
                    if load:
                        load.resume()
                        busy = measure(started, case, options.repetitions)
                        load.pause()
                        rows[-1]["slowdown"] = slowdowns(quiet, busy)
                    progress.advance(task)
            waited[ranks] = waiting(started)
        mine = [row for row in rows if row["ranks"] == ranks]
        show(mine, ranks)
        if load:
            show_slowdowns(mine, ranks)
        console.print(f"{ranks} ranks, CPU time of a rank that waits a second for another:")
        for name, seconds in waited[ranks].items():
            console.print(f"  {name:28} {seconds * 1e3:7.1f} ms", highlight=False)
    if load:
        load.end()
    if options.json:
        figures = {"about": about(), "floor": at, "rows": rows, "waiting": waited}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    if options.plots:
        options.plots.mkdir(parents=True, exist_ok=True)
        for path in plot(rows, options.plots):
            console.print(f"wrote {path}")


if __name__ == "__main__":
    main()
