"""The double, compiled on demand; without a C++ compiler its tests are skipped."""

from __future__ import annotations

from collections.abc import Callable

import build_double
import pytest
from double_api import Double


@pytest.fixture(scope="session")
def played() -> Callable[..., Double]:
    """`played(22105, rccl=False)`: the double of that version."""

    def load(version: int = build_double.LATEST, rccl: bool = False) -> Double:
        try:
            return Double(build_double.library(version, rccl))
        except build_double.NoCompiler as error:
            pytest.skip(str(error))

    return load


@pytest.fixture(scope="session")
def double(played) -> Double:
    return played()
