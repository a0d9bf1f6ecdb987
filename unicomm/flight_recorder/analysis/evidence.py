"""Evidence: last operations, errors, and the wait-for graph near the culprits, for findings about waiting."""

from __future__ import annotations

from collections import defaultdict, deque

from unicomm.flight_recorder.ring.reader import ERRORS, UNKNOWN_ERROR, State
from unicomm.flight_recorder.table.rows import at_place, last_row, op_text, place
from unicomm.flight_recorder.table.table import UNKNOWN, Source, Table
from unicomm.flight_recorder.texts import ranks_text, span

from .verdict import Edge
from .wait_graph import StuckCollective, WaitGraph, WaitNode

_MOST_EDGES = 8


class Evidence:
    """Collects evidence from the table and the wait-for graph."""

    def __init__(self, table: Table, waits: WaitGraph) -> None:
        self.table, self.waits = table, waits

    def last_operations(self, ranks: list[int], group: int) -> list[str]:
        """Says what the ranks did last; ranks with the same text share a line."""
        table = self.table
        said: dict[str, list[int]] = defaultdict(list)
        processes: dict[tuple[str, str], list[Source]] = {}
        for rank in ranks:
            row, inside = last_row(table, rank), last_row(table, rank, group)
            source = table.source_of.get(rank)
            if source is None:
                said["no dump or ring of it was given"].append(rank)
                continue
            if source.process != UNKNOWN or source.host:
                processes.setdefault((source.process, source.host), []).append(source)
            if group in source.closed:
                said[f"it has finalized '{table.groups[group].name}'"].append(rank)
            if row is None:
                said["it recorded no operation"].append(rank)
                continue
            state = State(int(table.state[row])).name.lower()
            age = ""
            if source.as_of_ns:
                age = f", {span(source.as_of_ns - int(table.created_ns[row]))} ago"
            said[f"last operation: {op_text(table, row)}{at_place(table, row)}, {state}{age}"].append(rank)
            if inside is None:
                said[f"nothing recorded in '{table.groups[group].name}'"].append(rank)
            elif inside != row:
                said[f"last in '{table.groups[group].name}': {op_text(table, inside)}"].append(rank)
        lines = [self._process_line(*where, sources) for where, sources in processes.items()]
        return [*lines[:4], *(f"{ranks_text(of)}: {text}" for text, of in list(said.items())[:6])]

    @staticmethod
    def _process_line(process: str, host: str, sources: list[Source]) -> str:
        pids = [str(s.pid) for s in sources if s.pid]
        text = f"process {process}" if process != UNKNOWN else "process"
        if pids:
            text += f", pid {', '.join(pids[:4])}{' ...' if len(pids) > 4 else ''}"
        return f"{ranks_text(s.rank for s in sources)}: {text}" + (f" on {host}" if host else "")

    def errors(self, stuck: StuckCollective) -> list[str]:
        """Says with which errors the collective failed, and on which ranks."""
        errors: dict[str, list[int]] = defaultdict(list)
        for rank, row in stuck.waiting.items():
            if int(self.table.error[row]):
                errors[ERRORS[int(self.table.error[row])]].append(rank)
        unknown = ERRORS[UNKNOWN_ERROR]
        return [
            f"{ranks_text(r)}: the operation failed" + ("" if e == unknown else f" with '{e}'")
            for e, r in errors.items()
        ]

    def doubts(self, stuck: StuckCollective) -> list[str]:
        """Says if the only sign that the collective failed is that other ranks have not issued it."""
        table = self.table
        for rank, row in stuck.waiting.items():
            if not table.source_of[rank].retired_only or table.state[row] != State.FAILED:
                return []
        return [
            "torch's Gloo calls failed operations over; if the dumps are of several moments, it succeeded"
        ]

    def inside(self, stuck: StuckCollective) -> list[str]:
        """Says which ranks are in the collective, and behind what the others have queued it."""
        row = next(iter(stuck.waiting.values()))
        what = op_text(self.table, row)
        inside = [r for r in stuck.waiting if r not in stuck.queued]
        lines = [f"{ranks_text(inside)}: in {what}"] if inside else []
        behind: dict[str, list[int]] = defaultdict(list)
        for rank, other in stuck.queued.items():
            behind[op_text(self.table, other)].append(rank)
        return lines + [
            f"{ranks_text(r)}: issued {what}, which waits there behind {b}" for b, r in behind.items()
        ]

    def unknown(self, stuck: StuckCollective) -> list[str]:
        """Says of which members nothing is known."""
        if not stuck.unknown or len(stuck.unknown) == self.table.groups[stuck.group].size:
            return []
        return [f"nothing is known of {ranks_text(stuck.unknown)}: no dump, overwritten, or started again"]

    def edges(self, ends: list[WaitNode]) -> list[Edge]:
        """Returns the edges next to the nodes `ends`; ranks that wait in one collective share an edge."""
        out: list[Edge] = []
        todo, seen = deque(ends), set(ends)
        while todo and len(out) < _MOST_EDGES:
            node = todo.popleft()
            for before in self.waits.reverse.get(node, ()):
                if before in seen:
                    continue
                seen.add(before)
                todo.append(before)
                if len(before) == 2:
                    out.append(self.edge_of_stuck(self.waits.stuck[before]))
                elif len(node) == 1:
                    out += [e for e in (self.edge_of_message(before[0], node[0]),) if e]
        return out[:_MOST_EDGES]

    def edge_of_stuck(self, stuck: StuckCollective, rank: int | None = None) -> Edge:
        table = self.table
        absent = sorted({*stuck.missing, *stuck.gone, *stuck.queued}) or sorted(stuck.unknown)
        who = min(sorted(stuck.waiting), key=lambda r: r in absent) if rank is None else rank
        row = stuck.waiting[who]
        group = table.groups[stuck.group].name
        return Edge(who, absent, group, table.describe(row), stuck.seq, place(table, row))

    def edge_of_message(self, rank: int, peer: int) -> Edge | None:
        table = self.table
        for row in (*self.waits.lonely.get(rank, ()), *self.waits.paired.get(rank, ())):
            if int(table.peer[row]) == peer:
                group = table.groups[int(table.group[row])].name
                what = table.describe(row)
                return Edge(rank, [peer], group, what, int(table.seq[row]), place(table, row), True)
        return None

    def has_both_sides(self, edge: Edge) -> bool:
        """Returns whether the message of an edge was issued by both ranks, or is known to come."""
        paired, lonely = (waits.get(edge.rank, ()) for waits in (self.waits.paired, self.waits.lonely))
        rows = [*paired, *(row for row in lonely if row in self.table.coming)]
        return any(self._is_message(row, edge) for row in rows)

    def _is_message(self, row: int, edge: Edge) -> bool:
        table = self.table
        return int(table.peer[row]) == edge.waits_for[0] and int(table.seq[row]) == edge.seq_num

    def follows_as_before(self, row: int) -> bool:
        """Returns whether the rank has made this call after the same call earlier."""
        begin = self.table.source_of[int(self.table.rank[row])].begin
        calls = self.table.call[begin : row + 1]
        if len(calls) < 2:
            return False
        return bool(((calls[1:-1] == calls[-1]) & (calls[:-2] == calls[-2])).any())

    def has_come_before(self, edge: Edge) -> bool:
        """Returns whether a message like this one was exchanged before."""
        table = self.table
        for row in self.waits.lonely.get(edge.rank, ()):
            if self._is_message(row, edge):
                before = slice(table.source_of[edge.rank].begin, row)
                alike = (table.peer[before] == table.peer[row]) & (table.call[before] == table.call[row])
                return bool((alike & (table.state[before] == State.COMPLETED)).any())
        return False
