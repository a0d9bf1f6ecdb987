"""Split: a new communicator of some ranks of another one."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from unicomm._core import FaultCode
from unicomm.c10d.compat import PrefixStore
from unicomm.comms.backend import ChecksPeers, SplitsInLibrary
from unicomm.comms.errors import BackendError, CommError, CommTimeoutError
from unicomm.comms.execution.engine import Engine
from unicomm.comms.execution.hooks import next_op_id
from unicomm.comms.execution.member import Member
from unicomm.comms.failures.faults import FINALIZED, Fault, error_of, in_global_ranks
from unicomm.comms.failures.first_cause import await_cause
from unicomm.comms.failures.store_client import is_store_failure
from unicomm.comms.operations.call import OpArgs
from unicomm.comms.options import CommOptions, copy_hints, read_hints

from .create import Created, Request, create
from .store_users import using


@dataclass(frozen=True)
class Split:
    """A checked call of `Communicator.split`; `connect` carries it out.

    `engine`, `member`: of the parent. `meeting`: the name under which the ranks meet, by default `name`.
    """

    engine: Engine
    member: Member
    ranks: list[int]
    name: str
    options: CommOptions
    args: OpArgs
    meeting: str = ""

    def connect(self) -> Created | None:
        """Connects the child. None on a rank that is not a member of it."""
        engine, member, options = self.engine, self.member, self.options
        library = member.backend if isinstance(member.backend, SplitsInLibrary) else None
        if library is not None and library.splits_when_idle:
            self._wait_until_idle()
        if not self.ranks:
            if library is not None:
                library.split_away(options.timeout)
            return None
        # Below the parent's uid, so that communicators of the same name under other parents never meet.
        store = None if member.store is None else PrefixStore(f"unicomm-split/{member.uid}", member.store)
        labels = [member.labels[r] for r in self.ranks]
        asked = Request(
            member.asked_for,
            member.device,
            self.name or f"{member.name}_{min(self.ranks)}",
            store,
            rank=self.ranks.index(member.rank),
            size=len(self.ranks),
            options=options,
            world=member.world,
            labels=labels,
            check_peers=self._check_peers,
            parent=member.backend,
            color=min(self.ranks),
            meeting=self.meeting,
        )
        limit = options.timeout
        needed = store if len(labels) > 1 else None
        with engine.located("split"), using(needed, asked.name, labels, limit, self._check_peers):
            try:
                return create(asked)
            except (BackendError, CommTimeoutError) as error:
                # If the cause is known, the parent tells only who has given up because of it.
                if is_store_failure(error) and not error.absent:
                    # A rank or host that is gone may be the cause, and then the error names it. If the rank
                    # that holds the store is known, only that one can be: others may just have finalized.
                    holders = [r for r in self.ranks if self.member.labels[r] in error.culprits]
                    await_cause(partial(self._check_peers, holders or None), limit)
                raise

    def _check_peers(self, ranks: Sequence[int] | None = None) -> None:
        """Raises if the parent is broken, or if one of `ranks`, by default the child's, is gone from it.

        A rank that has finalized the parent does not break it for the others.
        """
        try:
            self._check_parent(self.ranks if ranks is None else ranks)
        except CommError as error:
            # Errors of a split name global ranks.
            raise in_global_ranks(error, self.member.labels) from None

    def _check_parent(self, ranks: Sequence[int]) -> None:
        with self.engine.located("split"):
            self.engine.check_open("split")
            backend = self.member.backend
            if not isinstance(backend, ChecksPeers):
                return
            others = [r for r in ranks if r != self.member.rank]
            try:
                backend.check_peers(others)
            except CommError as error:
                self.engine.break_(error)
                raise
            if left := backend.left(others):
                raise error_of(Fault(FaultCode.PEER_LOST, dead=tuple(left), detail=FINALIZED))

    def _wait_until_idle(self) -> None:
        executor, timeout = self.engine.executor, self.options.timeout
        if not executor.drain(timeout):
            late = ", ".join(f"{work.name} #{work.seq}" for work in executor.pending())
            raise self.engine.error(
                CommTimeoutError,
                "split",
                f"still pending after {timeout:g} s: {late}; the library splits an idle communicator only",
                "find out which ranks are missing in these operations; with the hint split_by=init no rank"
                " waits for them",
            )
        self.engine.check_open("split")


def plan_split(
    engine: Engine,
    ranks: Sequence[int],
    name: str,
    hints: Mapping[str, str | bool] | None,
    timeout: Any,
    meeting: str = "",
) -> Split:
    """Checks the arguments of `Communicator.split`."""
    engine.check_open("split")
    engine.refuse_capture("split")
    member = engine.member
    size, me = member.size, member.rank

    try:
        chosen = [operator.index(r) for r in ranks if not isinstance(r, bool)]
        usable = len(chosen) == len(ranks) and all(0 <= r < size for r in chosen)
    except TypeError:
        usable = False
    if not usable:
        text = f"ranks={ranks!r} is no list of ranks of this communicator"
        engine.invalid("split", text, f"ranks are whole numbers from 0 to {size - 1}")
    if len(set(chosen)) != len(chosen):
        engine.invalid("split", f"ranks {chosen} hold one twice", "name each rank once")
    if chosen and me not in chosen:
        text = f"ranks {chosen} do not include this one"
        engine.invalid("split", text, "pass [] on ranks that are not to be members")
    with engine.located("split"):
        options = CommOptions(
            timeout=engine.read_timeout("split", timeout),
            abort_process_on_timeout_or_error=member.options.abort_process_on_timeout_or_error,
            enable_reconfigure=False,  # the child's store is that of its parent's epoch
            hints=dict(member.options.hints) if hints is None else copy_hints(hints),
        )
        read_hints(options.hints, member.asked_for.capabilities.hints, member.asked_for.name)
    args = OpArgs("split", next_op_id(), ranks=chosen, child=name, timeout=options.timeout, hints=hints)
    return Split(engine, member, chosen, name, options, args, meeting)
