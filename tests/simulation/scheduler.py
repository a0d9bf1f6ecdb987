"""A cooperative scheduler with virtual time.

Every thread of every simulated process is a task: a greenlet that runs until it calls a primitive of
primitives.py, network.py or simulated_store.py, which hands control back. The scheduler then picks the next
task by a random number generator. Time stands still while tasks run, apart from a microsecond a step, and
jumps to the next timer when none can run. So the seed alone determines everything that happens.
"""

from __future__ import annotations

import contextlib
import heapq
import random
import threading
from collections.abc import Callable
from typing import Any

import greenlet

_MASK = (1 << 64) - 1
START = 1000.0  # virtual time at the beginning
QUANTUM = 2e-6  # virtual seconds that a step takes
STEPS_A_SECOND = 50_000  # that six ranks which wait for a store may take; many fewer than fit into a second
_HERE = ("scheduler.py", "primitives.py", "network.py", "simulated_store.py", "simulated_library.py")


class Stuck(Exception):
    """The run does not come to its end. `where` says where each task waits, one line a task."""

    def __init__(self, kind: str, where: list[str]) -> None:
        super().__init__(f"{kind}:\n" + "\n".join(f"  {line}" for line in where))
        self.kind = kind
        self.where = where


class Process:
    """A simulated process: its tasks, and what the system does at its end.

    Attributes:
        number: of the process; -1 for the launcher, which hosts a store.
        stopped_until: while it is stopped, the virtual time when it goes on.
        at_end: called when the process is killed, such as by the system to close its sockets.
        owned: objects that a module has once per process, by name.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.dead = False
        self.died_at = float("inf")
        self.stopped_until = 0.0
        self.at_end: list[Callable[[], None]] = []
        self.owned: dict[str, Any] = {}
        self.countdown: list[list[Any]] = []  # faults: [steps until, action]
        self.on_resume: list[Callable[[], None]] = []


class Task:
    """A simulated thread."""

    __slots__ = (
        "blocked",
        "ending",
        "greenlet",
        "name",
        "number",
        "priority",
        "process",
        "thread",
        "token",
        "what",
        "woken",
    )

    def __init__(self, number: int, name: str, process: Process) -> None:
        self.number, self.name, self.process = number, name, process
        self.blocked = False
        self.woken = False
        self.token = 0
        self.what = "start"
        self.priority = 0.0
        self.greenlet: Any = None
        self.thread: Any = None
        self.ending: list[Callable[[], None]] = []


class Scheduler:
    """Runs the tasks of one simulation; see the module.

    Attributes:
        now: virtual time in seconds.
        current: the task that runs, None in the scheduler itself.
        thread: the number of the real thread in which all tasks run.
        digest: a checksum of the schedule so far: two runs with the same digest took the same steps.
        trace: lines about what happened, if they are kept.
    """

    def __init__(
        self, seed: int, *, steps: int = 200_000, seconds: float = 1500.0, trace: bool = False
    ) -> None:
        self.rng = random.Random(seed)
        self.now = START
        self.steps = 0
        self.current: Task | None = None
        self.digest = 0
        self.trace: list[str] | None = [] if trace else None
        self.closing = False
        self.tasks: list[Task] = []
        self._awaited: list[Task] = []
        self._most_steps, self._end = steps, self.now + seconds
        self._ready: list[Task] = []
        self._timers: list[tuple[float, int, Any, int]] = []
        self._count = 0
        self._hub = greenlet.getcurrent()
        self.thread = threading.get_ident()
        self._strategy = self.rng.choice(("random", "random", "priority", "sticky"))
        self._delays = self.rng.choice((0.0, 0.0, 0.002, 0.02))  # how often a thread is kept from running
        self._changes = {int(10 ** self.rng.uniform(0, 4.5)) for _ in range(self.rng.randrange(6))}
        self._last: Task | None = None
        self._switching = self.rng.choice((1.0, 0.5, 0.25))  # how often a primitive that need not wait yields
        self._stopped = 0.0  # until when a process is stopped

    # --- tasks ------------------------------------------------------------------------------------------

    def spawn(self, process: Process, name: str, run: Callable[[], None], awaited: bool = False) -> Task:
        """Makes a task that runs later. `awaited`: the simulation goes on until it is over."""
        task = Task(len(self.tasks), name, process)
        task.priority = self.rng.random()

        def body() -> None:
            try:
                run()
            finally:
                if not self.closing:
                    for action in task.ending:
                        action()

        task.greenlet = greenlet.greenlet(body, self._hub)
        self.tasks.append(task)
        self._ready.append(task)
        if awaited:
            self._awaited.append(task)
        return task

    def pause(self, what: str = "") -> None:
        """Lets other tasks run before the current one goes on."""
        task = self.current
        if self.closing:
            raise greenlet.GreenletExit
        if task is None or self.rng.random() > self._switching:
            return
        task.what = what
        self._ready.append(task)
        self._hub.switch()
        if self.closing:
            raise greenlet.GreenletExit

    def block(self, what: str, deadline: float | None = None) -> bool:
        """Suspends the current task until `wake`, which returns True, or until `deadline`: False."""
        task = self.current
        if self.closing:
            raise greenlet.GreenletExit
        assert task is not None, "only a task can wait"
        task.what = what
        task.blocked, task.woken = True, False
        task.token += 1
        if deadline is not None:
            self._push(deadline, task, task.token)
        self._hub.switch()
        if self.closing:
            raise greenlet.GreenletExit
        return task.woken

    def wake(self, task: Task) -> None:
        """Ends the wait of a task, if it waits."""
        if task.blocked and not task.process.dead:
            task.blocked, task.woken = False, True
            self._ready.append(task)

    def sleep(self, seconds: float, what: str = "sleep") -> None:
        self.block(what, self.now + max(0.0, seconds))

    def call_at(self, when: float, action: Callable[[], None]) -> None:
        """Has the scheduler call `action`, which must not wait, at that time."""
        self._push(when, action, -1)

    def note(self, text: str) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.now - START:12.6f}  {text}")

    def _push(self, when: float, what: Any, token: int) -> None:
        self._count += 1
        heapq.heappush(self._timers, (when, self._count, what, token))

    # --- faults -----------------------------------------------------------------------------------------

    def kill(self, process: Process) -> None:
        """Ends a process at once, as SIGKILL does: none of its tasks runs again."""
        if process.dead:
            return
        self.note(f"process {process.number} is killed")
        process.dead, process.died_at = True, self.now
        self._ready = [task for task in self._ready if task.process is not process]
        self._awaited = [task for task in self._awaited if task.process is not process]
        for action in process.at_end:
            action()
        self._resumed(process)

    def stop(self, process: Process, seconds: float) -> None:
        """Suspends a process for that time, as SIGSTOP and SIGCONT do."""
        if process.dead:
            return
        self.note(f"process {process.number} is stopped for {seconds:g} s")
        process.stopped_until = max(process.stopped_until, self.now + seconds)
        self._stopped = max(self._stopped, process.stopped_until)
        self.call_at(process.stopped_until, lambda: self._resumed(process))

    def is_dead(self, number: int) -> bool:
        """Whether the process of that number was killed."""
        return any(task.process.dead for task in self.tasks if task.process.number == number)

    @staticmethod
    def _resumed(process: Process) -> None:
        waiting, process.on_resume = process.on_resume, []
        for action in waiting:
            action()

    # --- the run ----------------------------------------------------------------------------------------

    def run(self) -> None:
        """Runs until all awaited tasks are over. Raises `Stuck` when they never will be."""
        while True:
            timers = self._timers
            while timers and timers[0][0] <= self.now:
                self._fire(heapq.heappop(timers))
            if not self._awaited:
                return
            ready = self._ready
            if self._stopped > self.now:
                ready = [task for task in ready if task.process.stopped_until <= self.now]
            if not ready:
                if not timers:
                    raise Stuck("deadlock: nothing can run, and no timer is left", self.whereabouts())
                self.now = max(self.now, timers[0][0])
                if self.now > self._end:
                    raise Stuck("hang: out of virtual time", self.whereabouts())
                continue
            self._step(ready)

    def close(self) -> None:
        """Ends all tasks that are left: their next primitive raises GreenletExit."""
        self.closing = True
        for task in self.tasks:
            if not task.greenlet.dead and task.greenlet:  # a greenlet that has started
                self.current = task
                with contextlib.suppress(BaseException):  # of the code that is torn down
                    task.greenlet.throw(greenlet.GreenletExit)
        self.current = None
        self.tasks.clear()
        self._awaited.clear()
        self._ready.clear()
        self._timers.clear()

    def _fire(self, timer: tuple[float, int, Any, int]) -> None:
        _, _, what, token = timer
        if token == -1:
            what()
        elif what.token == token and what.blocked:
            what.blocked = False
            if not what.process.dead:
                self._ready.append(what)

    def _step(self, ready: list[Task]) -> None:
        task = self._choose(ready)
        self.steps += 1
        if self.steps > self._most_steps + STEPS_A_SECOND * (self.now - START):
            raise Stuck("livelock: out of steps", self.whereabouts())
        process = task.process
        if process.countdown and self._count_down(process):
            return  # the fault has changed who may run
        self._ready.remove(task)
        rng = self.rng
        if self._delays and rng.random() < self._delays:
            self._delay(task, rng.choice((1e-4, 1e-3, 0.01, 0.05)))
            return
        self.now += QUANTUM
        self.digest = (self.digest * 1_000_003 + 31 * task.number + int(self.now * 1e7)) & _MASK
        if self.trace is not None:
            self.trace.append(f"{self.now - START:12.6f}  {task.name}: {task.what}")
        self._last = self.current = task
        task.greenlet.switch()
        self.current = None
        if task.greenlet.dead and task in self._awaited:
            self._awaited.remove(task)

    def _delay(self, task: Task, seconds: float) -> None:
        """Keeps a task that could run from running, as a busy machine does."""
        task.blocked = True
        task.token += 1  # its own timer, if it has one, must not end this
        self._push(self.now + seconds, task, task.token)

    def _choose(self, ready: list[Task]) -> Task:
        if len(ready) == 1:
            return ready[0]
        rng = self.rng
        if self._strategy == "priority":
            if self.steps in self._changes and self._last is not None:
                self._last.priority = -rng.random()
            if rng.random() > 0.02:  # a task that never waits would keep all others from running
                return max(ready, key=lambda task: task.priority)
        elif self._strategy == "sticky" and self._last in ready and rng.random() < 0.9:
            assert self._last is not None
            return self._last
        return ready[int(rng.random() * len(ready))]

    def _count_down(self, process: Process) -> bool:
        fired = False
        for fault in process.countdown:
            fault[0] -= 1
        for fault in [fault for fault in process.countdown if fault[0] <= 0]:
            process.countdown.remove(fault)
            fault[1]()
            fired = True
        return fired

    def whereabouts(self) -> list[str]:
        """Where each task of a live process is, outside the simulation itself."""
        lines = []
        for task in self.tasks:
            if task.greenlet.dead or task.process.dead:
                continue
            state = "stopped" if task.process.stopped_until > self.now else task.what
            lines.append(f"{task.name} ({state}) at {_place(task.greenlet.gr_frame)}")
        return lines


def _place(frame: Any) -> str:
    places: list[str] = []
    while frame is not None and len(places) < 5:
        file = frame.f_code.co_filename.rpartition("/")[2]
        if file not in _HERE:
            places.append(f"{file}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(places) or "its beginning"
