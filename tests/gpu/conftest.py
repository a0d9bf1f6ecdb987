"""The kit: each test runs on a GPU, where there is one, and over the mock."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.gpu.kits import KITS
from unicomm import Communicator


@pytest.fixture(params=[pytest.param("gpu", marks=pytest.mark.gpu), "mock"])
def kit(request: pytest.FixtureRequest) -> Any:
    return KITS[request.param]()


@pytest.fixture
def comm(kit: Any) -> Iterator[Communicator]:
    """One rank on the kit's device."""
    with kit.new(timeout=60) as made:
        yield made
