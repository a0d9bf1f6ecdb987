"""Draws a part of a merged trace: what Perfetto shows of it, as a picture for the documentation.

    torchrun --nproc-per-node 4 tests/profiler/programs/ddp.py FOLDER 2 0.05
    unicomm profile merge FOLDER/rank*.json -o merged.json
    python docs/pictures/merged_trace.py merged.json docs/pictures/merged-trace.png

(with TORCH_DISTRIBUTED_USE_TORCHCOMMS=1 and OMP_NUM_THREADS=1; needs matplotlib)
"""

import argparse
import itertools
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

COLORS = {"waiting": "#f4c27a", "transfer": "#3a7d44", "operation": "#8fbf8f", "compute": "#9db4d6"}
HEIGHT = 0.38


def is_compute(e: dict) -> bool:
    return e.get("cat") == "cpu_op" and not e["name"].startswith(("unicomm::", "c10d::"))


def outermost(slices: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """(begin, length) of the slices that are in no other."""
    found: list[tuple[float, float]] = []
    for begin, length in sorted(slices, key=lambda s: (s[0], -s[1])):
        if not found or begin >= sum(found[-1]):
            found.append((begin, length))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    events = json.loads(options.trace.read_text())["traceEvents"]
    ranks = sorted({e["pid"] for e in events})
    line = {pid: -float(at) for at, pid in enumerate(ranks)}
    slices = [e for e in events if e["ph"] == "X"]
    made = [e for e in slices if e.get("cat") == "unicomm" and "args" in e]
    # The step in which most was waited, from before its barrier to after its last operation.
    worst = max(made, key=lambda e: e["args"]["waiting_us"])
    begin, end = worst["ts"] - 4_000, worst["ts"] + worst["dur"] + 9_000

    figure, axes = pyplot.subplots(figsize=(11, 4.2))

    def bars(pid: int, spans: list[tuple[float, float]], color: str, low: float) -> None:
        shown = [((b - begin) / 1000, d / 1000) for b, d in spans if b < end and b + d > begin]
        axes.broken_barh(
            shown, (line[pid] + low, HEIGHT), facecolors=COLORS[color], edgecolor="white", lw=0.4
        )

    for pid in ranks:
        own = [e for e in slices if e["pid"] == pid]
        bars(pid, outermost([(e["ts"], e["dur"]) for e in own if is_compute(e)]), "compute", 0)
        bars(pid, [(e["ts"], e["dur"]) for e in made if e["pid"] == pid], "operation", HEIGHT)
        for part in ("waiting", "transfer"):
            bars(pid, [(e["ts"], e["dur"]) for e in own if e["name"] == part], part, HEIGHT)
    flows: dict[int, list[dict]] = {}
    for e in events:
        if e.get("cat") == "collective" and begin < e["ts"] < end:
            flows.setdefault(e["id"], []).append(e)
    for steps in flows.values():
        steps.sort(key=lambda e: (e["ts"], "stf".index(e["ph"])))
        for one, other in itertools.pairwise(steps):
            ends = [((e["ts"] - begin) / 1000, line[e["pid"]] + 1.5 * HEIGHT) for e in (one, other)]
            arrow = {"arrowstyle": "-|>", "color": "#444444", "lw": 0.6, "shrinkA": 0, "shrinkB": 0}
            axes.annotate("", xy=ends[1], xytext=ends[0], arrowprops=arrow)
    seq, name = worst["args"]["seq_num"], worst["name"]
    place = ((worst["ts"] - begin + worst["dur"] / 3) / 1000, line[worst["pid"]] + 1.5 * HEIGHT)
    axes.text(*place, f"{name} #{seq}", fontsize=7, va="center")
    names = {e["pid"]: e["args"]["name"].split(" (")[0] for e in events if e["name"] == "process_name"}
    axes.set_yticks([line[pid] + HEIGHT for pid in ranks], [names[pid] for pid in ranks])
    axes.set_xlim(0, (end - begin) / 1000)
    axes.set_xlabel("milliseconds")
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=c) for c in COLORS.values()]
    axes.legend(handles, list(COLORS), loc="lower center", bbox_to_anchor=(0.5, 1.0), ncol=4, frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(options.picture, dpi=100, metadata={"Software": None})


main()
