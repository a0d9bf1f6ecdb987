"""What the code under test gets for `threading`, `queue`, `time` and `secrets`: the same, over a scheduler.

Each object here is made for the run under way, which `current` names. Threads that are none of the
simulation, such as one that looks after a communicator of an earlier test, get the real modules.
"""

from __future__ import annotations

import collections
import queue
import random
import secrets
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from .scheduler import Process, Scheduler, Task

CLOCK_YIELDS = 0.1  # how often a look at the clock lets others run

_active: list[Scheduler] = []


def current() -> Scheduler:
    scheduler = _active[-1]
    assert threading.get_ident() == scheduler.thread, "a simulated object in a thread from outside"
    return scheduler


def _is_foreign() -> bool:
    """Whether the calling thread is none of the simulation."""
    return not _active or threading.get_ident() != _active[-1].thread


def activate(scheduler: Scheduler) -> None:
    _active.append(scheduler)


def deactivate() -> None:
    _active.pop()


def current_task() -> Task:
    task = current().current
    assert task is not None, "called outside of a simulated thread"
    return task


def current_process() -> Process:
    return current_task().process


class Facade:
    """A module as the code under test sees it: some names replaced, the others as they are."""

    def __init__(self, module: Any, **names: Any) -> None:
        self._module, self._names = module, names

    def __getattr__(self, name: str) -> Any:
        if name in self._names and not _is_foreign():
            return self._names[name]
        return getattr(self._module, name)


# --- time ---------------------------------------------------------------------------------------------------


def _monotonic() -> float:
    scheduler = current()
    if scheduler.current is not None and scheduler.rng.random() < CLOCK_YIELDS:
        scheduler.pause("clock")
    return scheduler.now


def _sleep(seconds: float) -> None:
    current().sleep(seconds)


sim_time = Facade(
    time,
    monotonic=_monotonic,
    time=_monotonic,
    perf_counter=_monotonic,
    monotonic_ns=lambda: int(_monotonic() * 1e9),
    time_ns=lambda: int(_monotonic() * 1e9),
    sleep=_sleep,
)


# --- threading ----------------------------------------------------------------------------------------------


class Lock:
    """`threading.Lock`. A task that waits for it gets it from the one that releases it, in random order."""

    def __init__(self) -> None:
        self._held = False
        self._waiters: list[Task] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = current()
        scheduler.pause("lock")
        if not self._held:
            self._held = True
            return True
        if not blocking:
            return False
        deadline = None if timeout < 0 else scheduler.now + timeout
        task = current_task()
        while self._held:
            self._waiters.append(task)
            woken = scheduler.block("lock", deadline)
            if not woken:
                if task in self._waiters:
                    self._waiters.remove(task)
                if self._held:
                    return False
        self._held = True
        return True

    def release(self) -> None:
        scheduler = current()
        if scheduler.closing:
            return
        if not self._held:
            raise RuntimeError("release unlocked lock")
        self._held = False
        if self._waiters:
            scheduler.wake(self._waiters.pop(scheduler.rng.randrange(len(self._waiters))))
        scheduler.pause("released")

    def locked(self) -> bool:
        return self._held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock:
    def __init__(self) -> None:
        self._lock = Lock()
        self._owner: Task | None = None
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._owner is not None and self._owner is current().current:
            self._depth += 1
            return True
        if not self._lock.acquire(blocking, timeout):
            return False
        self._owner, self._depth = current().current, 1
        return True

    def release(self) -> None:
        if current().closing:
            return
        if self._owner is not current().current:
            raise RuntimeError("cannot release un-acquired lock")
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
            self._lock.release()

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition:
    def __init__(self, lock: Any = None) -> None:
        self._lock = RLock() if lock is None else lock
        self._waiters: list[Task] = []
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> Any:
        return self._lock.__enter__()

    def __exit__(self, *arguments: object) -> None:
        self._lock.__exit__(*arguments)

    def wait(self, timeout: float | None = None) -> bool:
        scheduler, task = current(), current_task()
        depth = getattr(self._lock, "_depth", 1)
        if isinstance(self._lock, RLock):
            self._lock._depth = 1
        # In the list before the lock is released: a notification must not come in between.
        self._waiters.append(task)
        deadline = None if timeout is None else scheduler.now + timeout
        self._lock.release()
        woken = True
        if task in self._waiters:
            woken = scheduler.block("condition", deadline)
        if task in self._waiters:
            self._waiters.remove(task)
        self._lock.acquire()
        if isinstance(self._lock, RLock):
            self._lock._depth = depth
        return woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        end = None if timeout is None else current().now + timeout
        while not (result := predicate()):
            left = None if end is None else end - current().now
            if left is not None and left <= 0:
                break
            self.wait(left)
        return result

    def notify(self, n: int = 1) -> None:
        for _ in range(min(n, len(self._waiters))):
            current().wake(self._waiters.pop(0))

    def notify_all(self) -> None:
        self.notify(len(self._waiters))


class Event:
    def __init__(self) -> None:
        self._set = False
        self._waiters: list[Task] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        scheduler = current()
        waiters, self._waiters = self._waiters, []
        for task in waiters:
            scheduler.wake(task)
        if not scheduler.closing:
            scheduler.pause("event set")

    def clear(self) -> None:
        self._set = False
        current().pause("event cleared")

    def wait(self, timeout: float | None = None) -> bool:
        scheduler = current()
        scheduler.pause("event")
        if self._set:
            return True
        task = current_task()
        self._waiters.append(task)
        scheduler.block("event", None if timeout is None else scheduler.now + timeout)
        if task in self._waiters:
            self._waiters.remove(task)
        return self._set


class Thread:
    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: Any = (),
        kwargs: Any = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self.name = name or "thread"
        self.daemon = bool(daemon)
        self._target, self._args, self._kwargs = target, args, kwargs or {}
        self._task: Task | None = None
        self._over = Event()

    @property
    def ident(self) -> int | None:
        return None if self._task is None else self._task.number + 1

    native_id = ident

    def start(self) -> None:
        process = current_process()
        task = current().spawn(process, f"p{process.number}/{self.name}", self.run)
        task.thread, self._task = self, task
        task.ending.append(self._ended)
        current().pause("thread started")

    def _ended(self) -> None:
        self._over._set = True
        for task in self._over._waiters:
            current().wake(task)

    def run(self) -> None:
        if self._target is not None:
            self._target(*self._args, **self._kwargs)

    def is_alive(self) -> bool:
        return self._task is not None and not self._over.is_set()

    def join(self, timeout: float | None = None) -> None:
        self._over.wait(timeout)


class _MainThread(Thread):
    """The thread of a rank's program."""

    def __init__(self, task: Task) -> None:
        super().__init__(name=task.name)
        self._task = task


def _current_thread() -> Thread:
    task = current_task()
    if task.thread is None:
        task.thread = _MainThread(task)
    return task.thread  # type: ignore[no-any-return]


def _get_ident() -> int:
    task = current().current
    return 0 if task is None else task.number + 1


sim_threading = Facade(
    threading,
    Lock=Lock,
    RLock=RLock,
    Condition=Condition,
    Event=Event,
    Thread=Thread,
    current_thread=_current_thread,
    main_thread=_current_thread,
    get_ident=_get_ident,
)


# --- queue --------------------------------------------------------------------------------------------------


class SimpleQueue:
    def __init__(self) -> None:
        self._items: collections.deque[Any] = collections.deque()
        self._waiters: list[Task] = []

    def __class_getitem__(cls, _: object) -> type[SimpleQueue]:
        return cls

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        self._items.append(item)
        scheduler = current()
        if self._waiters:
            scheduler.wake(self._waiters.pop(0))
        scheduler.pause("queued")

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        scheduler = current()
        scheduler.pause("queue")
        deadline = None if timeout is None else scheduler.now + timeout
        task = current_task()
        while not self._items:
            if not block:
                raise queue.Empty
            self._waiters.append(task)
            woken = scheduler.block("queue", deadline)
            if task in self._waiters:
                self._waiters.remove(task)
            if not woken and not self._items:
                raise queue.Empty
        return self._items.popleft()

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)


sim_queue = Facade(queue, SimpleQueue=SimpleQueue)


# --- secrets ------------------------------------------------------------------------------------------------

_secrets: random.Random = random.Random(0)


def seed_secrets(seed: int) -> None:
    _secrets.seed(seed)


sim_secrets = Facade(
    secrets,
    token_hex=lambda n=32: _secrets.randbytes(n).hex(),
    token_bytes=lambda n=32: _secrets.randbytes(n),
)


class PerProcess:
    """An object that a module has once, as each simulated process has it: made at its first use there.

    `real` is the one of this process, for threads that are none of the simulation.
    """

    def __init__(self, name: str, make: Callable[[], Any], real: Any) -> None:
        self.__dict__["_place"] = SimpleNamespace(name=name, make=make, real=real)

    def _own(self) -> Any:
        if _is_foreign():
            return self._place.real
        owned, place = current_process().owned, self._place
        if place.name not in owned:
            owned[place.name] = place.make()
        return owned[place.name]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._own(), name, value)

    def __contains__(self, item: object) -> bool:
        return item in self._own()
