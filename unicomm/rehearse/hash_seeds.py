"""Ranks with other hash seeds, for programs that may depend on them.

The order of a set of strings, and what `hash` says of a string, follow from the seed of the interpreter. Each
rank of a real job has its own seed, unless PYTHONHASHSEED is set; ranks that are forked share their parent's.
So the last ranks of a program that has sets, or calls `hash`, run in interpreters of their own. These import
while other ranks run.
"""

from __future__ import annotations

import ast
import os
import pickle
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from unicomm.flight_recorder.analysis.verdict import Report
from unicomm.flight_recorder.texts import ranks_text

from .hollow.install import warm_up
from .imports import import_for, import_shared
from .rank import Job, run_rank

#: Two, as one more seed orders every second set of two strings like the others.
_SEEDS = (1, 2)
_VARIABLE = "PYTHONHASHSEED"
_NAMES = frozenset({"set", "frozenset", "hash"})
_START = "import sys; sys.path[:] = {path!r}; import unicomm.rehearse.hash_seeds as h; h.run(*sys.argv[1:])"
_GO = b"g"


def with_other_seeds(program: object, ranks: Sequence[int]) -> Sequence[int]:
    """Returns those of `ranks` that run with another hash seed.

    Returns no rank if the program is a function, which a new interpreter cannot get.
    """
    fixed = (os.environ.get(_VARIABLE) or "random") != "random"
    if fixed or not isinstance(program, str) or not _depends_on_hashes(Path(program)):
        return ()
    return ranks[1:][-len(_SEEDS) :]


def _depends_on_hashes(program: Path) -> bool:
    """Whether the program, or a module beside it that it imports, has a set or calls `hash`."""
    program = program.resolve()  # a relative import may lead out of its folder
    waiting, seen = [program], {program}
    while waiting:
        file = waiting.pop()
        try:
            tree = ast.parse(file.read_text())
        except (OSError, SyntaxError, ValueError):  # the ranks say so
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Set, ast.SetComp)) or (isinstance(node, ast.Name) and node.id in _NAMES):
                return True
            found = {p for p in _own_modules(node, file, program.parent) if p.is_file()} - seen
            seen |= found
            waiting += found
    return False


def _own_modules(node: ast.AST, file: Path, folder: Path) -> Iterator[Path]:
    """The files in which a statement's modules may be, if these lie beside the program."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        names = [base, *(f"{base}.{alias.name}".strip(".") for alias in node.names)]
        if node.level > len(file.parents):
            return
        if node.level:
            folder = file.parents[node.level - 1]
    else:
        return
    for name in filter(None, names):
        place = folder.joinpath(*name.split("."))
        yield place.with_suffix(".py")
        yield place / "__init__.py"


def explain(report: Report, ranks: Sequence[int]) -> None:
    """Says in findings that set `ranks` apart from the others that hash seeds may be the cause."""
    for finding in report.findings:
        if finding.culprits and ranks and {*finding.culprits} <= {*ranks}:
            seeds = "another hash seed" if len(ranks) == 1 else "other hash seeds"
            finding.evidence.append(
                f"{ranks_text(ranks)} had {seeds}, as each rank of a real job has its own"
            )
            step = "see whether the order of a set, or hash(), decides what is called there; sort the set"
            finding.next_steps.insert(0, step)


@dataclass
class Waiting:
    """A rank whose interpreter imports what it needs, and then waits.

    Attributes:
        pid: its process.
        out: a pipe from it, which ends with it. into: a pipe to it.
    """

    pid: int
    out: int
    into: int

    def go(self) -> tuple[int, int]:
        """Has it run the program, where no turns are given. Returns the pipe from it, and its process."""
        os.write(self.into, _GO)
        os.close(self.into)
        return self.out, self.pid

    def end(self) -> None:
        """Ends it before it has run the program."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.out)
        os.close(self.into)


def spawn(job: Job, ranks: Sequence[int]) -> dict[int, Waiting]:
    """Starts an interpreter for each of `ranks`, with another hash seed each."""
    if not ranks:
        return {}
    file = job.folder / "job.pickle"
    file.write_bytes(pickle.dumps(job))
    return {rank: _spawn(file, rank, seed) for rank, seed in zip(ranks, _SEEDS, strict=False)}


def _spawn(file: Path, rank: int, seed: int) -> Waiting:
    out, to_parent = os.pipe()
    from_parent, into = os.pipe()
    for end in (to_parent, from_parent):
        os.set_inheritable(end, True)
    words = [sys.executable, "-c", _START.format(path=sys.path), str(file)]
    words += [str(number) for number in (rank, to_parent, from_parent)]
    pid = os.posix_spawn(sys.executable, words, os.environ | {_VARIABLE: str(seed)})
    os.close(to_parent)
    os.close(from_parent)
    return Waiting(pid, out, into)


def run(file: str, rank: str, to_parent: str, from_parent: str) -> NoReturn:
    """Runs one rank in this interpreter, and ends it."""
    del os.environ[_VARIABLE]  # of the program's own processes
    pipe, turns = int(to_parent), int(from_parent)
    for end in (pipe, turns):
        os.set_inheritable(end, False)
    job: Job = pickle.loads(Path(file).read_bytes())
    assert isinstance(job.program, str)
    import_shared()
    if job.hollow_from is not None:
        warm_up()
    import_for(Path(job.program))
    if job.real:
        run_rank(job, int(rank), pipe, turns)
    if os.read(turns, 1) != _GO:  # the parent has ended
        os._exit(1)
    run_rank(job, int(rank), pipe)
