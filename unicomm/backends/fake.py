"""A backend for one process that plays any rank of any size: no data move, and operations complete at once.

It serves to try out a program's control flow and memory at any scale. Arguments are checked and operations
recorded as on a real backend; outputs keep their values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unicomm.comms.backend import (
    Backend,
    Capabilities,
    ExtendsDeadlines,
    Reconfigures,
    RunsCollectives,
    Setup,
)
from unicomm.comms.operations.call import Call, Message
from unicomm.comms.operations.dtypes import DTYPES
from unicomm.comms.operations.reduction import RedOpType
from unicomm.comms.operations.table import OPERATIONS, Kind


class FakeBackend(Backend, RunsCollectives, ExtendsDeadlines, Reconfigures):
    name = "fake"
    protocol_version = 1
    capabilities = Capabilities(
        device_types=frozenset({"cpu", "cuda", "xpu", "mps", "meta"}),
        operations=frozenset(n for n, row in OPERATIONS.items() if row.kind is Kind.COLLECTIVE),
        reduce_dtypes=frozenset(DTYPES),
        reduce_ops=frozenset(RedOpType),
        moves_data=False,
    )

    @classmethod
    def connect(cls, setup: Setup) -> FakeBackend:
        return cls()

    @classmethod
    def reachable_at(cls, hints: Mapping[str, Any]) -> str:
        return ""

    def run(self, call: Call) -> None:
        pass

    def exchange(self, messages: Sequence[Message], timeout: float) -> None:
        pass

    def abort(self) -> None:
        pass

    def expect_slow(self, name: str, seconds: float) -> None:
        pass

    def close(self) -> None:
        pass
