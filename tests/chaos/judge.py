"""Whether a round went as docs/failures.md promises."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.play import Play, Seen
from tests.chaos.rounds import FAULTS, LACKS, Round
from tests.chaos.spec import CREATION, RINGS, SPLITS

#: What the program, torch or Python raise when the process has no room, beside our own error.
_NO_ROOM = tuple(f"unexpected {name}" for name in ("MemoryError", "RuntimeError", "OSError", "ImportError"))


def judge(play: Play, folder: Path) -> list[str]:
    """What was wrong, in words; nothing when the round was good."""
    wrong = [f"rank {r} did not end" for r in play.hung if not _waits_in_mpi(play, r)]
    for rank, seen in enumerate(play.seen):
        if rank not in play.hung:
            said = _of_rank(play, rank, seen)
            wrong += [f"rank {rank} at step {seen.step}: {what}" for what in said]
    return wrong + [f"left behind: {name}" for name in left_behind(play, folder)]


def _waits_in_mpi(play: Play, rank: int) -> bool:
    """Who had finished before another was killed cannot know that MPI_Finalize waits for it: docs/mpi.md."""
    plan, seen = play.plan, play.seen[rank]
    return plan.backend == "mpi" and plan.act == "kill" and seen.outcome == "right" and not seen.left


def _of_rank(play: Play, rank: int, seen: Seen) -> list[str]:
    plan = play.plan
    if rank in plan.victims and plan.act == "kill":
        # Killed before it was over, or after: it had nothing to say then.
        return [] if seen.exit_code in (-9, 0) else [f"ended with code {seen.exit_code}"]
    wrong = []
    if _was_aborted(play, rank):
        return []
    if not _may_end_so(play, rank, seen):
        wrong.append(f"{seen.outcome or 'nothing'} {seen.culprits} {seen.text}")
    if seen.exit_code != 0:
        wrong.append(f"ended with code {seen.exit_code}")
    if seen.left and not (plan.act == "no address space" and rank in plan.victims):
        # A library whose constructor found no room for a thread keeps its descriptors.
        wrong.append(f"still holds {seen.left}")
    if seen.afterwards:
        wrong.append(seen.afterwards)
    if plan.scene == "reconfigure" and "Error" in seen.outcome and rank not in plan.victims:
        wrong += ["did not go on"] * (seen.afterwards is None)
    took = seen.when - play.struck
    if (
        play.struck
        and "Error" in seen.outcome
        and rank not in plan.victims
        and took > FAULTS[plan.fault].within
        and not _could_not_tell(plan)
    ):
        wrong.append(f"{seen.outcome} only after {took:.1f} s")
    return wrong


def _may_end_so(play: Play, rank: int, seen: Seen) -> bool:
    plan = play.plan
    expected = FAULTS[plan.fault].error
    if rank in plan.victims and plan.act in LACKS:
        # Who creates nothing, and has what it needs, does not notice.
        if plan.act == "no address space" and seen.outcome in _NO_ROOM:
            return True
        return seen.outcome in ("BackendError", "right")
    if rank in plan.victims and plan.act == "leave":
        return seen.outcome == "right" or _is_consequence(play, rank, seen)
    if seen.outcome == "right":
        return expected == "right" or _came_too_late(play) or _hurt_nobody(play)
    if rank in plan.victims and plan.act == "stop":
        # When it goes on the others have given up, and gone, or have reconfigured without it.
        others = ("PeerLostError", "AbortedError") if plan.scene == "reconfigure" else ("PeerLostError",)
        return seen.outcome in (expected, *others)
    causes = plan.lost[rank]
    named = set(seen.culprits)
    if seen.outcome == expected and named and named <= causes:
        return True
    if plan.scene == "creation" and seen.outcome == "BackendError":
        return named == causes  # the store's process is gone, which held nothing but the store for them
    if _could_not_tell(plan) and seen.outcome == "CommTimeoutError":
        return named == causes
    if plan.act == "no address space" and seen.outcome == "AbortedError":
        return named == causes  # what Python or torch raised within an operation interrupted it
    if plan.act in LACKS and seen.outcome == "BackendError":
        return named == causes  # they were creating something together
    if FAULTS[plan.fault].leads and seen.outcome == "AbortedError":
        # It had read in the first rank's store that all are connected, and the others could not any more:
        # docs/reconfigure.md. They ended what it had begun with them.
        failed = {r for r, s in enumerate(play.seen) if s.outcome == expected and set(s.culprits) == causes}
        return bool(named) and named <= failed
    return _is_consequence(play, rank, seen)


def _could_not_tell(plan: Round) -> bool:
    """Who has no room for the thread that asks the store comes nowhere, and the others wait for it."""
    return plan.act == "no address space" and plan.at == CREATION


def _was_aborted(play: Play, rank: int) -> bool:
    """Gloo, or the C++ library, aborts a process in which it cannot start a thread."""
    plan = play.plan
    return (
        plan.act == "no address space"
        and rank in plan.victims
        and plan.backend != "shm"
        and play.seen[rank].exit_code == -6
    )


def _came_too_late(play: Play) -> bool:
    """At the very end of a round nothing is left to be disturbed."""
    victims = [play.seen[v] for v in play.plan.victims]
    return any(v.step >= play.plan.steps - 1 or v.outcome == "right" for v in victims)


def _hurt_nobody(play: Play) -> bool:
    return play.plan.act in LACKS and play.seen[play.plan.victims[0]].outcome == "right"


def _is_consequence(play: Play, rank: int, seen: Seen) -> bool:
    """In and beside a split each communicator knows its own ranks only, and a rank that ends by its error is
    lost for those that were not told why. Elsewhere everybody has to know the cause.
    """
    plan = play.plan
    if plan.scene != "operations":
        return False
    if not any(s.step in (*SPLITS, plan.split_at) for s in play.seen):
        return False
    ended = {r for r, s in enumerate(play.seen) if "Error" in s.outcome} - {rank}
    if plan.act == "stop" and seen.outcome == "CommTimeoutError":
        return True  # who waits for those that wait for the victim elsewhere gives up as well
    others = plan.lost[rank] | ended
    return seen.outcome == "PeerLostError" and bool(seen.culprits) and set(seen.culprits) <= others


def left_behind(play: Play, folder: Path) -> list[str]:
    """Files of processes that were not killed, but for the ranks' own output and copies of their rings."""
    killed = {play.seen[v].inner_pid for v in play.plan.victims if play.plan.act == "kill"}
    killed |= {play.seen[r].inner_pid for r in play.hung}
    killed |= {play.seen[v].inner_pid for v in play.plan.victims if _was_aborted(play, v)}
    files = [
        p
        for p in folder.rglob("*")
        if p.is_file() and p.suffix not in (".log", ".stacks") and p.parent.name != RINGS
    ]
    return [p.name for p in files if not any(f"-{pid}-" in p.name for pid in killed)]
