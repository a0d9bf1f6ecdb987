"""The fixture `rehearse`, for tests of programs that run on many ranks.

Use it by `pytest_plugins = ["unicomm.testing.pytest_plugin"]` in conftest.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unicomm.rehearse import rehearsal

Rehearse = Callable[..., rehearsal.Rehearsal]


@pytest.fixture
def rehearse() -> Rehearse:
    """Returns `rehearse(program, ranks=64)`, which fails the test if the operations do not fit.

    It takes the arguments of `unicomm.rehearse.rehearsal.rehearse`, and returns its result.
    """

    def check(
        program: str | Path | Callable[[], object], ranks: int = 64, **options: Any
    ) -> rehearsal.Rehearsal:
        done = rehearsal.rehearse(program, ranks, **options)
        if not done.good:
            pytest.fail(done.unusable or done.report.findings[0].sentence, pytrace=False)
        return done

    return check
