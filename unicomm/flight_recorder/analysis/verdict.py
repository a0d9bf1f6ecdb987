"""The closed list of verdicts; findings with their culprits and evidence; the report."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from unicomm.flight_recorder.ring.reader import InputRemark

_MOST_CALLERS = 4  # lines in a text


class Verdict(str, enum.Enum):
    """The closed list of verdicts. `--json` writes the values; they never change."""

    EXCEPTION = "exception"
    EXITED = "exited"
    CRASHED = "crashed"
    OUT_OF_MEMORY = "out-of-memory"
    TERMINATED = "terminated"
    NEVER_JOINED = "never-joined"
    WRONG_OPERATION = "wrong-operation"
    SILENT_CORRUPTION = "silent-corruption"
    SIZE_MISMATCH = "size-mismatch"
    DTYPE_MISMATCH = "dtype-mismatch"
    ROOT_MISMATCH = "root-mismatch"
    REDUCTION_MISMATCH = "reduction-mismatch"
    SPLIT_MISMATCH = "split-mismatch"
    ORDER_SWAP = "order-swap-within-a-group"
    WAIT_CYCLE = "wait-cycle-across-groups"
    UNMATCHED_P2P = "unmatched-send-or-recv"
    P2P_SIZE_MISMATCH = "p2p-size-mismatch"
    PROCESS_DEAD = "process-dead"
    PROCESS_STOPPED = "process-stopped"
    BLOCKED_OUTSIDE = "blocked-outside-the-communicator"
    SLOW = "alive-but-slow"
    NEVER_FINISHED = "started-but-never-finished"
    MEMBERSHIP = "membership-disagreement"
    WRAPPED = "recorder-wrapped"
    NOT_READ = "not-read"
    GOOD = "all-good"


@dataclass
class Edge:
    """An edge of the wait-for graph: `rank` waits in an operation for the ranks `waits_for`."""

    rank: int
    waits_for: list[int]
    group: str
    operation: str  # with its arguments
    seq_num: int
    where: str = ""  # file:line of the call, "" if unknown
    p2p: bool = False


@dataclass
class Side:
    """Ranks that made the same call (`what`) in the operation of a finding, and where."""

    ranks: list[int]
    what: str
    where: str = ""


@dataclass
class Cause:
    """How a culprit's process ended, or where it is.

    Attributes:
        exception: the name of the exception's class, "" without one.
        message: the first line of its text.
        file, line, function: the user's own place; "" and 0 if unknown.
        exit_code: the exit code that the launcher saw; None if it is unknown.
        signal: the name of the signal that ended the process, "" if none did.
        call_path: the frames that lead to the place, "file:line function", the innermost first.
    """

    exception: str = ""
    message: str = ""
    file: str = ""
    line: int = 0
    function: str = ""
    exit_code: int | None = None
    signal: str = ""
    call_path: list[str] = field(default_factory=list)


@dataclass
class PathLine:
    """A frame of a call path. `library` is the wrapper that it belongs to, "torch", or "" for the user."""

    file: str
    line: int
    function: str
    library: str = ""


@dataclass
class CalledFrom:
    """How ranks came to an operation: their common call path, the innermost call first."""

    ranks: list[int]
    operation: str  # "all_reduce #5 of 'tp'"
    path: list[PathLine]

    @property
    def user(self) -> int:
        """The index of the user's own line: the innermost one of the user, else 0."""
        return next((i for i, line in enumerate(self.path) if not line.library), 0)

    @property
    def callers(self) -> list[PathLine]:
        """The user's lines that called the own line, up to the main program; the innermost first."""
        out: list[PathLine] = []
        for line in self.path[self.user :]:
            if line.library:
                continue
            out.append(line)
            if line.function == "<module>":
                break
        return out[1:]

    @property
    def callers_text(self) -> str:
        """The innermost callers as text: "train.py:45 in main, train.py:60"; "" if there are none."""
        lines = [
            f"{line.file}:{line.line}" + f" in {line.function}" * (line.function != "<module>")
            for line in self.callers
        ]
        return ", ".join([*lines[:_MOST_CALLERS], *["..."] * (len(lines) > _MOST_CALLERS)])


@dataclass
class Finding:
    """One fault.

    Attributes:
        verdict: its kind.
        culprits: the sorted ranks that caused it; empty if none can be named.
        victims: the ranks that wait because of the culprits.
        group: the name of the communicator, "" without one.
        seq_num: the number of the collective in the group, or of the message in its pair; -1 without one.
        operation: the name of the operation, "" without one.
        confidence: 0 ... 1.
        sentence: who did what and where, in one or two sentences.
        evidence: the facts behind the verdict, one per line.
        sides: the differing calls of one operation, the majority first.
        edges: the wait-for graph next to the culprits; for a cycle, its edges in order.
        call_paths: how the culprits, then other ranks, came to their operations.
        next_steps: what to look at or to do now.
        since_ns: the wall-clock time at which it began, 0 if unknown.
        cause: how the first culprit's process ended, or where it is; None if unknown.
    """

    verdict: Verdict
    culprits: list[int] = field(default_factory=list)
    victims: list[int] = field(default_factory=list)
    group: str = ""
    seq_num: int = -1
    operation: str = ""
    confidence: float = 1.0
    sentence: str = ""
    evidence: list[str] = field(default_factory=list)
    sides: list[Side] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    call_paths: list[CalledFrom] = field(default_factory=list)
    next_steps: list[str] = field(default_factory=list)
    since_ns: int = 0
    cause: Cause | None = None


@dataclass
class Straggler:
    """How late a rank, host or group is in the sampled collectives.

    Times are means per collective, in nanoseconds.

    Attributes:
        who: "rank 3", "host node7", "group tp".
        kind: "rank", "host" or "group".
        score: the share of the time that others lost by waiting for it, 0 ... 1.
        late_ns: arrival after the median rank, on aligned clocks.
        last: the share of the collectives in which it came last, 0 ... 1.
        waiting_ns: from its arrival to the last rank's.
        transfer_ns: from the last arrival to its completion.
        gap_ns: from the end of the previous collective to its arrival: computing, loading, checkpointing.
        collectives: the number of sampled collectives.
        rank: the rank, -1 for hosts and groups.
        confidence: how sure it is that it is late at all, 0.5 ... 0.95.
    """

    who: str
    kind: str
    score: float
    late_ns: float
    last: float
    waiting_ns: float
    transfer_ns: float
    gap_ns: float
    collectives: int
    rank: int = -1
    confidence: float = 0.5


@dataclass
class Report:
    """The result of analyzing a table.

    Attributes:
        findings: all faults, the most important first; a single `Verdict.GOOD` when there is none.
        stragglers: the latest ranks, hosts and groups, the latest first.
        remarks: problems of the input: unreadable files, ranks without a file, ...
        ranks: the number of ranks of the job.
        present: the number of ranks with a source; `missing` lists the others.
        not_read: those of `missing` of whose host nothing was read, so that nothing is known of them.
        entries: the number of operations.
        groups: the number of communicators.
        clock_offsets_ns: each rank's clock minus the typical clock, for ranks that could be compared.
        formats: the number of sources of each format.
    """

    findings: list[Finding]
    stragglers: list[Straggler] = field(default_factory=list)
    remarks: list[InputRemark] = field(default_factory=list)
    ranks: int = 0
    present: int = 0
    missing: list[int] = field(default_factory=list)
    not_read: list[int] = field(default_factory=list)
    entries: int = 0
    groups: int = 0
    clock_offsets_ns: dict[int, int] = field(default_factory=dict)
    formats: dict[str, int] = field(default_factory=dict)

    @property
    def late(self) -> list[Straggler]:
        """The stragglers that are late by chance in fewer than one of five such runs."""
        return [s for s in self.stragglers if s.confidence >= 0.8]

    @property
    def main(self) -> Finding:
        """The most important finding."""
        return self.findings[0]

    @property
    def good(self) -> bool:
        return self.main.verdict is Verdict.GOOD
