"""unicomm/_core.pyi is what the built core says: `make stubs` writes it."""

import subprocess
import sys
from pathlib import Path

STUBS = Path(__file__).parent.parent.parent / "csrc" / "base" / "stubs.py"


def test_the_stub_is_current():
    done = subprocess.run(
        [sys.executable, STUBS, "--check"], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
