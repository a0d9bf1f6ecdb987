"""Tests, in the rooms that they test, and what they share.

A test imports a helper by its path from the root of the repository: `from tests.comms.calls import call`.
"""

import os
from pathlib import Path

ROOT = Path(__file__).parent.parent

# Programs that tests start as processes import these helpers too.
_path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
if str(ROOT) not in _path:
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, _path)])
