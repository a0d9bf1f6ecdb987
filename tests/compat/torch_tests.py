"""torch's own tests of torch.distributed, as a class that unittest can run.

torch's wheel has the tests (`torch.testing._internal.distributed.distributed_test`) without a class that says
how ranks start. This module adds it. The environment must have BACKEND, WORLD_SIZE and INIT_METHOD before the
import: torch's module reads them when it is imported.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types

import torch.multiprocessing

if "torchcomms" not in sys.modules and importlib.util.find_spec("torchcomms") is None:
    # With the switch torch's test helpers import torchcomms, to ask for which backends it has tests.
    sys.modules["torchcomms"] = types.ModuleType("torchcomms")
    sys.modules["torchcomms"].is_backend_built = lambda name: False  # type: ignore[attr-defined]

from torch.testing._internal.distributed import distributed_test

START = "COMPAT_START"  # how ranks start: "fork" (the default, a tenth of a second) or "spawn", as torch's CI


class TestTorch(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """One test method for each of torch's. The process that runs it starts WORLD_SIZE ranks for each test."""

    def setUp(self) -> None:
        super().setUp()
        distributed_test.INIT_METHOD = os.environ["INIT_METHOD"]  # a new file, which super() has chosen
        context = torch.multiprocessing.get_context(os.environ.get(START, "fork"))
        self._start_processes(context.Process)

    def tearDown(self) -> None:
        self.exit_codes = [process.exitcode for process in self.processes]
        for process in self.processes:
            process.kill()
            process.join()
        super().tearDown()


def names() -> list[str]:
    """The names of all tests, in alphabetical order."""
    return sorted(name for name in dir(TestTorch) if name.startswith("test_"))
