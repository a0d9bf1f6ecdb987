"""Programs that showed a defect before its repair, shrunk. Tests play them under several schedules.

found.jsonl has one in each line: what it showed, and what `conductor.py --shrink` has printed.
"""

from __future__ import annotations

import json
from pathlib import Path

from .program import Program


def _read() -> dict[str, Program]:
    lines = Path(__file__).with_suffix(".jsonl").read_text().splitlines()
    programs = [json.loads(line) for line in lines]
    return {program.pop("showed"): program for program in programs}


FOUND = _read()
