"""The closed list of verdicts, and what the analyzer says: findings, each with its culprits and evidence."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from unicomm.flight_recorder.ring.reader import InputRemark


class Verdict(str, enum.Enum):
    """What can be wrong, the closed list. The values are what `--json` writes; they never change."""

    NEVER_JOINED = "never-joined"
    WRONG_OPERATION = "wrong-operation"
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
    GOOD = "all-good"


@dataclass
class Edge:
    """`rank` cannot go on before `waits_for` comes."""

    rank: int
    waits_for: list[int]
    group: str
    operation: str  # with its arguments
    seq_num: int
    where: str = ""  # file:line of `rank`'s call, "" where it is not known
    p2p: bool = False


@dataclass
class Side:
    """Ranks that did the same in the operation in question: what and where. The majority comes first."""

    ranks: list[int]
    what: str
    where: str = ""


@dataclass
class Finding:
    """One fault.

    Attributes:
        culprits: the ranks that nobody else is to blame for, in order; may be empty where none can be named.
        victims: ranks that wait because of them.
        group: name of the communicator, "" where the fault belongs to none.
        seq_num: of the collective in the group, or of the message in its pair; -1 where there is none.
        operation: name, "" where the fault belongs to none.
        confidence: 0 ... 1.
        sentence: who did what where, in one or two sentences.
        evidence: the facts that the verdict rests on, a line each.
        sides: who did what, where the ranks of one operation differ.
        edges: the wait-for graph around the fault; for a cycle, its edges in order.
        next_steps: what to look at or do now.
        since_ns: when it began (wall clock), 0 where it is not known.
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
    next_steps: list[str] = field(default_factory=list)
    since_ns: int = 0


@dataclass
class Straggler:
    """How much a rank, host or group is late, over the collectives that were looked at.

    Times are means over one collective, in nanoseconds.

    Attributes:
        who: "rank 3", "host node7", "group tp".
        kind: "rank", "host" or "group".
        score: share of the time that the others lost by waiting for this one, 0 ... 1.
        late_ns: arrival after the typical rank (median), by the aligned clocks.
        last: share of the collectives in which it came last, 0 ... 1.
        waiting_ns: from its arrival to the last one's.
        transfer_ns: from the last arrival to its completion.
        gap_ns: from the end of the collective before to its arrival: computing, loading, checkpointing.
        collectives: how many were looked at.
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


@dataclass
class Report:
    """What the analyzer says of a table.

    Attributes:
        findings: all faults, the most important first; one of `Kind.GOOD` when there is none.
        stragglers: the latest ranks, hosts and groups, the latest first.
        input_findings: files that could not be read, ranks without a file, ...
        ranks: how many ranks the job has; `present` of them have a source.
        entries: operations that were read.
        clock_offsets_ns: of each rank whose clock could be compared, against the typical clock.
        formats: of the sources, by number of files.
    """

    findings: list[Finding]
    stragglers: list[Straggler] = field(default_factory=list)
    input_findings: list[InputRemark] = field(default_factory=list)
    ranks: int = 0
    present: int = 0
    missing: list[int] = field(default_factory=list)
    entries: int = 0
    groups: int = 0
    clock_offsets_ns: dict[int, int] = field(default_factory=dict)
    formats: dict[str, int] = field(default_factory=dict)

    @property
    def main(self) -> Finding:
        """The most important finding."""
        return self.findings[0]

    @property
    def good(self) -> bool:
        return self.main.verdict is Verdict.GOOD
