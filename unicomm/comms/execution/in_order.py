"""The order of a communicator's operations: held while one is issued."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .engine import Engine


class InOrder:
    """One call of a communicator at a time, in the order of the calls; the fast path stays out meanwhile.

    A class, for a generator costs each operation a microsecond.
    """

    __slots__ = ("_engine",)

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __enter__(self) -> None:
        engine = self._engine
        engine._order.acquire()
        engine.fast.block()
        try:
            engine.seal_lane()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        self._engine.fast.unblock()
        self._engine._order.release()
