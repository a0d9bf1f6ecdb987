"""`make faults`: each fault on each place, and the table of docs/trace/reading.md.

python -m tests.faults.conductor                       # 30 jobs; prints each verdict
python -m tests.faults.conductor --fault hang --place gloo
python -m tests.faults.conductor --write               # writes the table as well
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from tests import ROOT

from .faulty_runs import FAULTS, PLACES, Verdict, expected, run_fault, why_not

PAGE = ROOT / "docs/trace/reading.md"
_BEGIN, _END = "<!-- faults: begin -->\n", "<!-- faults: end -->\n"
_NAMES = {
    "raise": "an exception",
    "raise-everywhere": "the same exception on all ranks",
    "raise-early": "an exception before the first communicator",
    "exit": "`sys.exit(3)`",
    "os-exit": "`os._exit(5)`",
    "crash": "a segmentation fault",
    "kill": "SIGKILL",
    "memory": "the out-of-memory killer",
    "terminate": "SIGTERM to one rank",
    "hang": "a hang; the others time out",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--fault", nargs="*", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument("--place", nargs="*", choices=PLACES, default=list(PLACES))
    parser.add_argument("--write", action="store_true", help="write the table, if all faults ran")
    options = parser.parse_args()
    console, wrong, rows = Console(), 0, []
    for fault in options.fault:
        for place in options.place:
            if reason := why_not(fault, place):
                console.print(f"{fault} on {place}: left out, {reason}", style="yellow")
                continue
            with tempfile.TemporaryDirectory(prefix="unicomm-faults-") as folder:
                try:
                    verdict = run_fault(fault, place, Path(folder))
                except (OSError, subprocess.TimeoutExpired) as error:
                    verdict = Verdict("", [], "", str(error))
            good = expected(fault, place).match(verdict.sentence) is not None
            wrong += not good
            console.print(
                f"{'ok   ' if good else 'WRONG'} {fault} on {place}: {verdict.sentence}", soft_wrap=True
            )
            if not good:
                console.print(verdict.output[-3000:], soft_wrap=True, markup=False)
            rows.append((fault, place, verdict))
    console.print(f"{len(rows) - wrong} of {len(rows)} verdicts are right")
    if options.write and len({fault for fault, _, _ in rows}) == len(FAULTS):
        write([row for row in rows if row[1] == "shm"])
    return 1 if wrong else 0


def write(rows: list[tuple[str, str, Verdict]]) -> None:
    """Writes the table between its marks."""
    lines = ["| fault of rank 1 | torchrun's Root Cause | our verdict |", "|---|---|---|"]
    for fault, _, verdict in rows:
        sentence = re.sub(r"(?:[\w.-]*/)+program\.py", "train.py", verdict.sentence).replace("|", "\\|")
        lines.append(f"| {_NAMES[fault]} | {verdict.root_cause or 'nothing'} | {sentence} |")
    text = PAGE.read_text()
    head, _, rest = text.partition(_BEGIN)
    tail = rest.partition(_END)[2]
    PAGE.write_text(head + _BEGIN + "\n".join(lines) + "\n" + _END + tail)


if __name__ == "__main__":
    sys.exit(main())
