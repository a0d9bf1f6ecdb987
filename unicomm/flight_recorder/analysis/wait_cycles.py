"""Findings about cycles in the wait-for graph."""

from __future__ import annotations

from unicomm.flight_recorder.table.table import Table
from unicomm.flight_recorder.texts import capital

from .evidence import Evidence
from .verdict import Edge, Finding, Verdict
from .wait_graph import StuckCollective, WaitGraph, WaitNode, shortest_cycle


def _leaves_its_loop(
    waits: WaitGraph, evidence: Evidence, edges: list[Edge], stuck: StuckCollective
) -> list[int]:
    """Returns the ranks of one side of a cycle of a message and a collective, if that side is the odd one.

    It is the odd one if its call does not follow its previous call in any earlier step of its loop, while the
    other side's call does. Without such a difference, [] is returned.
    """
    senders = {e.rank for e in edges if e.p2p}
    first = {r: min(waits.lonely[r]) for r in senders if waits.lonely.get(r)}
    others = {r: stuck.waiting[r] for e in edges if e.p2p for r in e.waits_for if r in stuck.waiting}
    if not first or not others:
        return []
    usual = {all(evidence.follows_as_before(row) for row in side.values()): side for side in (first, others)}
    return sorted(usual[False]) if len(usual) == 2 else []


def _do_not_fit(edges: list[Edge], lone: int) -> bool:
    """Returns whether a send and a receive name each other and are no pair."""
    if len(edges) != 2 or lone != 2 or edges[0].group != edges[1].group:
        return False
    return {edge.operation.split(" ", 1)[0] for edge in edges} == {"send", "recv"}


def cycle_finding(table: Table, waits: WaitGraph, evidence: Evidence, inside: set[WaitNode]) -> list[Finding]:
    """Returns the finding about a component of more than one node.

    It is a deadlock, or a message without its other side.
    """
    path = shortest_cycle(waits, inside)
    if not path:
        return []
    edges: list[Edge] = []
    stucks: list[StuckCollective] = []
    for at, node in enumerate(path):
        after = path[(at + 1) % len(path)]
        if len(node) != 1:
            continue
        if len(after) == 2:
            stuck = waits.stuck[after]
            edge = evidence.edge_of_stuck(stuck, node[0])
            behind = path[(at + 2) % len(path)]
            edge.waits_for = [behind[0]] if len(behind) == 1 else edge.waits_for
            edges.append(edge)
            stucks.append(stuck)
        elif message := evidence.edge_of_message(node[0], after[0]):
            edges.append(message)
    ranks = sorted({n[0] for n in path if len(n) == 1})
    groups = {s.group for s in stucks}
    lone = [e.rank for e in edges if e.p2p and not evidence.has_both_sides(e)]
    same_group = len({e.group for e in edges}) == 1
    since = [int(table.created_ns[s.waiting[r]]) for s in stucks for r in s.waiting if r in ranks]
    strange = [e for e in edges if e.p2p and not evidence.has_come_before(e)]
    if len(lone) == len(edges) and len(strange) == 1:
        first = strange[0]
        kind, confidence, culprits = Verdict.UNMATCHED_P2P, 0.8, [first.rank]
        said = f"Rank {first.rank} is in {first.operation} #{first.seq_num} with rank"
        said += f" {first.waits_for[0]}" + (f" at {first.where}" if first.where else "")
        said += ", which has no other side and no earlier message like it: a wrong peer?"
        steps = [f"check the peer that rank {first.rank} names there"]
    elif _do_not_fit(edges, len(lone)):
        kind, confidence, culprits, first = Verdict.UNMATCHED_P2P, 0.9, ranks, edges[0]
        said = " and ".join(f"rank {e.rank} is in {e.operation} #{e.seq_num} at {e.where}" for e in edges)
        said = f"{capital(said)}: they wait for each other, and their messages do not fit."
        steps = ["compare the tags of the two messages"]
    elif lone and len(groups) == 1 and same_group:
        crowd = max(len(s.waiting) for s in stucks)
        first = next(e for e in edges if e.p2p)
        # If such messages were exchanged before, the other side is missing; else this message is surplus.
        usual = [e.waits_for[0] for e in edges if e.p2p and e not in strange]
        culprits = sorted(usual or lone) if crowd > len(lone) or usual else ranks
        if odd := _leaves_its_loop(waits, evidence, edges, stucks[0]):
            culprits = odd
        said = "; ".join(
            f"rank {e.rank} is in {e.operation} #{e.seq_num} with rank {e.waits_for[0]}"
            + (f" at {e.where}" if e.where else "")
            for e in edges
            if e.p2p
        )
        there = next(e for e in edges if not e.p2p)
        said += f", while the others are in {there.operation} #{there.seq_num}"
        said += f" at {there.where}" if there.where else ""
        kind, confidence = Verdict.UNMATCHED_P2P, 0.85 if crowd > len(lone) else 0.5
        said = capital(said) + "."
        steps = ["find the other side of this message, or the branch that leads there on this rank only"]
    else:
        kind, confidence, culprits, first = Verdict.WAIT_CYCLE, 0.95, ranks, edges[0]
        chain = " -> ".join(f"rank {e.rank}" for e in edges) + f" -> rank {edges[0].rank}"
        said = f"Deadlock: {chain}. Each waits for the next one, in "
        said += " and ".join(dict.fromkeys(f"'{e.group}'" for e in edges)) + "."
        steps = [
            "issue operations of different groups in one order on all ranks",
            "for sends that meet: let one side receive first, or use batch_isend_irecv",
        ]
    nodes: list[WaitNode] = [(r,) for r in culprits]
    crowd_text = [line for s in stucks for line in evidence.inside(s)]
    return [
        Finding(
            kind,
            culprits,
            waits.victims([*nodes, *path], culprits),
            first.group,
            first.seq_num,
            first.operation.split(" ", 1)[0],
            confidence,
            said,
            list(dict.fromkeys(crowd_text)),
            edges=edges,
            next_steps=steps,
            since_ns=min(since, default=0),
        )
    ]
