"""Runs torch's tests one after the other in this process and appends a line of JSON to a file for each.

    python -m tests.compat.worker LOG TEST...

The environment says which backend (see conductor.py). Without tests it prints the names of all.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ENOUGH = 6000  # characters of a failed test's output


def run_test(case: unittest.TestCase) -> dict[str, Any]:
    """Runs one test and returns its outcome: passed, skipped with the reason, or failed with the error."""
    result = unittest.TestResult()
    began = time.monotonic()
    with output_in_file() as output:
        case.run(result)
        text = output.read_text(errors="replace")
    codes = getattr(case, "exit_codes", [])  # of ranks; none if the test was skipped before they started
    found: dict[str, Any] = {"seconds": round(time.monotonic() - began, 2), "exit codes": codes}
    if bad := result.errors + result.failures:
        return found | {"outcome": "failed", "error": bad[0][1][-ENOUGH:], "output": text[-ENOUGH:]}
    if result.skipped:
        return found | {"outcome": "skipped", "error": result.skipped[0][1]}
    return found | {"outcome": "passed", "error": ""}


@contextlib.contextmanager
def output_in_file() -> Iterator[Path]:
    """Stdout and stderr of this process and its children go to a file meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "output")
        kept = [os.dup(1), os.dup(2)]
        with path.open("wb") as file:
            for number in (1, 2):
                os.dup2(file.fileno(), number)
            try:
                yield path
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                for number, old in zip((1, 2), kept, strict=True):
                    os.dup2(old, number)
                    os.close(old)


def preload() -> None:
    """Imports what every forked rank needs. It starts no thread, so that forking stays safe."""
    from torch.distributed.config import use_torchcomms

    if use_torchcomms:
        import unicomm.c10d.process_group  # noqa: F401
        from unicomm.backends.registry import find_backend

        find_backend(os.environ["UNICOMM_BACKEND"])


def main() -> None:
    from tests.compat import torch_tests

    if len(sys.argv) < 3:
        print("\n".join(torch_tests.names()))
        return
    preload()
    with open(sys.argv[1], "a") as log:
        for name in sys.argv[2:]:
            found = {"test": name} | run_test(torch_tests.TestTorch(name))
            log.write(json.dumps(found) + "\n")
            log.flush()


if __name__ == "__main__":
    main()
