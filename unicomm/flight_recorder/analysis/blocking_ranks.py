"""BlockingRanks: findings about the ranks that block others, from the wait-for graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from unicomm.flight_recorder.ring.reader import PEER_LOST, State
from unicomm.flight_recorder.table.rows import at_place, last_row, op_text, place
from unicomm.flight_recorder.table.table import ENDED, KILLED, RUNNING, STOPPED, Source, Table
from unicomm.flight_recorder.texts import capital, ranks_text

from .evidence import Evidence
from .verdict import Finding, Verdict
from .wait_cycles import cycle_finding
from .wait_graph import StuckCollective, WaitGraph, WaitNode, components, lasting_failures, newer

_GONE_WORD = {KILLED: "was killed", ENDED: "ended"}


@dataclass
class Health:
    """The ranks whose processes are dead or stopped, if that is significant.

    When a whole job has ended, every process is gone. Then only ranks count that the others reported as lost,
    or that ended without a failed operation.
    """

    dead: set[int]
    stopped: set[int]

    @property
    def gone(self) -> set[int]:
        return self.dead | self.stopped


def health(table: Table) -> Health:
    """Returns the significant dead and stopped ranks of a table."""
    killed = {s.rank for s in table.sources if s.process == KILLED}
    ended = {s.rank for s in table.sources if s.process == ENDED}
    stopped = {s.rank for s in table.sources if s.process == STOPPED}
    total = len(table.sources)
    if len({(s.pid, s.host) for s in table.sources if s.pid}) == 1 < total:
        return Health(set(), set())  # the ranks are threads of one process
    failed = lasting_failures(table)
    knew = {int(r) for r in table.rank[failed]}
    lost = bool((table.error[table.state == State.FAILED] == PEER_LOST).any())
    dead = killed - knew
    # When a rank has died, its launcher sends SIGTERM to the others.
    told = {e.rank for e in table.endings if e.stacks.terminated}
    dead = dead - told or dead
    if len(dead) * 2 > total and not lost:
        dead = set()
    if len(killed) + len(ended) < total or lost:
        dead |= ended - knew
    if len(dead) == total:
        dead = set()
    return Health(dead, stopped if len(stopped) < total or total == 1 else set())


class BlockingRanks:
    """Makes findings from the wait-for graph.

    Args:
        explained: the stuck collectives and ranks that a mismatch explains.
        slow: by how much ranks were repeatedly late, in nanoseconds.
        stuck_after_ns: the time without an operation after which a running rank counts as blocked.
    """

    def __init__(
        self,
        table: Table,
        waits: WaitGraph,
        state: Health,
        explained: Collection[WaitNode] = (),
        slow: dict[int, float] | None = None,
        stuck_after_ns: int = 0,
    ) -> None:
        self.table, self.waits, self.state = table, waits, state
        self.evidence = Evidence(table, waits)
        self.explained = set(explained)
        self.slow = slow or {}
        self.stuck_after_ns = stuck_after_ns
        for node in self.explained:
            for other in waits.edges.pop(node, []):
                waits.reverse[other] = [n for n in waits.reverse[other] if n != node]

    def findings(self) -> list[Finding]:
        """Returns the findings about cycles, blocking ranks and unfinished operations."""
        ends: list[int] = []
        out: list[Finding] = []
        for component in components(self.waits):
            if len(component) > 1:
                out += cycle_finding(self.table, self.waits, self.evidence, set(component))
                continue
            node = component[0]
            if len(node) == 1 and not self.waits.edges.get(node) and node not in self.explained:
                rank = node[0]
                if rank in self.waits.queueing and self.waits.paired.get(rank):
                    continue  # what holds up its queue is a message that does not finish, see _unfinished
                ends.append(rank)
        out += self._ends(ends)
        out += self._gone_alone(out)
        blamed = {r for one in out for r in (*one.culprits, *one.victims)}
        out += self._unfinished(blamed)
        return out

    # --- ranks without outgoing edges --------------------------------------------------------------

    def _ends(self, ends: list[int]) -> list[Finding]:
        together: dict[tuple[Verdict, WaitNode], list[int]] = defaultdict(list)
        for rank in ends:
            nodes = self.waits.reverse.get((rank,), [])
            stuck = [self.waits.stuck[n] for n in nodes if len(n) == 2]
            if stuck:  # the one it is in; else the earliest of the largest group
                main = min(stuck, key=lambda s: (rank not in s.waiting, -self._size(s), s.group, s.seq)).node
            else:
                main = (rank,)
            together[self._why(rank, stuck, [n[0] for n in nodes if len(n) == 1]), main].append(rank)
        out = []
        for (kind, main), ranks in together.items():
            ranks.sort()
            if kind is Verdict.NOT_READ:
                out.append(self._not_read(ranks, [self.waits.stuck[main]] if len(main) == 2 else []))
            elif kind is Verdict.UNMATCHED_P2P:
                out.append(self._unmatched(ranks[0]))
            elif len(main) == 1:
                out.append(self._absent_from_message(kind, ranks))
            else:
                out.append(self._absent(kind, ranks, self.waits.stuck[main]))
        return out

    def _size(self, stuck: StuckCollective) -> int:
        return self.table.groups[stuck.group].size

    def _why(self, rank: int, stuck: list[StuckCollective], senders: list[int]) -> Verdict:
        source = self.table.source_of.get(rank)
        if source and stuck and all(s.group in source.closed for s in stuck):
            return (
                Verdict.NEVER_JOINED
            )  # it finalized its groups, so the state of its process does not matter
        if rank in self.state.dead:
            return Verdict.PROCESS_DEAD
        if rank in self.state.stopped:
            return Verdict.PROCESS_STOPPED
        rows = [row for s in stuck for row in s.waiting.values()]
        rows += [row for r in senders for row in self.waits.lonely.get(r, ())]
        if rank in self.table.not_read:
            return Verdict.NOT_READ
        if source is None:
            lost = any(self.table.error[row] == PEER_LOST for row in rows)
            if lost:
                return Verdict.PROCESS_DEAD
            return Verdict.NEVER_JOINED if stuck else Verdict.UNMATCHED_P2P
        if stuck and all(rank in s.unknown for s in stuck):
            return Verdict.WRAPPED
        if not stuck:
            return Verdict.UNMATCHED_P2P
        if source.process == RUNNING and source.as_of_ns:
            return Verdict.SLOW if self._still_busy(source, rank, rows) else Verdict.BLOCKED_OUTSIDE
        return Verdict.NEVER_JOINED

    def _still_busy(self, source: Source, rank: int, rows: list[int]) -> bool:
        last = last_row(self.table, rank)
        since = 0
        if last is not None:
            since = max(int(self.table.created_ns[last]), int(self.table.completed_ns[last]))
        idle = source.as_of_ns - since
        waited = source.as_of_ns - min((int(self.table.created_ns[r]) for r in rows), default=source.as_of_ns)
        return idle < self.stuck_after_ns or waited < 3 * self.slow.get(rank, 0.0)

    def _absent(self, kind: Verdict, ranks: list[int], stuck: StuckCollective) -> Finding:
        """Returns the finding about ranks for which others wait in a collective."""
        table = self.table
        row = min(stuck.waiting.values(), key=lambda r: int(table.created_ns[r]))
        nodes: list[WaitNode] = [(r,) for r in ranks]
        victims = self.waits.victims(nodes, ranks)
        who = ranks_text(ranks)
        others = [r for r in stuck.waiting if r not in self.state.gone] or list(stuck.waiting)
        what = f"{op_text(table, row)}, where {ranks_text(others)} wait{'' if len(others) > 1 else 's'}"
        what += at_place(table, row)
        inside = [r for r in ranks if r in stuck.waiting]
        sources = [table.source_of.get(r) for r in ranks]
        plural = len(ranks) > 1
        restarted = all(s is not None and newer(s, stuck.group) for s in sources)
        if kind is Verdict.PROCESS_DEAD and None in sources:
            said = f"{capital(who)} left no dump and the others lost the connection: the process is gone. "
            said += f"It has not completed {what}."
        elif kind is Verdict.PROCESS_DEAD:
            words = sorted({_GONE_WORD.get(s.process, "is gone") for s in sources if s})
            said = f"{capital(who)} {' or '.join(words)} {'in' if inside else 'before'} {what}."
        elif kind is Verdict.PROCESS_STOPPED:
            said = f"{capital(who)} {'are' if plural else 'is'} stopped (SIGSTOP or a debugger)"
            said += f" {'in' if inside else 'before'} {what}."
        elif kind is Verdict.WRAPPED:
            said = f"It is unknown whether {who} joined {what}: the record was overwritten by newer ones."
            if restarted:
                has, was = ("have", "were") if plural else ("has", "was")
                said = (
                    f"{capital(who)} {has} no such communicator, so {'they' if plural else 'it'} {was} most"
                )
                said += f" likely started again and cannot join {what}."
        elif kind is Verdict.SLOW:
            said = f"{capital(who)} {'are' if plural else 'is'} late but alive: not yet in {what}."
        elif kind is Verdict.BLOCKED_OUTSIDE:
            said = f"{capital(who)} {'run' if plural else 'runs'} outside of the communicator and"
            said += f" {'have' if plural else 'has'} not joined {what}."
        elif None in sources:
            said = f"{capital(who)} left no dump and most likely never joined {what}."
        else:
            said = f"{capital(who)} never joined {what}."
        confidence = {Verdict.WRAPPED: 0.3, Verdict.SLOW: 0.7}.get(kind, 0.95)
        if None in sources:
            confidence = 0.7 if kind is Verdict.PROCESS_DEAD else 0.6
        doubts = self.evidence.doubts(stuck)
        if doubts:
            confidence = min(confidence, 0.5)
        last = self.evidence.last_operations(ranks, stuck.group)
        evidence = [*last, *self.evidence.errors(stuck), *doubts, *self.evidence.unknown(stuck)]
        places = [place(table, r) for r in (last_row(table, x) for x in ranks[:1]) if r is not None]
        return Finding(
            kind,
            [] if kind is Verdict.WRAPPED else ranks,
            victims,
            **_operation(table, row),
            confidence=confidence,
            sentence=said,
            evidence=evidence,
            edges=self.evidence.edges(nodes),
            next_steps=["end this communicator, or reconfigure it, on the ranks that wait in it"]
            if restarted and kind is Verdict.WRAPPED
            else _steps(kind, who, places[0] if places else "", place(table, row), sources),
        )

    def _not_read(self, ranks: list[int], stuck: list[StuckCollective]) -> Finding:
        """Returns the finding about ranks for which others wait and of which nothing is known."""
        table = self.table
        nodes: list[WaitNode] = [(r,) for r in ranks]
        rows = [row for one in stuck for row in one.waiting.values()]
        for rank in (n[0] for node in nodes for n in self.waits.reverse.get(node, ()) if len(n) == 1):
            rows += [row for row in self.waits.lonely.get(rank, ()) if int(table.peer[row]) in ranks]
        row = min(rows, key=lambda r: int(table.created_ns[r]))
        who, waiting = ranks_text(ranks), sorted({int(table.rank[r]) for r in rows})
        plural = len(ranks) > 1
        said = f"{capital(who)} {'were' if plural else 'was'} not read. {capital(ranks_text(waiting))}"
        said += f" wait{'' if len(waiting) > 1 else 's'} for {'them' if plural else 'it'} in"
        said += f" {op_text(table, row)}{at_place(table, row)}, and what {who} did is unknown."
        evidence = [f"no ring or dump of {who}, or of any rank on the same host, was given"]
        lost = sorted({int(table.rank[r]) for r in rows if table.error[r] == PEER_LOST})
        if lost:
            one = " to at least one of them" if plural else ""
            evidence.append(f"{ranks_text(lost)}: the connection{one} was lost")
        return Finding(
            Verdict.NOT_READ,
            [],
            self.waits.victims(nodes, ranks),
            **_operation(table, row),
            confidence=0.3,
            sentence=said,
            evidence=evidence,
            edges=self.evidence.edges(nodes),
            next_steps=_steps(Verdict.NOT_READ, who, "", "", []),
        )

    def _absent_from_message(self, kind: Verdict, ranks: list[int]) -> Finding:
        """Returns the finding about dead or stopped ranks for which others wait in a message."""
        table = self.table
        nodes: list[WaitNode] = [(r,) for r in ranks]
        waiting = sorted({n[0] for node in nodes for n in self.waits.reverse.get(node, ()) if len(n) == 1})
        rows = [
            row
            for r in waiting
            for row in (*self.waits.lonely.get(r, ()), *self.waits.paired.get(r, ()))
            if int(table.peer[row]) in ranks
        ]
        row = rows[0]
        who = ranks_text(ranks)
        state = {s.process for s in map(table.source_of.get, ranks) if s}
        word = (
            "is stopped"
            if kind is Verdict.PROCESS_STOPPED
            else _GONE_WORD.get(next(iter(state), ""), "is gone")
        )
        said = f"{capital(who)} {word}, and {ranks_text(waiting)} wait{'s' if len(waiting) == 1 else ''} in"
        said += f" {op_text(table, row)}{at_place(table, row)} for it."
        return Finding(
            kind,
            ranks,
            self.waits.victims(nodes, ranks),
            **_operation(table, row),
            confidence=0.95,
            sentence=said,
            evidence=self.evidence.last_operations(ranks, int(table.group[row])),
            edges=self.evidence.edges(nodes),
            next_steps=_steps(kind, who, "", place(table, row), [table.source_of.get(r) for r in ranks]),
        )

    def _unmatched(self, peer: int) -> Finding:
        """Returns the finding about a rank without the other side of a message."""
        table = self.table
        waiting = sorted({n[0] for n in self.waits.reverse.get((peer,), ()) if len(n) == 1})
        rows = [row for r in waiting for row in self.waits.lonely.get(r, ()) if int(table.peer[row]) == peer]
        row = min(rows, key=lambda r: int(table.created_ns[r]))
        rank, op = int(table.rank[row]), table.op_name(row)
        other = "recv" if op == "send" else "send"
        source = table.source_of.get(peer)
        said = f"Rank {rank} waits in {op_text(table, row)}{at_place(table, row)}, but rank {peer}"
        said += (
            f" never issued the {other} for it." if source else f" left no dump, so its {other} is unknown."
        )
        evidence = self.evidence.last_operations([peer], int(table.group[row]))
        elsewhere = [r for r in self.waits.lonely.get(peer, ()) if int(table.peer[r]) != rank]
        culprit = peer
        if not elsewhere and (meant := self._meant(rank, row)) is not None:
            culprit = rank
            said += f" Rank {int(table.rank[meant])} waits for rank {rank} with the other side"
            said += f"{at_place(table, meant)}: a wrong peer?"
        for stray in elsewhere[:2]:
            evidence.append(
                f"rank {peer} has a {table.op_name(stray)} with rank {int(table.peer[stray])}"
                f"{at_place(table, stray)} without its other side: a wrong peer?"
            )
        return Finding(
            Verdict.UNMATCHED_P2P,
            [culprit],
            [r for r in self.waits.victims([(peer,)], [culprit]) if r != peer],
            **_operation(table, row),
            confidence=0.85 if source else 0.5,
            sentence=said,
            evidence=evidence,
            edges=self.evidence.edges([(peer,)]),
            next_steps=[
                f"find the {other} that rank {peer} should issue for {place(table, row) or f'rank {rank}'}",
                "check peers, and the order where both ranks exchange several messages",
            ],
        )

    def _meant(self, rank: int, row: int) -> int | None:
        """Returns the row of a rank that waits for `rank` with the other side of a message like `row`."""
        table = self.table
        for before in self.waits.reverse.get((rank,), ()):
            for other in self.waits.lonely.get(before[0], ()) if len(before) == 1 else ():
                if int(table.peer[other]) == rank and table.op_name(other) != table.op_name(row):
                    return other
        return None

    # --- ranks without waiting peers, and operations that all ranks have joined --------------------

    def _gone_alone(self, found: list[Finding]) -> list[Finding]:
        """Returns findings about killed and stopped ranks that no finding in `found` names."""
        named = {r for one in found for r in one.culprits}
        out = []
        for kind, ranks in (
            (Verdict.PROCESS_DEAD, self.state.dead),
            (Verdict.PROCESS_STOPPED, self.state.stopped),
        ):
            left = sorted(ranks - named)
            if kind is Verdict.PROCESS_DEAD:
                left = [r for r in left if self.table.source_of[r].process == KILLED]
            if not left:
                continue
            who = ranks_text(left)
            row = last_row(self.table, left[0])
            said = f"{capital(who)} {'was killed' if kind is Verdict.PROCESS_DEAD else 'is stopped'}"
            said += (
                f" after {op_text(self.table, row)}{at_place(self.table, row)}." if row is not None else "."
            )
            group = int(self.table.group[row]) if row is not None else -1
            sources = [self.table.source_of.get(r) for r in left]
            out.append(
                Finding(
                    kind,
                    left,
                    **_operation(self.table, row),
                    confidence=0.9,
                    sentence=said,
                    evidence=[*self.evidence.last_operations(left, group), "no rank waits for it yet"],
                    next_steps=_steps(kind, who, "", "", sources),
                )
            )
        return out

    def _unfinished(self, blamed: set[int]) -> list[Finding]:
        """Returns findings about unfinished operations that all their ranks have joined."""
        table, out = self.table, []
        for node, stuck in sorted(self.waits.stuck.items()):
            free = not self.waits.edges.get(node) and node not in self.explained
            if not free or stuck.unknown or blamed & set(stuck.waiting):
                continue
            out.append(self._never_finished(stuck))
            blamed |= set(stuck.waiting)
        for rank, rows in sorted(self.waits.paired.items()):
            for row in rows:
                if rank in blamed or self.waits.edges.get((rank,)):
                    continue
                peer = int(table.peer[row])
                if (rank,) in self.explained or (peer,) in self.explained:
                    continue
                out.append(self._message_unfinished(row, rank, peer))
                blamed |= {rank, peer}
        return out

    def _never_finished(self, stuck: StuckCollective) -> Finding:
        table = self.table
        members = set(table.groups[stuck.group].ranks.tolist())
        inside = set(stuck.waiting)
        created = {r for r, row in stuck.waiting.items() if table.state[row] == State.CREATED}
        row = min(stuck.waiting.values(), key=lambda r: int(table.created_ns[r]))
        over = members - inside
        if created and len(created) < len(inside):
            culprits = sorted(created)
            why = f"{ranks_text(created)} issued it, but it never began there: what runs before it?"
        elif over and len(inside) * 2 <= len(members):
            culprits = sorted(inside)
            why = f"{ranks_text(over)} completed it, {ranks_text(inside)} did not"
        else:
            culprits = []
            why = f"all {len(members)} ranks joined with the same arguments" + (
                f"; {ranks_text(over)} completed it" if over else " and none of them completed it"
            )
        said = f"All ranks are in {op_text(table, row)}{at_place(table, row)}, and it does not finish: "
        said += "the transport is to blame, not the program's order of operations."
        hosts = {table.source_of[r].host for r in inside if table.source_of[r].host}
        evidence = [why, *self.evidence.errors(stuck)]
        if len(hosts) == 1 and len(table.source_of) > len(inside):
            evidence.append(f"all of them are on {next(iter(hosts))}")
        return Finding(
            Verdict.NEVER_FINISHED,
            culprits,
            sorted(inside - set(culprits)),
            **_operation(table, row),
            confidence=0.8,
            sentence=said,
            evidence=evidence,
            next_steps=[
                "look for link and device errors on these hosts (dmesg, switch counters, NCCL_DEBUG=INFO)",
                "on GPUs a kernel that never ends, or another communicator on the device, also blocks it",
            ],
        )

    def _message_unfinished(self, row: int, rank: int, peer: int) -> Finding:
        table = self.table
        said = f"Ranks {rank} and {peer} are both in {op_text(table, row)}{at_place(table, row)}, and it does"
        said += " not finish: the transport between them is to blame."
        return Finding(
            Verdict.NEVER_FINISHED,
            sorted({rank, peer}),
            **_operation(table, row),
            confidence=0.7,
            sentence=said,
            evidence=["send and receive match in order and size"],
            next_steps=[f"check the link between the hosts of rank {rank} and rank {peer}"],
        )


def _operation(table: Table, row: int | None) -> dict[str, Any]:
    """Returns the fields of a finding that name the operation of a row; none without a row."""
    if row is None:
        return {}
    group = int(table.group[row])
    return {
        "group": table.groups[group].name if group >= 0 else "",
        "seq_num": int(table.seq[row]),
        "operation": table.op_name(row),
        "since_ns": int(table.created_ns[row]),
    }


def _steps(kind: Verdict, who: str, last: str, there: str, sources: list[Source | None]) -> list[str]:
    """Returns the next steps of a finding."""
    known = [s for s in sources if s]
    # A ring tells whether its process still runs; advice must not name one that is gone.
    pid = next((s.pid for s in known if s.pid and (s.runs_here or s.format != "ring")), 0)
    host = next((s.host for s in known if s.host), "")
    on = f" on {host}" if host else ""
    after = f"read the code from {last} to {there}" if last and there else f"look at what {who} did last"
    if last and last == there:
        after = f"read the code that runs between two calls of {there}"
    match kind:
        case Verdict.PROCESS_DEAD:
            return [
                f"look for the end of {who} in its log{on}",
                "dmesg shows the out-of-memory killer; the launcher shows the exit code or signal",
            ]
        case Verdict.PROCESS_STOPPED:
            if pid:
                return [f"kill -CONT {pid}{on} lets it go on"]
            return [f"find out what stopped {who}{on}: a debugger, job control or the scheduler"]
        case Verdict.BLOCKED_OUTSIDE:
            dump = [f"py-spy dump --pid {pid}{on} shows where it is"] if pid else []
            return [*dump, f"{after}: loading, checkpointing or a lock"]
        case Verdict.SLOW:
            return [f"profile {who}{on}: loading, garbage collection, a slow device", after]
        case Verdict.WRAPPED:
            return ["record more (UNICOMM_TRACE_RECORDS, TORCH_FR_BUFFER_SIZE) and run again"]
        case Verdict.NOT_READ:
            return [
                f"read the rings or dumps of {who}, too: give all hosts' folders to one analysis",
                "with the hub, `unicomm run` gathers them on one host",
            ]
        case _ if not known:
            return [f"find the dump or the log of {who}: without it the finding stays uncertain"]
        case _:
            return [f"{after}: a branch, an exception or fewer batches made it skip the operation"]
