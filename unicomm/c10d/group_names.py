"""The names of process groups' communicators, which errors, records and reports show."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

from unicomm.flight_recorder.texts import format_ranks

DEFAULT = "default"  # the default group
_LONGEST = 200  # characters of a list of ranks in a name
_UNDESCRIBED = ("", "undefined")  # torch's descriptions of groups that the program does not describe

_made: Counter[str] = Counter()  # this process's groups, by their names without a number


def group_name(ranks: Sequence[int], desc: str | None) -> str:
    """Returns the name of a new group's communicators: what the program says of it, and its members' ranks.

    Groups of this process that share both are numbered, so that no two names are equal. The members need not
    agree on the number, so they cannot meet under this name.
    """
    name = members_name(ranks)
    if desc not in (None, *_UNDESCRIBED):
        name = f"{desc} ({name})"
    _made[name] += 1
    return name if _made[name] == 1 else f"{name} #{_made[name]}"


def members_name(ranks: Sequence[int]) -> str:
    """Returns a name on which all members of a group agree."""
    text = f"ranks {format_ranks(list(ranks))}"
    if len(text) > _LONGEST:
        digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        text = f"{len(ranks)} ranks from {min(ranks)} to {max(ranks)} ({digest})"
    return text
