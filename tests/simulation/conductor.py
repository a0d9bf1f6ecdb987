"""Deterministic simulation of the protocols in Python: plays random programs and judges them.

    python -m tests.simulation.conductor --seeds 1000            seeds 0 to 999
    python -m tests.simulation.conductor --seed 17 --trace       one seed, with every step
    python -m tests.simulation.conductor --seed 17 --shrink      the shortest program that fails like it

scheduler.py          tasks, virtual time, which task runs next
primitives.py         threading, queue, time and secrets over the scheduler
network.py            socket and selectors
simulated_store.py    a store in a process that can be stopped or killed
simulated_library.py  a message library, under unicomm's own Gloo backend
installation.py       puts these into the modules under test
program.py            random programs and faults from a seed
player.py             plays a program
moved_data.py         the tensors of its operations, and what they have to become
judge.py              the properties that every run has
shrinking.py          shortens a failing program
found.py, found.jsonl  shrunk programs that showed a defect

docs/design/simulation-python.md tells why. Exit code 1 when a seed fails.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import sys
import time
from collections import Counter
from pathlib import Path

from .installation import installed
from .judge import is_known, unexplained, violations
from .player import Run, play
from .program import Program, program_of, to_text
from .shrinking import shrink

_COLLECT = 50  # programs between two collections of garbage


def kinds_of(found: list[str]) -> set[str]:
    """The names of the properties that are broken."""
    return {text.split(":")[0].split(" by ")[0].split(" of [")[0].split(" rank ")[0] for text in found}


def fails_like(program: Program, kinds: set[str]) -> bool:
    """Whether a program breaks one of these properties by something that is not known."""
    return bool(kinds & kinds_of(unexplained(violations(play(program)))))


def shrunk(program: Program, found: list[str], seconds: float = 60.0) -> Program:
    """The shortest program found that breaks the same properties; see `shrinking.shrink`."""
    kinds = kinds_of(found)
    return shrink(program, lambda candidate: fails_like(candidate, kinds), seconds)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests.simulation.conductor", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1000, help="how many seeds")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="this seed alone")
    parser.add_argument("--program", type=Path, help="a program as JSON, instead of that of a seed")
    parser.add_argument("--known", action="store_true", help="show also what judge.KNOWN excuses")
    parser.add_argument("--trace", action="store_true", help="print every step")
    parser.add_argument("--shrink", action="store_true", help="shorten each program that fails")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after this time")
    parser.add_argument("--most", type=int, default=20, help="failures that are printed")
    options = parser.parse_args(arguments)
    logging.getLogger("unicomm").addHandler(logging.NullHandler())
    logging.getLogger("unicomm").propagate = False
    if options.program is not None:
        programs = iter([(-1, json.loads(options.program.read_text()))])
    elif options.seed is not None:
        programs = iter([(options.seed, program_of(options.seed))])
    else:
        seeds = range(options.first, options.first + options.seeds)
        programs = ((seed, program_of(seed)) for seed in seeds)
    began, played, failed, totals = time.monotonic(), 0, 0, Counter[str]()
    cpu = time.process_time()
    gc.freeze()  # what is imported stays, and need not be looked at again
    with installed():
        for seed, program in programs:
            run = play(program, options.trace)
            found = violations(run)
            totals.update({f"known: {kind}": 1 for kind in kinds_of(list(filter(is_known, found)))})
            found = found if options.known else unexplained(found)
            played += 1
            totals.update(_figures(run))
            if options.trace and run.trace is not None:
                print(to_text(program), *run.trace, sep="\n")
            if found:
                failed += 1
                totals.update({f"broken: {kind}": 1 for kind in kinds_of(found)})
                if failed <= options.most:
                    _report(seed, program, found, options.shrink)
            if played % _COLLECT == 0:
                gc.collect()
            if time.monotonic() - began > options.seconds:
                break
    spent = time.monotonic() - began
    cpu = time.process_time() - cpu
    rate = f"{60 * played / spent:.0f} a minute, {60 * played / cpu:.0f} a minute of processor time"
    print(f"{played} programs in {spent:.1f} s ({rate}), {failed} failed", flush=True)
    print(", ".join(f"{name} {count}" for name, count in sorted(totals.items())))
    return 1 if failed else 0


def _figures(run: Run) -> dict[str, int]:
    return {
        "steps": run.steps,
        "virtual seconds": int(run.seconds),
        "operations": len(run.records),
        "errors": sum(record.error is not None for record in run.records),
        "killed": len(run.died),
        "stopped": len(run.stops),
    }


def _report(seed: int, program: Program, found: list[str], shorten: bool) -> None:
    print(f"seed {seed} fails:")
    for text in found[:4]:
        print(f"  {text}")
    if shorten:
        program = shrunk(program, found)
        print("shrunk to:", json.dumps(program), *violations(play(program))[:2], sep="\n")
    print(to_text(program), flush=True)


if __name__ == "__main__":
    sys.exit(main())
