"""How the members of a communicator-to-be meet and agree, over any `torch.distributed` store.

All members call `meet` with the same name; it returns when all are there and agree on `hello`, or raises
the same error on every member that came. Only the members touch the store, so groups may meet in any order.

The protocol
------------
Keys live under ``unicomm/<name>/<group>/``, where <group> is ``world`` when no labels are given and a hash
of the labels otherwise. ``generation`` there counts the meetings that have been decided; a meeting happens
under ``<generation>/``. It is a sequence of steps, numbered from 0 (the meeting itself), one for each
collective call; every step works the same way, under ``<generation>/<step>/``:

1. Each member posts its value under its rank, by compare-and-set, so that a second process with the same
   rank is noticed at once. Then it adds 1 to ``arrived``.
2. The member that makes ``arrived`` complete is the last comer. It reads all posts, compares their headers
   and puts the outcome into ``result``. All the others block on ``result``.
3. A member whose deadline passes, or that is interrupted, puts a failure into ``result``. ``abandon``
   elects the one that looks who is missing, so that a big job does not storm the store.

``result`` is written by compare-and-set only: the first outcome stands and everybody takes that one, also a
member that wanted to write another. So no member can fail while the others succeed, and nobody can succeed
alone. An outcome in step 0 ends the generation: its writer moves ``generation`` on, and whoever comes and
finds a decided generation moves it on too, should the writer have died in between. Hence a late comer never
meets the posts of an attempt that failed: it starts the next attempt, where those who retry join it.

Cleaning. A post is deleted by its owner after a success (the last comer has read it). The shared keys of a
step go when all have posted the next one, because then all have read the outcome, and those of the final
step with the last ``closed``. After a failure nobody can know who still reads, so the keys stay, marked by
``failed``, until the next success under this name: by then every member has left the failed attempt.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from unicomm.comms.errors import (
    AbortedError,
    BackendError,
    CommError,
    CommTimeoutError,
    InvalidArgumentError,
    MismatchError,
    NotReadyError,
    PeerLostError,
)
