"""Random programs: what the ranks do, and which faults happen to them, as plain data from a seed.

A program is a dict of JSON values, so that it can be printed, shrunk and kept. Ranks are numbers of
processes. `schedule` seeds the order in which threads run, and all delays.
"""

from __future__ import annotations

import json
import random
from typing import Any

Program = dict[str, Any]

TIMEOUTS = (3.0, 5.0, 10.0)
_KINDS = ("all_reduce", "broadcast", "barrier", "all_gather_single", "all_to_all_single")


def program_of(seed: int) -> Program:
    """The program of a seed."""
    rng = random.Random(f"program {seed}")
    return _Writer(rng).program(seed)


def to_text(program: Program) -> str:
    """One line for each operation and fault."""
    head = {k: v for k, v in program.items() if k not in ("ops", "faults")}
    lines = [json.dumps(head)]
    lines += [f"  {i}: {json.dumps(op)}" for i, op in enumerate(program["ops"])]
    lines += [f"  fault {json.dumps(fault)}" for fault in program["faults"]]
    return "\n".join(lines)


class _Writer:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._ops: list[dict[str, Any]] = []
        self._comms: dict[str, dict[str, Any]] = {}  # members by rank, and whether it can be reconfigured
        self._count = 0

    def program(self, seed: int) -> Program:
        rng = self._rng
        n = rng.choice((2, 2, 3, 3, 4, 5, 6))
        self._n = n
        for _ in range(rng.choice((1, 2, 3, 4, 5, 6, 8, 10))):
            self._operation()
        return {
            "ranks": n,
            "host": rng.choice((-1, -1, 0, n - 1)),  # the process that hosts the store; -1: the launcher
            "schedule": seed,
            "ops": self._ops,
            "faults": self._faults(),
        }

    def _operation(self) -> None:
        rng = self._rng
        if not self._comms or rng.random() < 0.12:
            self._create()
            return
        comm = rng.choice(sorted(self._comms))
        members = self._comms[comm]["members"]
        kinds = ["coll"] * 6 + ["msgs"] * 4 + ["batch", "split", "split"]
        kinds += ["late", "final", "abort", "later", "cause"]
        kinds += ["reconf"] * 4 if self._comms[comm]["reconf"] else []
        kind = rng.choice(kinds)
        getattr(self, f"_{kind}")(comm, members)

    def _add(self, op: str, comm: str, **fields: Any) -> None:
        self._ops.append({"op": op, "comm": comm, **fields})

    def _timeout(self) -> float:
        return self._rng.choice(TIMEOUTS)

    def _create(self) -> None:
        rng = self._rng
        self._count += 1
        comm = f"c{self._count}"
        reconf = rng.random() < 0.4
        self._add("create", comm, name=rng.choice(("a", "b")), timeout=self._timeout(), reconf=reconf)
        self._comms[comm] = {"members": list(range(self._n)), "reconf": reconf}

    def _coll(self, comm: str, members: list[int]) -> None:
        rng = self._rng
        self._add(
            "coll",
            comm,
            kind=rng.choice(_KINDS),
            root=rng.randrange(len(members)),
            count=rng.choice((0, 1, 3, 50, 2000)),
            later=rng.random() < 0.35,
            timeout=self._timeout(),
        )

    def _msgs(self, comm: str, members: list[int]) -> None:
        self._add(
            "msgs",
            comm,
            sends=self._sends(len(members)),
            any=self._rng.random() < 0.3,
            order=self._rng.randrange(1000),
            timeout=self._timeout(),
        )

    def _batch(self, comm: str, members: list[int]) -> None:
        self._add("batch", comm, sends=self._sends(len(members)), timeout=self._timeout())

    def _sends(self, n: int) -> list[list[int]]:
        rng = self._rng
        if n < 2:
            return []
        found = []
        for _ in range(rng.randrange(1, 8)):
            source, to = rng.sample(range(n), 2)
            found.append([source, to, rng.choice((0, 0, 0, 1)), rng.choice((1, 5))])
        return found

    def _split(self, comm: str, members: list[int]) -> None:
        rng = self._rng
        if len(members) < 2:
            return
        ranks = rng.sample(range(len(members)), len(members))
        cut = rng.randrange(1, len(ranks) + 1)
        parts = [part for part in (ranks[:cut], ranks[cut:]) if part]
        self._count += 1
        child = f"c{self._count}"
        self._add("split", comm, parts=parts, child=child, timeout=self._timeout())
        self._comms[child] = {"members": [members[r] for r in max(parts, key=len)], "reconf": False}

    def _late(self, comm: str, members: list[int]) -> None:
        seconds = self._rng.choice((0.001, 0.05, 0.6, 2.0, 8.0, 20.0))
        self._add("late", comm, rank=self._rng.choice(members), seconds=seconds)

    def _final(self, comm: str, members: list[int]) -> None:
        self._add("final", comm)
        if self._rng.random() < 0.7:
            del self._comms[comm]

    def _abort(self, comm: str, members: list[int]) -> None:
        self._add("abort", comm, rank=self._rng.choice(members))

    def _later(self, comm: str, members: list[int]) -> None:
        rng = self._rng
        self._add(
            "later",
            comm,
            do=rng.choice(("abort", "finalize")),
            rank=rng.choice(members),
            after=rng.choice((0.0, 0.001, 0.01, 0.3, 2.0)),
        )

    def _cause(self, comm: str, members: list[int]) -> None:
        rng = self._rng
        knows = sorted(rng.sample(range(len(members)), rng.randrange(0, len(members) + 1)))
        self._add("cause", comm, knows=knows)

    def _reconf(self, comm: str, members: list[int]) -> None:
        rng = self._rng
        ranks = rng.sample(range(self._n), rng.randrange(1, self._n + 1))
        self._count += 1
        self._add("reconf", comm, uuid=self._count, ranks=ranks, timeout=self._timeout())
        self._comms[comm]["members"] = ranks

    def _faults(self) -> list[dict[str, Any]]:
        rng = self._rng
        faults = []
        for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
            kind = rng.choice(("kill", "kill", "kill", "stop", "stop", "reset", "break store"))
            fault = {
                "kind": kind,
                "rank": rng.randrange(self._n),
                "op": rng.randrange(len(self._ops)),
                "after": int(10 ** rng.uniform(0, 2.8)),
            }
            if kind == "stop":
                fault["seconds"] = rng.choice((0.05, 0.7, 2.5, 8.0, 30.0))
            elif kind == "reset":
                fault["peer"] = rng.randrange(self._n)
            faults.append(fault)
        return faults
