"""Fault kinds with wait cycles, and with wrong sends and receives."""

from __future__ import annotations

import numpy as np

from unicomm.flight_recorder.analysis.verdict import Verdict

from .fault_kinds import SMALL, SOME, Case, fault, find, job_of, pick, pipeline
from .simulated_job import Action


@fault(SOME)
def cycle_of_two_groups(size: int, rng: np.random.Generator) -> Case:
    """Two ranks share two groups and enter them in opposite order."""
    a, b = sorted(int(r) for r in rng.choice(size, 2, replace=False))
    others = [r for r in range(size) if r not in (a, b)]
    job = job_of(size, [Action("all_reduce", red="SUM", line=20)] * 4)
    job.groups = {**job.groups, "left": sorted([a, b, *others[::2]]), "right": sorted([a, b, *others[1::2]])}
    for rank in range(size):
        mine = [g for g in ("left", "right") if rank in job.groups[g]]
        mine = mine[::-1] if rank == b else mine
        own = [Action("all_reduce", g, red="SUM", line=41 if g == "left" else 42) for g in mine]
        job.programs[rank] = [*job.programs[rank], *own, Action("barrier", line=43)]
    return Case(job, [(Verdict.WAIT_CYCLE, [a, b])])


@fault(SMALL)
def cycle_of_three_groups(size: int, rng: np.random.Generator) -> Case:
    """Group i holds ranks i and i + 1; each rank enters its own first, like dining philosophers."""
    job = job_of(size, [Action("all_reduce", red="SUM", line=20)] * 4)
    ring = [0, 1, 2]
    job.groups = {**job.groups, **{f"pair{i}": sorted([i, (i + 1) % 3]) for i in ring}}
    for i in ring:
        own = [Action("barrier", f"pair{i}", line=45), Action("barrier", f"pair{(i + 2) % 3}", line=46)]
        job.programs[i] = [*job.programs[i], *own]
    return Case(job, [(Verdict.WAIT_CYCLE, ring)])


@fault(SOME)
def cycle_of_queued_operations(size: int, rng: np.random.Generator) -> Case:
    """Two ranks issue both operations, in opposite order, on devices that run one operation at a time."""
    a, b = sorted(int(r) for r in rng.choice(size, 2, replace=False))
    job = job_of(size, [Action("all_reduce", red="SUM", line=20)] * 4)
    job.one_at_a_time = True
    job.groups = {**job.groups, "left": [a, b], "right": [a, b]}
    for rank, order in ((a, ("left", "right")), (b, ("right", "left"))):
        own = [Action("all_reduce", g, red="SUM", line=47, waits=False) for g in order]
        job.programs[rank] = [*job.programs[rank], *own, Action("sync")]
    return Case(job, [(Verdict.WAIT_CYCLE, [a, b])])


@fault(SMALL)
def cycle_of_a_queued_operation_and_a_message(size: int, rng: np.random.Generator) -> Case:
    """One rank has a receive before a collective on its device, the other the collective before the send."""
    a, b = sorted(int(r) for r in rng.choice(size, 2, replace=False))
    job = job_of(size, [Action("all_reduce", red="SUM", line=20)] * 4)
    job.one_at_a_time = True
    job.groups = {**job.groups, "pair": [a, b]}
    meet = Action("all_reduce", "pair", red="SUM", line=48, waits=False)
    job.programs[a] = [*job.programs[a], Action("recv", peer=b, line=49, waits=False), meet, Action("sync")]
    job.programs[b] = [*job.programs[b], meet, Action("send", peer=a, line=49, waits=False), Action("sync")]
    return Case(job, [(Verdict.WAIT_CYCLE, [a, b])])


@fault(SMALL)
def cycle_of_a_queued_message_of_the_same_group(size: int, rng: np.random.Generator) -> Case:
    """Both ranks issue the message, but one of them behind the collective, which waits for the other one."""
    a, b = (int(r) for r in rng.choice(size, 2, replace=False))
    job = job_of(size, [Action("all_reduce", red="SUM", line=20)] * 4)
    job.one_at_a_time = True
    meet = Action("all_reduce", red="SUM", line=48, waits=False)
    for rank in range(size):
        own = [meet, Action("sync")]
        if rank == a:
            own.insert(0, Action("recv", peer=b, line=49, waits=False))
        if rank == b:
            own.insert(1, Action("send", peer=a, line=49, waits=False))
        job.programs[rank] = [*job.programs[rank], *own]
    return Case(job, [(Verdict.WAIT_CYCLE, sorted([a, b]))])


@fault(SMALL, dumps=False)
def cycle_that_the_communicator_has_ended(size: int, rng: np.random.Generator) -> Case:
    """The ranks' own search for deadlocks found it, so their operations have failed, also the queued ones."""
    case = cycle_of_a_queued_message_of_the_same_group(size, rng)
    case.job.errors = "deadlock"
    return case


@fault(SOME)
def queued_behind_an_operation_that_a_rank_never_joins(size: int, rng: np.random.Generator) -> Case:
    """One rank never joins. The ranks whose operations are queued behind that collective are its victims."""
    job = job_of(size, [Action("all_reduce", red="SUM", line=20, waits=False)] * 4)
    job.one_at_a_time = True
    bad = pick(rng, size)
    others = [r for r in range(size) if r != bad]
    job.groups = {**job.groups, "others": others}
    for rank in others:
        own = [Action("barrier", line=50, waits=False), Action("barrier", "others", line=51, waits=False)]
        job.programs[rank] = [*job.programs[rank], *own, Action("sync")]
    return Case(job, [(Verdict.NEVER_JOINED, [bad])])


@fault(SMALL)
def sends_that_meet(size: int, rng: np.random.Generator) -> Case:
    """Two ranks first send to each other and would receive afterwards."""
    job = pipeline(size)
    a, b = 0, size - 1
    for rank, peer in ((a, b), (b, a)):
        own = list(job.programs[rank])
        own[-1:] = [Action("send", peer=peer, line=66), Action("recv", peer=peer, line=67), own[-1]]
        job.programs[rank] = own
    return Case(job, [(Verdict.WAIT_CYCLE, sorted([a, b]))])


@fault(SOME)
def receive_without_a_send(size: int, rng: np.random.Generator) -> Case:
    """One rank leaves out its last send and is already in the barrier."""
    job = pipeline(size)
    bad = pick(rng, size - 1)
    job.replace_call(bad, find(job.programs[bad], "send", 5))
    return Case(job, [(Verdict.UNMATCHED_P2P, [bad])])


@fault(SMALL, dumps=False)
def send_to_the_wrong_rank(size: int, rng: np.random.Generator) -> Case:
    """The rank that should receive waits, and so does the sender."""
    job = pipeline(size)
    job.change(0, find(job.programs[0], "send", 3), peer=2, line=65)
    return Case(job, [(Verdict.UNMATCHED_P2P, [0])])


@fault(SOME)
def ends_before_its_last_message(size: int, rng: np.random.Generator) -> Case:
    """The rank issues neither its last message nor the following barrier, in which rank 0 is."""
    job = pipeline(size)
    bad = 1 + pick(rng, size - 2)
    job.programs[bad] = list(job.programs[bad])[: find(job.programs[bad], "send", 5)]
    return Case(job, [(Verdict.NEVER_JOINED, [bad])])


@fault(SOME)
def lone_send(size: int, rng: np.random.Generator) -> Case:
    """One rank sends a message without a receive, while the others are in the next collective."""
    job = job_of(size)
    bad, peer = (int(r) for r in rng.choice(size, 2, replace=False))
    job.replace_call(bad, 20, Action("send", peer=peer, line=68), job.programs[bad][20])
    return Case(job, [(Verdict.UNMATCHED_P2P, [bad])])


@fault(SMALL)
def matched_messages_in_a_group_of_many(size: int, rng: np.random.Generator) -> Case:
    """A correct single pair: no fault."""
    job = job_of(size)
    job.replace_call(0, 20, Action("send", peer=1, line=68), job.programs[0][20])
    job.replace_call(1, 20, Action("recv", peer=0, line=69), job.programs[1][20])
    return Case(job, [])


@fault(SOME)
def message_size_mismatch(size: int, rng: np.random.Generator) -> Case:
    job = pipeline(size)
    bad = pick(rng, size - 1)
    job.change(bad, find(job.programs[bad], "send", 4), numel=333)
    return Case(job, [(Verdict.P2P_SIZE_MISMATCH, [bad])])


@fault(SMALL)
def message_size_mismatch_of_the_receiver(size: int, rng: np.random.Generator) -> Case:
    job = pipeline(size)
    bad = 1 + pick(rng, size - 1)
    job.change(bad, find(job.programs[bad], "recv", 3), numel=2048)
    return Case(job, [(Verdict.P2P_SIZE_MISMATCH, [bad])])
