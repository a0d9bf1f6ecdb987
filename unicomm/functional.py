"""`import unicomm.functional as F`: a second name of the module unicomm.c10d.functional."""

import sys
from typing import TYPE_CHECKING

from unicomm.c10d import functional

if TYPE_CHECKING:
    from unicomm.c10d.functional import *  # noqa: F403

sys.modules[__name__] = functional
