"""Drives all members of a meeting at once, as threads over real stores."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, TCPStore

from tests.eventually import eventually
from tests.threads import outcomes
from unicomm.comms.errors import CommError
from unicomm.comms.membership.rendezvous import Rendezvous, meet

LONG = 60.0  # seconds; nothing here may come near it
KINDS = ("hash", "file", "tcp", "prefix")


def meet_all(store: Any, size: int, *, ranks: Sequence[int] | None = None, **options: Any) -> list[Any]:
    """Members `ranks` (all of them if not given) meet; `options` may be functions of the rank."""

    def call(rank: int) -> Any:
        chosen = {"name": "c", "timeout": LONG, "hello": {}}
        chosen.update({key: v(rank) if callable(v) else v for key, v in options.items()})
        return meet(store, chosen.pop("name"), rank, size, **chosen)

    return outcomes([partial(call, r) for r in (range(size) if ranks is None else ranks)])


def posts(ranks: Sequence[int], attempt: int = 0) -> list[str]:
    """The keys of members' posts in an attempt to meet: who has posted has come."""
    return [f"unicomm/c/world/{attempt}/0/{rank}" for rank in ranks]


def meet_in_vain(store: Any, size: int, ranks: Sequence[int], timeout: float, attempt: int = 0) -> list[Any]:
    """Members `ranks` meet; the last of them has the timeout, and calls when the others have come."""
    *others, last = ranks

    def call(rank: int) -> Any:
        if rank == last:
            eventually(lambda: store.check(posts(others, attempt)))
        return meet(store, "c", rank, size, timeout=timeout if rank == last else LONG, hello={})

    return outcomes([partial(call, r) for r in ranks])


def close_all(members: Sequence[Rendezvous]) -> None:
    for member in members:
        member.close()


def same_error(results: Sequence[Any], kind: type[CommError], culprits: Sequence[int]) -> CommError:
    """All members raised the same error; returns one."""
    for error in results:
        assert type(error) is kind, repr(error)
        assert error.culprits == tuple(culprits)
    assert len({error.message for error in results}) == 1
    first: CommError = results[0]
    return first


def make_store(kind: str, folder: Path) -> Any:
    """One store object that all the threads share, as threads of one process do."""
    if kind == "hash":
        return HashStore()
    if kind == "file":
        return FileStore(str(folder / "store"), -1)
    tcp = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return tcp if kind == "tcp" else PrefixStore("outer", PrefixStore("inner", tcp))


class Watched:
    """A store that runs a hook before each operation; stands for delays, crashes and interrupts."""

    def __init__(self, store: Any, hook: Callable[[str, tuple[Any, ...]], None]) -> None:
        self._store, self._hook = store, hook

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self._hook(operation, arguments)
            return getattr(self._store, operation)(*arguments)

        return call


@contextmanager
def quick(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


def exchange_all(members: Sequence[Rendezvous], values: Sequence[bytes], tag: str = "x") -> list[Any]:
    """These members exchange their value; `values` has one for each rank."""
    return outcomes([partial(m.exchange, tag, values[m.rank]) for m in members])
