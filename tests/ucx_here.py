"""Skips tests that need UCX where there is none."""

import pytest

from unicomm.backends.ucx.library import why_not

needs_ucx = pytest.mark.skipif(bool(why_not()), reason=f"no UCX: {why_not()}")
