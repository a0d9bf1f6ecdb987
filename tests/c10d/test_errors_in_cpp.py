"""Errors of collectives that C++ code calls and waits for: `wait_tensor` must not return unwritten memory."""

import pytest

from tests.c10d.launch import forked

pytestmark = pytest.mark.processes


def test_every_wait_raises(forked_programs):
    done = forked(forked_programs, 2, "errors_in_cpp.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all raised") == 2
