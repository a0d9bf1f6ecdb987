"""A part of a merged trace: what Perfetto shows of it, as a picture for the documentation.

    torchrun --nproc-per-node 4 tests/profiler/programs/ddp.py FOLDER 2 0.05
    unicomm profile merge FOLDER/rank*.json -o merged.json
    python -m docs.pictures.merged_trace merged.json      # writes merged-trace.json
    make pictures                                         # draws it

(the first with TORCH_DISTRIBUTED_USE_TORCHCOMMS=1 and OMP_NUM_THREADS=1)
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

SHOWN = Path(__file__).resolve().with_name("merged-trace.json")
COLORS = {"waiting": "#f4c27a", "transfer": "#3a7d44", "operation": "#8fbf8f", "compute": "#9db4d6"}
HEIGHT = 0.38


def is_compute(e: dict[str, Any]) -> bool:
    return e.get("cat") == "cpu_op" and not e["name"].startswith(("unicomm::", "c10d::"))


def outermost(slices: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """(begin, length) of the slices that are in no other."""
    found: list[tuple[float, float]] = []
    for begin, length in sorted(slices, key=lambda s: (s[0], -s[1])):
        if not found or begin >= sum(found[-1]):
            found.append((begin, length))
    return found


def excerpt(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns what is drawn of a trace: the step in which a rank waited longest. Times are milliseconds.

    `ranks`: the name of each rank, and (begin, length) of its bars by the names of COLORS. `arrows`: the
    (time, row) of both ends. `label`: the time, the row and the name of the operation that was waited in.
    """
    slices = [e for e in events if e["ph"] == "X"]
    made = [e for e in slices if e.get("cat") == "unicomm" and "args" in e]
    worst = max(made, key=lambda e: e["args"]["waiting_us"])
    begin, end = worst["ts"] - 4_000, worst["ts"] + worst["dur"] + 9_000
    names = {e["pid"]: e["args"]["name"].split(" (")[0] for e in events if e["name"] == "process_name"}
    rows = {pid: row for row, pid in enumerate(sorted(names))}

    def ms(at: float) -> float:
        return round((at - begin) / 1000, 3)

    def bars(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
        return [(ms(b), round(d / 1000, 3)) for b, d in spans if b < end and b + d > begin]

    ranks = []
    for pid in rows:
        own = [e for e in slices if e["pid"] == pid]
        spans = {name: [(e["ts"], e["dur"]) for e in own if e["name"] == name] for name in COLORS}
        spans["compute"] = outermost([(e["ts"], e["dur"]) for e in own if is_compute(e)])
        spans["operation"] = [(e["ts"], e["dur"]) for e in made if e["pid"] == pid]
        ranks.append({"name": names[pid]} | {name: bars(found) for name, found in spans.items()})
    flows: dict[int, list[dict[str, Any]]] = {}
    for e in events:
        if e.get("cat") == "collective" and begin < e["ts"] < end:
            flows.setdefault(e["id"], []).append(e)
    arrows = []
    for steps in flows.values():
        steps.sort(key=lambda e: (e["ts"], "stf".index(e["ph"])))
        arrows += [[(ms(e["ts"]), rows[e["pid"]]) for e in pair] for pair in itertools.pairwise(steps)]
    label = (ms(worst["ts"] + worst["dur"] / 3), rows[worst["pid"]])
    name = f"{worst['name']} #{worst['args']['seq_num']}"
    return {"end": ms(end), "ranks": ranks, "arrows": arrows, "label": [*label, name]}


def draw(picture: Path) -> None:
    """Draws SHOWN."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = json.loads(SHOWN.read_text())
    figure, axes = pyplot.subplots(figsize=(11, 4.2))
    for row, rank in enumerate(shown["ranks"]):
        for kind in ("compute", "operation", "waiting", "transfer"):
            low = -row + (0 if kind == "compute" else HEIGHT)
            axes.broken_barh(rank[kind], (low, HEIGHT), facecolors=COLORS[kind], edgecolor="white", lw=0.4)
    arrow = {"arrowstyle": "-|>", "color": "#444444", "lw": 0.6, "shrinkA": 0, "shrinkB": 0}
    for ends in shown["arrows"]:
        start, stop = ((at, 1.5 * HEIGHT - row) for at, row in ends)
        axes.annotate("", xy=stop, xytext=start, arrowprops=arrow)
    at, row, name = shown["label"]
    axes.text(at, 1.5 * HEIGHT - row, name, fontsize=7, va="center")
    axes.set_yticks([HEIGHT - row for row in range(len(shown["ranks"]))], [r["name"] for r in shown["ranks"]])
    axes.set_xlim(0, shown["end"])
    axes.set_xlabel("milliseconds")
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=c) for c in COLORS.values()]
    axes.legend(handles, list(COLORS), loc="lower center", bbox_to_anchor=(0.5, 1.0), ncol=4, frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(picture, dpi=100, metadata={"Software": None})
    pyplot.close(figure)


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("trace", type=Path)
    events = json.loads(parser.parse_args().trace.read_text())["traceEvents"]
    SHOWN.write_text(json.dumps(excerpt(events)) + "\n")


if __name__ == "__main__":
    main()
