"""What has to hold of a run, whatever happened in it.

`violations` returns a text for each property that does not hold. A text begins with the property's name,
by which the shrinking of a program knows that it still shows the same defect.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from unicomm.comms.errors import (
    AbortedError,
    BackendError,
    CommError,
    CommTimeoutError,
    InvalidArgumentError,
    MismatchError,
    NotReadyError,
    PeerLostError,
    UnsupportedError,
)

from .player import Record, Run, members_of

#: Seconds that an error may come after its deadline.
BOUND = {
    "create": 6.0,
    "split": 6.0,
    "reconf": 10.0,
    "coll": 4.0,
    "msgs": 4.0,
    "batch": 4.0,
    "cause": 10.0,
    "final": 12.0,
    "abort": 5.0,
    "later": 22.0,
}
_CREATIONS = ("create", "split", "reconf")
_ANSWER = 1.2  # seconds in which a rank that is asked has to answer

#: Defects that are known and not repaired yet: what the text of a violation holds, and the reason.
KNOWN: tuple[tuple[str, str], ...] = ()


def is_known(text: str) -> bool:
    """Whether a violation is one of a defect in `KNOWN`."""
    return any(re.search(pattern, text) for pattern, _ in KNOWN)


def unexplained(found: list[str]) -> list[str]:
    """Those violations of one run that no known defect explains.

    Where one left a communicator on some ranks only, whatever follows may be its consequence.
    """
    if any(is_known(text) and text.startswith("some connected") for text in found):
        return []
    return [text for text in found if not is_known(text)]


def violations(run: Run) -> list[str]:
    """The properties that a run breaks, as texts; [] if all hold."""
    if run.stuck is not None:
        return [f"{run.stuck.kind.split(':')[0]}: {run.stuck}"]
    judge = _Judge(run)
    if judge.mixed():
        return [text for record in run.records if record.bug for text in judge.of_record(record)]
    found: list[str] = []
    for record in run.records:
        found += judge.of_record(record)
    return found + judge.of_groups()


class _Judge:
    def __init__(self, run: Run) -> None:
        self._run = run
        self._ops = run.program["ops"]
        self._by_op: dict[int, dict[int, Record]] = {}
        for record in run.records:
            self._by_op.setdefault(record.op, {})[record.rank] = record
        host = run.program["host"]
        # Without its store a rank can neither meet the others nor hear of them.
        self._store_harmed = host in run.died or any(rank == host for rank, _, _ in run.stops)
        self._disturbed = {*run.died, *run.struck, *run.cut_off, *(rank for rank, _, _ in run.stops)}
        self._disturbed |= {rank for rank, _, _ in run.given_up}
        self._calm = not self._store_harmed and not run.cut_off

    def mixed(self) -> bool:
        """Whether a rank's creation has met another one of the same name on the other ranks.

        That is so by design when a rank comes after the others have given up: it joins their next attempt.
        What the program does then is not legal.
        """
        op_of: dict[str, int] = {}
        return any(op_of.setdefault(r.uid, r.op) != r.op for r in self._run.records if r.uid)

    def _kind(self, record: Record) -> str:
        return self._ops[record.op]["op"] if 0 <= record.op < len(self._ops) else "final"

    def _text(self, record: Record) -> str:
        what = f"rank {record.rank} in {self._kind(record)} ({record.op})"
        error = record.error
        return what if error is None else f"{what}: {type(error).__name__} {list(error.culprits)}: {error}"

    # --- one operation of one rank --------------------------------------------------------------------------

    def of_record(self, record: Record) -> list[str]:
        kind, found = self._kind(record), []
        if record.rank in self._run.died and not record.over:
            return []
        if not record.over and kind == "later":
            return []  # the program ended before its thread
        if record.bug:
            name = "wrong result" if record.bug.startswith(("wrong", "rank and size")) else "wrong exception"
            found.append(f"{name}: {self._text(record)}: {record.bug}")
        late = record.ended - record.began - record.limit - BOUND[kind] - self._stopped(record)
        if late > 0:
            found.append(f"too late by {late:.1f} s: {self._text(record)}")
        if record.error is not None:
            found += self._of_error(record, kind)
        return found

    def _stopped(self, record: Record) -> float:
        """Seconds that the rank itself, or the host of the store, was stopped meanwhile."""
        ranks = {record.rank, self._run.program["host"]}
        if self._kind(record) == "reconf":
            ranks.add(record.members[0])  # which holds the store of the attempt
        return sum(
            max(0.0, min(until, record.ended) - max(since, record.began))
            for rank, since, until in self._run.stops
            if rank in ranks
        )

    def _of_error(self, record: Record, kind: str) -> list[str]:
        error, found = record.error, []
        assert error is not None
        text = self._text(record)
        if isinstance(error, (InvalidArgumentError, UnsupportedError, MismatchError)):
            found.append(f"wrong kind of error: {text}")
        if isinstance(error, BackendError) and "please report this" in str(error):
            found.append(f"internal error: {text}")
        unharmed = not self._disturbed and not self._failed_before(record)
        if type(error) is BackendError and kind in ("coll", "msgs") and unharmed:
            found.append(f"error without a fault: {text}")
        if kind in ("final", "abort", "later", "cause") or isinstance(error, (NotReadyError, AbortedError)):
            return found
        store_failed = error.message.startswith(("the store failed", "the store did not answer"))
        nameless = kind in _CREATIONS and not error.culprits and not store_failed
        if nameless and not record.parent_broken and not self._all_came(record):
            found.append(f"no culprits: {text}")
        if not self._calm or self._strained(record) or self._failed_before(record):
            return found
        if isinstance(error, (CommTimeoutError, PeerLostError)) and not self._is_told(record, error):
            wrong = [who for who in self._named(record, kind) if self._is_innocent(who, record)]
            if wrong:
                found.append(f"false accusation of {wrong}: {text}")
        return found

    def _all_came(self, record: Record) -> bool:
        there = self._by_op.get(record.op, {})
        return all(r in there and r not in self._disturbed for r in record.members)

    def _named(self, record: Record, kind: str) -> list[int]:
        """The processes that an error names, without those that are in an earlier operation."""
        error = record.error
        assert error is not None
        if kind == "msgs" and self._is_from_anywhere(record, error):
            return []  # every rank may be the one that was to send
        named = [r for r in error.culprits if r not in error.late]
        if kind in ("create", "split"):
            return named
        return [record.members[r] for r in named if r < len(record.members)]

    def _is_told(self, record: Record, error: CommError) -> bool:
        """Whether another rank failed first, in another operation, and told this one of its error.

        Who is to blame is judged where that rank failed.
        """
        teller = self._teller(record, error)
        return any(
            other.rank == teller
            and other.op != record.op
            and other.error is not None
            and other.error.culprits == error.culprits
            and other.ended <= record.ended + _ANSWER  # it tells the others before its own call raises
            for other in self._failed_with(record)
        )

    def _teller(self, record: Record, error: CommError) -> int | None:
        """The process that failed first and told this one, if an error names one."""
        gave_up = re.search(r" when rank (\d+) gave up: ", error.message)
        if gave_up is None or int(gave_up[1]) >= len(record.members):
            return None
        return record.members[int(gave_up[1])]

    def _is_from_anywhere(self, record: Record, error: CommError) -> bool:
        """Whether an error is that of a receive from any rank: its own, or one that another rank has told."""
        mine = self._ops[record.op]
        return mine["any"] or any(
            self._kind(other) == "msgs"
            and self._ops[other.op]["comm"] == mine["comm"]
            and self._ops[other.op]["any"]
            and other.error is not None
            and other.error.culprits == error.culprits
            and other.began <= record.ended
            for other in self._run.records
        )

    def _failed_before(self, record: Record) -> bool:
        """Whether the communicator may have been broken by an earlier operation, of any rank.

        For a split also by a later one: a rank that is not in it, or is done with it, goes on.
        """
        last = len(self._ops) if self._kind(record) == "split" else record.op
        return any(
            other.op < last and other.op != record.op and other.ended <= record.ended
            for other in self._failed_with(record)
        )

    def _failed_with(self, record: Record) -> Iterator[Record]:
        """The operations of the record's communicator that failed on a rank."""
        comm = self._ops[record.op]["comm"]
        for other in self._run.records:
            ours = other.op in range(len(self._ops)) and self._ops[other.op]["comm"] == comm
            if ours and other.error is not None:
                yield other

    def _strained(self, record: Record) -> bool:
        """Whether ranks came so late, or were stopped so long, that others' deadlines have passed."""
        most = 0.15 * record.limit  # a rank that connects keeps a fifth of its time for telling the others
        began = [r.began for r in self._by_op.get(record.op, {}).values() if r.rank in record.members]
        stops = [
            until - since
            for _, since, until in self._run.stops
            if since < record.ended and until > record.began
        ]
        return self._kind(record) in _CREATIONS and max(max(began) - min(began), *stops, 0.0) > most

    def _is_innocent(self, who: int, record: Record) -> bool:
        """Whether a process has done all that it should have when the error came."""
        there, error = self._by_op.get(record.op, {}), record.error
        other = there.get(who)
        if who in self._disturbed or other is None or error is None:
            return False
        asked = record.ended - _ANSWER
        teller = self._teller(record, error)
        # The answer, or what another rank tells, may be from before one of the two was stopped.
        if "does not answer" not in error.message or teller is not None:
            asked -= self._stopped(record)
        if teller in there and teller != record.rank:
            asked -= self._stopped(there[teller])
        if self._came(other, error) > asked:
            return False
        # A rank that leaves tells the others before its own call raises.
        soon = _ANSWER if isinstance(error, PeerLostError) else 0.0
        return not (other.error is not None and other.ended <= record.ended + soon)

    def _came(self, other: Record, error: CommError) -> float:
        """When a process came to what the error says that it has missed."""
        missed = re.search(r" did not (reach .+?) within ", error.message)
        if missed is None:
            return other.began
        # Where nothing else has happened it is the network that was too slow for the deadline.
        never = other.began if self._disturbed else float("inf")
        return other.reached.get(missed[1], never)

    # --- what the ranks have in common ----------------------------------------------------------------------

    def of_groups(self) -> list[str]:
        found: list[str] = []
        for i, op, groups in members_of(self._run.program):
            for group in groups:
                records = [r for r in self._by_op.get(i, {}).values() if r.rank in group and r.over]
                if op["op"] in _CREATIONS:
                    found += self._of_creation(records)
                if op["op"] == "cause" and self._calm:
                    causes = {r.said for r in records if r.said is not None and r.rank not in self._disturbed}
                    if len(causes) > 1:
                        found.append(f"different causes: {sorted(causes)} in cause ({i})")
        return found + self._of_single_kill()

    def _of_creation(self, records: list[Record]) -> list[str]:
        uids = {r.uid for r in records if r.error is None}
        if len(uids) > 1:
            return [f"different communicators: {sorted(uids)}: {self._text(records[0])}"]
        if not self._calm:
            return []
        if records and self._kind(records[0]) == "reconf" and self._strained(records[0]):
            return []  # the first rank keeps the store as long as its own deadline allows
        sound = [r for r in records if r.rank not in self._disturbed]
        for failed in (r for r in sound if r.error is not None):
            # A rank may connect, and be killed or stopped in its next operation while others are in this one.
            connected = [r for r in records if r.error is None]
            good = [r.rank for r in connected if not self._harmed_before(failed.ended, r)]
            if len(good) < len(connected) and self._is_end_of(failed, connected):
                continue  # it held the store, and had answered some of the others
            if self._has_lost_the_first(failed):
                continue  # the same, and it had not connected itself
            if self._has_lost_the_store(failed):
                continue  # the same, of a rank that is not among them
            if good:
                return [f"some connected, some failed: ranks {good} are connected, but {self._text(failed)}"]
        return []

    def _is_end_of(self, failed: Record, connected: list[Record]) -> bool:
        """Whether a rank timed out because of one that had connected, and was stopped since, or failed
        because the store was gone with such a one.

        Or because of one that was stopped in its last step, and connected when it went on.
        """
        error = failed.error
        assert error is not None
        harmed = {r.rank for r in connected if self._harmed_before(failed.ended, r)}
        if not harmed & set(self._named(failed, self._kind(failed))):
            return False
        return isinstance(error, CommTimeoutError) or failed.store_failed

    def _has_lost_the_first(self, failed: Record) -> bool:
        """Whether a reconfiguration failed because its first rank, which held the store, was killed."""
        first, error = failed.members[0], failed.error
        named = error is not None and 0 in error.culprits
        return (
            self._kind(failed) == "reconf"
            and named
            and self._run.died.get(first, failed.ended) < failed.ended
        )

    def _has_lost_the_store(self, failed: Record) -> bool:
        """Whether a split failed because the store's holder, which is not in it, was stopped or killed."""
        holders = set(self._named(failed, self._kind(failed))) - set(failed.members)
        stopped = {r for r, since, _ in self._run.stops if since < failed.ended}
        dead = {r for r, when in self._run.died.items() if when < failed.ended}
        return failed.store_failed and bool(holders & (stopped | dead))

    def _harmed_before(self, when: float, record: Record) -> bool:
        stopped = any(
            r == record.rank and since < when and (record.ended <= since or when < until)
            for r, since, until in self._run.stops
        )
        return stopped or self._run.died.get(record.rank, when) < when

    def _of_single_kill(self) -> list[str]:
        """If one rank was killed and nothing else happened, every error names exactly that rank."""
        run = self._run
        quiet = not (run.stops or run.struck or run.cut_off or run.given_up) and len(run.died) == 1
        if not quiet or run.program["host"] in run.died:
            return []
        if any(op["op"] in ("late", "final", "later", "abort", "reconf") for op in self._ops):
            return []
        (dead,) = run.died
        found = []
        for record in run.records:
            kind, error = self._kind(record), record.error
            if error is None or kind in ("cause", "final") or isinstance(error, NotReadyError):
                continue
            if any(other.ended <= run.died[dead] for other in self._failed_with(record)):
                continue  # it had failed before, and this rank is told of that
            named = {record.members[r] for r in error.culprits if r < len(record.members)}
            if kind in ("create", "split"):
                named = set(error.culprits)
            # A rank that could not reach the dead one left, and says why.
            if dead not in named and f"rank {dead}" not in error.message:
                found.append(f"not the dead rank {dead}: {self._text(record)}")
        return found
