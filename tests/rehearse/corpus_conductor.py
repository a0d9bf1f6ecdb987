"""`make rehearsals`: rehearses the corpus, runs some of it for real, and writes the table.

python -m tests.rehearse.corpus_conductor                          # all programs as 8 ranks
python -m tests.rehearse.corpus_conductor --ranks 8 32 --some 64   # every eighth program as 64 ranks as well
python -m tests.rehearse.corpus_conductor --real                   # and ten faulty ones for real, as 4 ranks
python -m tests.rehearse.corpus_conductor --write                  # writes the table of docs/rehearse.md
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from rich.console import Console

from tests import ROOT
from tests.processes.forked_interpreters import run
from tests.rehearse.corpus_programs import Expected, programs, rehearsed, wrong

PAGE = ROOT / "docs/rehearse.md"
_BEGIN, _END = "<!-- corpus: begin -->\n", "<!-- corpus: end -->\n"
_EVERY = 8

#: Faulty programs that hang or fail for real on 4 ranks over shared memory.
REAL = [
    *("async_waits_across_groups", "dcp_save_on_rank_zero", "ddp_metric_on_rank_zero", "ddp_one_batch_more"),
    *("ddp_uneven_batches", "fsdp_evaluation_on_rank_zero", "fsdp_full_state_on_rank_zero"),
    *("groups_rows_and_columns", "moe_counts_not_exchanged", "objects_gathered_by_one"),
    *("pp_crossed_sends", "pp_last_gradient_forgotten", "tp_gather_before_reduce"),
    *("fsdp_evaluation_between_steps", "groups_metric_by_the_common_function"),
]


def verdict_of_real_run(program: Expected) -> str:
    """Runs a program on 4 ranks. Returns the main finding's verdict, "" if the job has succeeded."""
    env = {**os.environ, "UNICOMM_BACKEND": "shm", "TORCHCOMM_TIMEOUT_SECONDS": "20"}
    with tempfile.TemporaryDirectory(prefix="unicomm-corpus-") as folder:
        told = Path(folder) / "verdict.json"
        command = [sys.executable, "-m", "unicomm", "run", "--nproc-per-node", 4, "--verdict-file", told]
        done = run([*command, program.path], env=env)
        if done.returncode == 0:
            return ""
        return str(json.loads(told.read_text())["report"]["verdict"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", nargs="*", type=int, default=[8], help="sizes for all programs")
    parser.add_argument("--some", nargs="*", type=int, default=[], help="sizes for every eighth program")
    parser.add_argument("--real", action="store_true", help="run some faulty programs for real, too")
    parser.add_argument("--write", action="store_true", help="write the table")
    options = parser.parse_args()
    console = Console()
    everything = programs()
    results: list[tuple[Expected, int, str]] = []
    for ranks, chosen in [(n, everything) for n in options.ranks] + [
        (n, everything[::_EVERY]) for n in options.some
    ]:
        for program in chosen:
            why = wrong(program, rehearsed(program, ranks), ranks)
            results.append((program, ranks, why))
            console.print(f"{'WRONG' if why else 'ok   '} {program.name} as {ranks}: {why}", soft_wrap=True)
    missed = sum(bool(why) for _, _, why in results)
    real = [
        (program, verdict_of_real_run(program))
        for program in everything
        if program.name in REAL * options.real
    ]
    for program, verdict in real:
        missed += not verdict
        word = "ok   " if verdict in program.verdicts else "OTHER" if verdict else "WRONG"
        console.print(f"{word} {program.name} for real: {verdict or 'the job has succeeded'}", soft_wrap=True)
    table = _table(results, real)
    console.print(table, markup=False)
    if options.write:
        text = PAGE.read_text()
        head, _, rest = text.partition(_BEGIN)
        PAGE.write_text(head + _BEGIN + table + _END + rest.partition(_END)[2])
    return 1 if missed else 0


def _table(results: list[tuple[Expected, int, str]], real: list[tuple[Expected, str]]) -> str:
    """Returns the table: for each kind, the faults that were named and the findings on correct programs."""
    by_kind: dict[str, list[tuple[Expected, str]]] = defaultdict(list)
    for program, _, why in results:
        by_kind[program.kind].append((program, why))
    lines = [
        "| programs | faulty | named | recall | correct | with a finding | precision |",
        f"|{'---|' * 7}",
    ]
    for kind, found in [
        *sorted(by_kind.items()),
        ("all", [each for some in by_kind.values() for each in some]),
    ]:
        faulty = [(program, why) for program, why in found if not program.good]
        good = [(program, why) for program, why in found if program.good]
        count = [len({program.name for program, _ in some}) for some in (faulty, good)]
        named, false = sum(not why for _, why in faulty), sum(bool(why) for _, why in good)
        recall, precision = _share(named, len(faulty)), _share(named, named + false)
        cells = [kind, count[0], f"{named} of {len(faulty)}", recall]
        cells += [count[1], f"{false} of {len(good)}", precision]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    sizes = ", ".join(f"{n} ranks" for n in sorted({ranks for _, ranks, _ in results}))
    lines += ["", f"Rehearsed as {sizes}; each rehearsal counts."]
    if real:
        failed = [(program, verdict) for program, verdict in real if verdict]
        other = [f"{p.name} ({verdict})" for p, verdict in failed if verdict not in p.verdicts]
        said = f"{len(failed)} of {len(real)} faulty programs that ran for real on 4 ranks failed"
        said += f", {len(failed) - len(other)} of them with the verdict of the rehearsal"
        lines += ["", said + (f". The others: {', '.join(other)}." if other else ".")]
    return "\n".join(lines) + "\n"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.2f}" if whole else "-"


if __name__ == "__main__":
    sys.exit(main())
