"""Fixtures of these tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.comms.membership.casts import Cast


@pytest.fixture
def cast() -> Iterator[Callable[..., Cast]]:
    made: list[Cast] = []

    def make(*args: Any, **kwargs: Any) -> Cast:
        made.append(Cast(*args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.finalize()
