"""Groups of some of the ranks: where their members meet, and how `new_group` makes them under the switch.

While the switch is on, torch's `new_group` splits the default group. A split cannot give another backend,
keep the order of the ranks (`sort_ranks=False`) or leave out the other ranks
(`use_local_synchronization=True`), and torch's names of split groups repeat once a group was destroyed.
`install` has `new_group` go torch's ordinary way instead, which asks for a communicator. That communicator is
split from the default group's if the backend is the same.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .compat import (
    PrefixStore,
    Store,
    devices_of_backend,
    new_group_with_tag,
    replace_split_of_new_group,
)
from .group_names import DEFAULT, group_name, members_name

if TYPE_CHECKING:
    from unicomm.comms.communicator import Communicator

_here = threading.local()


@dataclass(frozen=True)
class MeetingPlace:
    """Where the members of a new group meet.

    Attributes:
        name: the name of the group's communicators.
        meeting, store: a name and a store that exactly the members share.
    """

    name: str
    meeting: str
    store: Store


def meeting_place(ranks: Sequence[int], desc: str | None, name: str, store: Store) -> MeetingPlace:
    """Returns where the members of a new group meet.

    `ranks`: the global ranks of the members; empty for the default group. `desc`, `name`, `store`: torch's.

    torch's name for a group counts the groups that a rank knows, and the store it passes has that name as
    prefix. Ranks know different numbers of groups once some of them have made a group of their own; they
    would then wait in different places, as with torch's own backends. All members agree on the ranks of the
    group.
    """
    if not ranks:
        return MeetingPlace(DEFAULT, name, store)
    for prefix in ("{device}/", "{group}/"):
        if not isinstance(store, PrefixStore):
            raise AssertionError(f"torch put no prefix {prefix} before the keys of {store}")
        store = store.underlying_store
    return MeetingPlace(group_name(ranks, desc), members_name(ranks), PrefixStore("unicomm-groups", store))


def install() -> None:
    """Has `new_group` call `_new_group` while the switch is on."""
    replace_split_of_new_group(_new_group)


def _new_group(
    *,
    ranks: Sequence[int] | None,
    timeout: Any,
    backend: str | None,
    pg_options: Any,
    use_local_synchronization: bool,
    **more: Any,
) -> Any:
    """Takes the arguments of `dist.new_group` and returns what it returns."""
    import torch.distributed as dist

    _here.all_ranks_call = not use_local_synchronization
    try:
        group = new_group_with_tag(
            ranks,
            timeout,
            backend,
            pg_options,
            None,
            use_local_synchronization=use_local_synchronization,
            **more,
        )
        if not isinstance(group, dist.ProcessGroup) and not use_local_synchronization:
            _stay_out(backend)
    finally:
        _here.all_ranks_call = False
    return group


def parent_of(kind: str, chosen: str) -> Communicator | None:
    """Returns the default group's communicator for a device type if a new group may be split from it.

    It may if its backend is the `chosen` one. Some libraries also need the other ranks in a split, which
    therefore must call `new_group`, too.
    """
    from unicomm.comms.backend import SplitsInLibrary

    comm = _communicators().get(kind)
    if comm is None or comm.is_aborted() or comm._member.asked_for.name != chosen:
        return None
    needs_all = isinstance(comm._member.backend, SplitsInLibrary)
    return None if needs_all and not getattr(_here, "all_ranks_call", False) else comm


def _communicators() -> dict[str, Communicator]:
    import torch.distributed as dist

    from .process_group import UnicommProcessGroup

    group = dist.GroupMember.WORLD
    return group._comms if isinstance(group, UnicommProcessGroup) else {}


def _stay_out(backend: str | None) -> None:
    """Takes part in the split of a group that this rank is not a member of, if the library needs it."""
    from unicomm.comms.backend import SplitsInLibrary

    from .choice import chosen_backend

    for kind, one in devices_of_backend(backend).items():
        parent = parent_of(kind, chosen_backend(one, kind))
        if parent is not None and isinstance(parent._member.backend, SplitsInLibrary):
            parent.split([])
